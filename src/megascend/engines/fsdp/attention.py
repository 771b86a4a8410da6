"""Causal attention within each sample, as an attention function for transformers models.

The layout of the micro batch is passed to the model as a keyword that its layers pass on. A model whose layers do not is
rejected: samples would attend to each other.

Under sequence parallelism (Jacobs et al. 2023, DeepSpeed-Ulysses) ranks hold parts of every sample, and in attention complete
samples with a part of the heads. Queries, keys, values and the result are exchanged in each layer's attention; the rest of the
model is unaware of it. Recomputation repeats the exchanges in the same order on all ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascend.changes import changed
from megascend.engines.common.key_values import DecodeStep, Prefill
from megascend.engines.common.sample_attention import causal, one_by_one, prefix_attention
from megascend.engines.fsdp.expert_parallel import exchange
from megascend.errors import ConfigError, TopologyError
from megascend.training.kernels import npu, varlen
from megascend.training.kernels.host_copy import to_device
from megascend.training.kernels.prefix_attention import PrefixLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

KEYWORD = "sample_lengths"
KNOWN_TENSORS = ("position_ids", "position_embeddings", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "s_aux")
"""Keywords with tensors that do not change which tokens attend to each other, or how, and sinks (``s_aux``)."""

LONG = 1024
"""Average length in tokens above which one call per packed sample is faster than the varlen kernel for all of them. Time of the
calls relative to the kernel on an H200 (torch 2.11, bf16, forward and backward): 11.2 at 64 tokens, 2.9 at 256, 1.08 at 1024,
0.68 at 4096."""


def check_heads(heads: int, kv_heads: int, size: int) -> None:
    """Raise TopologyError unless ``size`` divides a model's heads; KV heads are repeated if there are fewer than ranks."""
    if heads % size or heads % math.lcm(kv_heads, size):
        raise TopologyError(
            f"parallel.context={size} does not divide the model's {heads} attention heads ({kv_heads} of keys and values, "
            "repeated for more ranks); choose a size that does"
        )


class HeadExchange:
    """All-to-all from parts of samples with all heads to complete samples with a part of the heads, and back."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._size = group, dist.get_world_size(group)

    def to_heads(self, states: Tensor) -> Tensor:
        """Exchange [batch, heads, tokens of a rank, d] for [batch, heads of a rank, tokens of all ranks in rank order, d]."""
        # With fewer KV heads than ranks each rank gets a copy of the KV head of its query heads.
        heads = math.lcm(states.shape[1], self._size)
        states = states.repeat_interleave(heads // states.shape[1], dim=1)
        batch, _, tokens, size = states.shape
        by_rank = states.reshape(batch, self._size, -1, tokens, size).movedim(1, 0)
        return exchange(None, None, self._group, by_rank)[0].movedim(0, 2).reshape(batch, -1, self._size * tokens, size)

    def own_heads(self, values: Tensor) -> Tensor:
        """Return this rank's part of [heads], those that :meth:`to_heads` gives it of queries."""
        return values.chunk(self._size)[dist.get_rank(self._group)]

    def to_tokens(self, states: Tensor) -> Tensor:
        """Undo :meth:`to_heads`."""
        batch, heads, tokens, size = states.shape
        by_rank = states.reshape(batch, heads, self._size, tokens // self._size, size).movedim(2, 0)
        return (
            exchange(None, None, self._group, by_rank)[0].movedim(0, 1).reshape(batch, -1, tokens // self._size, size)
        )

    def order(self, lengths: tuple[int, ...]) -> Tensor:
        """Return the positions of the tokens of packed samples after :meth:`to_heads`, sample by sample, int64 [tokens]."""
        parts = torch.tensor([length // self._size for length in lengths])
        rank_tokens = int(parts.sum())
        starts = (parts.cumsum(0) - parts).tolist()
        runs = [
            torch.arange(rank * rank_tokens + start, rank * rank_tokens + start + part)
            for start, part in zip(starts, parts.tolist(), strict=True)
            for rank in range(self._size)
        ]
        return torch.cat(runs)


@dataclass(frozen=True)
class SampleLengths:
    """Layout of the samples of a micro batch in its tensors.

    A compiled layer may depend on which of the attributes are None, and on nothing else here: lengths differ between micro
    batches, and every new value would recompile it.

    Attributes:
        packed: tokens of each sample, one after the other in one row; None: one sample a row, padded on the right.
        exchange: communication with the ranks that hold the samples' other parts; None: this rank has complete samples.
        order: order of the tokens of packed samples after the exchange.
        one_kernel: the device has a varlen kernel for this dtype, and the packed samples are short enough to gain by it.
        starts: int32 [samples + 1], the start of each packed sample, and the number of tokens; None if none are packed.
        longest: int64 [2] on the host: tokens of the longest packed sample, as queries and as keys.
        cached: the micro batch's use of the KV cache.
        prefixes: rows of samples whose prefixes are computed once; all else is then left out.
    """

    packed: tuple[int, ...] | None
    exchange: HeadExchange | None = None
    order: Tensor | None = None
    one_kernel: bool = False
    starts: Tensor | None = None
    longest: Tensor | None = None
    cached: Prefill | DecodeStep | None = None
    prefixes: PrefixLayout | None = None

    @cached_property
    def sample_index(self) -> Tensor:
        """Return the number of each packed token's sample, int32 [1, tokens]."""
        assert self.packed is not None
        assert self.starts is not None
        numbers = torch.arange(len(self.packed), dtype=torch.int32, device=self.starts.device)
        return numbers.repeat_interleave(self.starts.diff(), output_size=sum(self.packed))[None]


def sample_lengths(
    packed: tuple[int, ...] | None,
    exchange: HeadExchange | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    compiled: bool = False,
    cached: Prefill | DecodeStep | None = None,
) -> SampleLengths:
    """Build the layout of a micro batch's samples on the host; nothing waits for the device.

    Args:
        packed: tokens of each sample, padding included; None: a padded batch.
        dtype: dtype of queries, keys and values.
        compiled: layers are compiled: always use the kernel, since calls per sample would break the graph.
    """
    if packed is None:
        return SampleLengths(None, exchange, cached=cached)
    order = None if exchange is None else to_device(exchange.order(packed), device)
    starts = torch.tensor((0, *accumulate(packed)), dtype=torch.int32)
    return SampleLengths(
        packed,
        exchange,
        order,
        one_kernel=(compiled or sum(packed) <= LONG * len(packed)) and varlen.available(device, dtype),
        starts=to_device(starts, device),
        longest=torch.tensor([max(packed)] * 2),
        cached=cached,
    )


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention as a ``transformers.AttentionInterface``.

    Args:
        query: [batch, heads, tokens, head dim]; ``key`` and ``value`` may have fewer heads.
        sliding_window: tokens that each token attends to, itself included; None: all before it.
        options: must include ``sample_lengths``.

    Returns:
        [batch, tokens, heads, head dim], contiguous as transformers' own functions return it, and None for the weights.
    """
    lengths = options.get(KEYWORD)
    if not isinstance(lengths, SampleLengths):
        raise ConfigError(
            f"engine fsdp: {type(module).__name__} does not pass keywords on to its attention function, so that samples in one "
            "micro batch would attend to each other; use engine single"
        )
    # Refused, since this function builds its own mask and would ignore the model's.
    feature = _unknown(module, attention_mask, options)
    if feature is not None:
        raise ConfigError(
            f"engine fsdp: attention with {feature} ({type(module).__name__}) is not supported; use engine single"
        )
    sinks: Tensor | None = options.get("s_aux")
    if lengths.cached is not None:
        mixed = cached_attention(module, query, key, value, lengths, scaling, sliding_window, sinks)
        # Contiguous, as transformers' own attention functions return it.
        return mixed.contiguous(), None
    if lengths.exchange is None:
        mixed = _sample_attention(query, key, value, lengths, scaling, dropout, sliding_window, sinks)
        return mixed.transpose(1, 2).contiguous(), None
    q, k, v = (_sorted(lengths.exchange.to_heads(part), lengths.order) for part in (query, key, value))
    if sinks is not None:
        sinks = lengths.exchange.own_heads(sinks)
    mixed = _sample_attention(q, k, v, lengths, scaling, dropout, sliding_window, sinks)
    # Back to the order of the exchange: parts by rank, not sample by sample.
    mixed = _sorted(mixed, None if lengths.order is None else lengths.order.argsort())
    return lengths.exchange.to_tokens(mixed).transpose(1, 2).contiguous(), None


def _unknown(module: Any, mask: Tensor | None, options: dict[str, Any]) -> str | None:
    """Return a requested feature of attention that is not supported: a mask, a cap, biases, chosen tokens; or None."""
    if mask is not None:
        return "an attention mask"
    if options.get("is_causal") is False or not getattr(module, "is_causal", True):
        fields = module.config.to_dict().items() if hasattr(module, "config") else ()
        named = [f"{name}={value!r}" for name, value in fields if "bidirectional" in name and value]
        return named[0] if named else "is_causal=False"
    if options.get("softcap") is not None:
        return "softcap"
    # Any other tensor may be a bias or a choice of tokens: unknown options are refused, never ignored.
    tensors = (name for name, value in options.items() if isinstance(value, Tensor) and name not in KNOWN_TENSORS)
    return next(tensors, None)


def cached_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: SampleLengths,
    scaling: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention without dropout for complete samples, which are written to the KV cache, or for new tokens."""
    if isinstance(lengths.cached, DecodeStep):
        q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
        return lengths.cached.attend(module.layer_idx, q, k, v, scaling, window, sinks)[None]
    assert lengths.cached is not None
    states = (part.transpose(1, 2) if lengths.packed is None else part[0].transpose(0, 1) for part in (key, value))
    lengths.cached.keep(module.layer_idx, *states)
    return _sample_attention(query, key, value, lengths, scaling, 0.0, window, sinks).transpose(1, 2)


def uncached_reason(model: Any) -> str | None:
    """Return the reason why :func:`caching_rows` cannot let this model have a KV cache, or None."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = model.config.get_text_config()._attn_implementation
    return None if name in ALL_ATTENTION_FUNCTIONS else f"attention of kind {name}"


@contextlib.contextmanager
def caching_rows(
    model: Any, tower: nn.Module | None, cached: Callable[[], Prefill | DecodeStep | None]
) -> Iterator[None]:
    """Let a model with transformers' own attention write and read the KV cache within the context.

    Args:
        tower: a vision tower, whose attention may have the same function and is left alone.
        cached: returns the current micro batch's use of the cache; None: attention is transformers'.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = model.config.get_text_config()._attn_implementation
    # The registry is the process's: another model may use the same function.
    modules = set(model.modules()) - (set() if tower is None else set(tower.modules()))
    before = ALL_ATTENTION_FUNCTIONS[name]

    def run(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        use = cached() if module in modules else None
        if use is None:
            return before(module, query, key, value, *args, **options)
        if options.get("softcap") is not None:
            raise ConfigError(
                f"engine single: attention with softcap ({type(module).__name__}) has no cache; set Sampler(cache=False)"
            )
        if isinstance(use, DecodeStep):
            scaling, window, sinks = (options.get(option) for option in ("scaling", "sliding_window", "s_aux"))
            return cached_attention(
                module, query, key, value, SampleLengths(None, cached=use), scaling, window, sinks
            ), None
        use.keep(module.layer_idx, key.transpose(1, 2), value.transpose(1, 2))
        return before(module, query, key, value, *args, **options)

    changed(f"transformers' attention function {name!r}", "sampling: keys and values of earlier tokens are kept")
    ALL_ATTENTION_FUNCTIONS[name] = run
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = before


def _sorted(states: Tensor, order: Tensor | None) -> Tensor:
    return states if order is None else states.index_select(2, order)


def _sample_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: SampleLengths,
    scaling: float | None,
    dropout: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention within complete samples: [batch, heads, tokens, head dim]; ``sinks``: [heads], see ``s_aux``."""
    npu_device = query.device.type == "npu"
    if npu_device and sinks is not None:
        raise ConfigError("engine fsdp: attention with sinks (s_aux) has no kernel on NPUs; use engine single")
    if lengths.prefixes is not None:
        assert dropout == 0, "prefixes are not shared with dropout"
        return prefix_attention(query, key, value, lengths.prefixes, scaling, window, sinks)
    if npu_device:
        return npu.causal_attention(query, key, value, lengths.packed, scaling=scaling, dropout=dropout, window=window)
    if lengths.packed is None or lengths.starts is None or lengths.longest is None:
        return causal(query, key, value, scaling, dropout, window, sinks)
    # With sinks a call per sample has no flash kernel, however long the sample is.
    one_kernel = lengths.one_kernel or (sinks is not None and varlen.available(query.device, query.dtype))
    if one_kernel and varlen.fits(query, value, dropout):
        starts = lengths.starts, lengths.starts
        return varlen.attention(query, key, value, *starts, lengths.longest, scaling, window, sinks)
    packed = lengths.packed, lengths.packed
    return _one_by_one_uncompiled(query, key, value, packed, scaling, dropout, window, sinks)


# Compiled code would depend on every length.
_one_by_one_uncompiled: Any = torch.compiler.disable(one_by_one)
