"""KV cache in Megatron's attention.

A micro batch of new tokens runs as one sequence [n, 1], with rotary angles of each token's own position and attention within each
token's row. All other layers treat tokens independently, so that sequence parallelism, experts, pipeline stages and adapters of
several tenants work as in training. Megatron's static inference context has one position for all rows of a batch, which must then
be of one length, and its dynamic one needs flash attention's paged kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.extensions import transformer_engine as te
from torch import Tensor

from megascend.batch.micro_batch import MicroBatch
from megascend.changes import patched
from megascend.engines.key_values import Filling, Growing
from megascend.engines.megatron.graph_support import ROPE_OF_LENGTH
from megascend.topology.topology import Topology


def unsupported_reason(chunks: Sequence[Any], config: Any, topology: Topology, platform: str) -> str | None:
    """Return the reason why this model cannot have a KV cache, or None."""
    rope = config.rope_scaling or {}
    if topology.context > 1:
        return f"parallel.context={topology.context}"
    if platform == "npu":
        return "attention on NPUs is MindSpeed's"
    if config.position_embedding_type not in ("rope", "none", "learned_absolute"):
        return f"position embedding {config.position_embedding_type}"
    if rope.get("rope_type", rope.get("type")) in ROPE_OF_LENGTH:
        return "rotary embeddings that depend on the length"
    if getattr(config, "softmax_type", "vanilla") not in ("vanilla", "learnable"):
        return f"attention with softmax_type={config.softmax_type}"
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            core = getattr(getattr(layer, "self_attention", None), "core_attention", None)
            if not isinstance(core, te.TEDotProductAttention):
                return f"a layer whose attention is {type(core or layer).__name__}"
            if getattr(config, "window_size", None) is not None and not hasattr(core, "window_size"):
                return f"attention in a window that {type(core).__name__} does not tell"
    return None


@dataclass(frozen=True)
class _Attention:
    """A layer's attention: its number, scale of products, window in tokens, sinks [heads], and its own forward."""

    layer: int
    scale: float | None
    window: int | None
    sink: Tensor | None
    forward: Callable[..., Tensor]


class CachedAttention:
    """Patches of a rank's attention layers that read and write the KV cache.

    Attributes:
        batch: the current micro batch; its ``cached`` is its use of the cache.
    """

    def __init__(self, chunks: Sequence[Any], config: Any) -> None:
        self._chunks = chunks
        self._scale: float | None = getattr(config, "softmax_scale", None)
        # Latent attention pads packed values to the width of keys; the cache holds them without the padding.
        self._value_width: int | None = config.v_head_dim if config.multi_latent_attention else None
        self.batch: MicroBatch | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Patch the attention layers within the context; micro batches without ``cached`` run as before."""
        why = "sampling: keys and values of earlier tokens are kept"
        with contextlib.ExitStack() as stack:
            for chunk in self._chunks:
                rotary = getattr(chunk, "rotary_pos_emb", None)
                if rotary is not None:
                    stack.enter_context(patched(rotary, "forward", partial(self._angles, rotary.forward), why))
                for layer in chunk.decoder.layers:
                    core = layer.self_attention.core_attention
                    # Transformer Engine's window does not count the token itself; -1: no window.
                    left, _ = getattr(core, "window_size", None) or (-1, 0)
                    window = None if left < 0 else left + 1
                    # Latent attention's scale includes YaRN's, which the configuration does not.
                    scale = getattr(layer.self_attention, "softmax_scale", self._scale)
                    sink = getattr(core, "softmax_offset", None)
                    attention = _Attention(layer.layer_number, scale, window, sink, core.forward)
                    forward = partial(self._attend, attention)
                    stack.enter_context(patched(core, "forward", forward, why))
            try:
                yield
            finally:
                self.batch = None

    @property
    def _cached(self) -> Filling | Growing | None:
        return None if self.batch is None else self.batch.cached

    def _angles(self, forward: Any, length: int, *args: Any, **kwargs: Any) -> Tensor:
        """Compute rotary angles [tokens, 1, 1, head dim]; in decoding, those of each token's own position."""
        if self.batch is None or not isinstance(self.batch.cached, Growing):
            return forward(length, *args, **kwargs)
        # Megatron asks for the angles of a length: take the table up to the longest row, and each token's position
        # from it.
        positions = self.batch.position_ids[0]
        return forward(max(self.batch.cached.cache.lengths) + 1, *args, **kwargs)[positions]

    def _attend(
        self,
        attention: _Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        cached = self._cached
        if isinstance(cached, Growing):  # [tokens, 1, heads, head dim]
            mixed = cached.attend(
                attention.layer,
                query[:, 0],
                key[:, 0],
                value[:, 0],
                attention.scale,
                attention.window,
                attention.sink,
            )
            # Megatron's core attention returns [tokens, batch, heads * head dim].
            return mixed.flatten(1)[:, None]
        if cached is not None:
            states = (key, value[..., : self._value_width])
            cached.keep(
                attention.layer, *(tokens if tokens.dim() == 3 else tokens.transpose(0, 1) for tokens in states)
            )
        return attention.forward(query, key, value, *args, **kwargs)
