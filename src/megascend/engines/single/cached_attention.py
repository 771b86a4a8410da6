"""KV cache in a transformers model's attention, independent of the attention function used in training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from megascend.changes import changed
from megascend.engines.common import linear_attention
from megascend.engines.common.key_values import DecodeStep, Prefill, other_attention
from megascend.errors import ConfigError
from megascend.training.batch.micro_batch import MicroBatch

REFUSED = ("softcap",)
"""Options of an attention function that the cached attention does not compute."""


def unsupported_reason(model: Any) -> str | None:
    """Return the reason why this model cannot have a KV cache, or None."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = model.config.get_text_config()._attn_implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        return f"attention of kind {name}"
    return other_attention(model.config, linear_attention.covered_kinds(model))


class CachedAttentionFunction:
    """Wrapper of a model's attention function that reads and writes the KV cache.

    Args:
        tower: a vision tower, whose attention may have the same function and is left alone.

    Attributes:
        batch: the current micro batch; its ``cached`` is its use of the cache.
    """

    def __init__(self, model: Any, tower: nn.Module | None = None) -> None:
        self._model, self._name = model, model.config.get_text_config()._attn_implementation
        self._modules = set(model.modules()) - (set() if tower is None else set(tower.modules()))
        self.batch: MicroBatch | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the attention function within the context; micro batches without ``cached`` run as before."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        before = ALL_ATTENTION_FUNCTIONS[self._name]
        changed(
            f"transformers' attention function {self._name!r}", "sampling: keys and values of earlier tokens are kept"
        )

        def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
            # The registry is the process's: another model may use the same function.
            cached = self.batch.cached if self.batch is not None and module in self._modules else None
            if cached is None:
                return before(module, query, key, value, *args, **options)
            return self._attend(cached, before, module, (query, key, value), args, options)

        ALL_ATTENTION_FUNCTIONS[self._name] = attention
        try:
            with linear_attention.cached_delta_rules(self._model, lambda: self.batch and self.batch.cached):
                yield
        finally:
            ALL_ATTENTION_FUNCTIONS[self._name] = before
            self.batch = None

    def _attend(
        self,
        cached: Prefill | DecodeStep,
        before: Callable[..., Any],
        module: Any,
        states: tuple[Tensor, Tensor, Tensor],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        """Compute attention as ``transformers.AttentionInterface``: [batch, heads, tokens, d] to [batch, tokens, heads, d]."""
        refused = [name for name in REFUSED if options.get(name) is not None]
        if refused:
            raise ConfigError(
                f"engine single: attention with {refused[0]} ({type(module).__name__}) has no cache; set Sampler(cache=False)"
            )
        if isinstance(cached, DecodeStep):
            q, k, v = (part[0].transpose(0, 1) for part in states)
            window = options.get("sliding_window")
            return cached.attend(module.layer_idx, q, k, v, options.get("scaling"), window, options.get("s_aux"))[
                None
            ], None
        cached.keep(module.layer_idx, *(part.transpose(1, 2) for part in states[1:]))
        return before(module, *states, *args, **options)
