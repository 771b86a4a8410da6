"""KV cache for sampling, so that only new tokens run through the model.

Every attention layer of a rank has keys and values of all rows: [rows, KV heads, capacity, head dim]. A token takes KV heads x
(key width + value width) numbers a layer, in the dtype of the keys. With latent attention (MLA) on the Megatron engine it takes
latent + rotated width (DeepSeek-V3: 512 + 64, where keys and values of 128 heads have 40,960), on every tensor parallel rank, as
one key of one head whose first numbers are the value. Rows grow by one token at a time. Layers of linear attention keep a state
instead, of one size whatever the row's length. A micro batch's ``cached`` is its use of the cache: :class:`Prefill` (prefill) or
:class:`DecodeStep` (decode).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megascend.reference.attention_sinks import attention_with_sinks

PLAIN_LAYERS = ("full_attention", "sliding_attention")
"""Kinds of layer in ``layer_types`` whose decoding state is only keys and values."""
SMALLEST = 64
"""Initial capacity in tokens; it is doubled when it is used up."""


def other_attention(config: Any, recurrent: Sequence[str] = ()) -> str | None:
    """Return the part of a transformers model whose decoding state the cache does not cover, or None.

    Args:
        recurrent: further kinds of layer in ``layer_types`` that are covered, by a state.
    """
    text = config.get_text_config()
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - {*PLAIN_LAYERS, *recurrent})
    if kinds:
        return f"layers of kind {kinds[0]}"
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    # As text: each kind of layer may have its own nested settings.
    if any(kind in str(rope) for kind in ("'dynamic'", "'longrope'")):
        return "rotary embeddings that depend on the length"
    if any(getattr(text, name, None) for name in ("attn_logit_softcapping", "attn_logit_softcap")):
        return "a cap of the scores"
    return None


class KeyValues:
    """KV cache of this rank's rows.

    Args:
        rows: number of rows.
        longest: upper bound of a row's length in tokens.

    Attributes:
        lengths: cached tokens of each row.
        layers: number of attention layers that have written.
    """

    def __init__(self, rows: int, longest: int, device: torch.device) -> None:
        self.lengths = [0] * rows
        self._longest, self._device = longest, device
        # By transformers' layer_idx or Megatron's layer_number.
        # (keys, values), or (keys,) of which a part is the values.
        self._layers: dict[Hashable, tuple[Tensor, ...]] = {}
        self._states: dict[Hashable, Tensor] = {}  # [rows, ...]
        self._positions, self._visible = torch.empty(0), torch.empty(0)

    @property
    def layers(self) -> int:
        return len(self._layers)

    @property
    def bytes(self) -> int:
        """Memory of all keys, values and states."""
        tensors = [tensor for tensors in self._layers.values() for tensor in tensors] + list(self._states.values())
        return sum(tensor.nbytes for tensor in tensors)

    def fill(self, layer: Hashable, row: int, *states: Tensor) -> None:
        """Write the first keys and values [tokens, heads, head dim] of a row; keys alone where values are a part of them."""
        tokens = len(states[0])
        if layer not in self._layers:
            capacity = max(tokens, min(SMALLEST, self._longest))
            rows = len(self.lengths)
            # Zeros: masked positions take part in the products, and 0 times the NaN of unwritten memory is NaN.
            self._layers[layer] = tuple(
                tensor.new_zeros(rows, tensor.shape[1], capacity, tensor.shape[2]) for tensor in states
            )
        self._reserve(layer, tokens)
        for cache, tensor in zip(self._layers[layer], states, strict=True):
            cache[row, :, :tokens] = tensor.transpose(0, 1)
        self.lengths[row] = tokens

    def fill_state(self, key: Hashable, row: int, state: Tensor, tokens: int) -> None:
        """Write the state of a row after its first ``tokens``, of any shape and dtype that all rows share."""
        if key not in self._states:
            self._states[key] = state.new_zeros(len(self.lengths), *state.shape)
        self._states[key][row] = state
        self.lengths[row] = tokens

    def state(self, key: Hashable, rows: slice) -> Tensor:
        """Return the states of rows; writing to them changes the cache's."""
        return self._states[key][rows]

    def take(self, rows: Sequence[int]) -> None:
        """Replace the rows by these of them, in this order; a row that is listed several times is copied."""
        # No row has ended or is to be copied: the caches stay in place.
        if list(rows) == list(range(len(self.lengths))):
            return
        index = torch.tensor(list(rows), dtype=torch.int64, device=self._device)
        for layer, tensors in self._layers.items():
            self._layers[layer] = tuple(tensor.index_select(0, index) for tensor in tensors)
        for key, states in self._states.items():
            self._states[key] = states.index_select(0, index)
        self.lengths = [self.lengths[row] for row in rows]

    def begin(self) -> None:
        """Reserve the position of every row's next token, and compute the attention mask that all layers share."""
        longest = max(self.lengths) + 1
        for layer in self._layers:
            self._reserve(layer, longest)
        # Once for all layers and for the micro batches of all pipeline stages, so that each layer copies nothing from the host.
        self._positions = torch.tensor(self.lengths, device=self._device)
        # Rows differ in length: shorter ones end with zeros, which are not keys.
        self._visible = torch.arange(longest, device=self._device) <= self._positions[:, None]

    def attend(
        self,
        rows: slice,
        layer: Hashable,
        query: Tensor,
        key: Tensor,
        value: Tensor | int,
        scale: float | None,
        window: int | None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Write each row's new key and value, and compute the new token's attention over its row, itself included.

        Args:
            rows: the rows of the tokens.
            query: [rows, heads, head dim]; ``key`` and ``value`` may have fewer heads, as in grouped-query attention.
            value: [rows, heads, head dim]; or the width of the values, if they are the first numbers of the keys.
            scale: factor of the attention scores; None: 1 / sqrt(head dim).
            window: tokens that each token attends to, itself included; None: all.
            sink: [heads], a logit of each head that takes part in the softmax and has no value.

        Returns:
            [rows, heads, head dim of the values].
        """
        # rows is a slice, so these are views, and the writes below reach the cache.
        keys, *rest = (cache[rows] for cache in self._layers[layer])
        positions, visible = self._positions[rows], self._visible[rows]
        indices, longest = torch.arange(len(query), device=query.device), visible.shape[1]
        # Rows differ in length, so that each one's token is written at a position of its own.
        keys[indices, :, positions] = key
        if isinstance(value, Tensor):
            (values,) = rest
            values[indices, :, positions] = value
        else:
            values = keys[..., :value]
        if window is not None:
            visible = visible & (torch.arange(longest, device=query.device) > positions[:, None] - window)
        # The query heads of a KV head become its query tokens: keys and values need no copy per query head.
        grouped = query.unflatten(1, (key.shape[1], -1))
        keys, values, mask = keys[:, :, :longest], values[:, :, :longest], visible[:, None, None]
        if sink is not None:
            logits = sink.view(1, *grouped.shape[1:3], 1)
            return attention_with_sinks(grouped, keys, values, mask, logits, scale=scale).flatten(1, 2)
        return scaled_dot_product_attention(grouped, keys, values, mask, scale=scale).flatten(1, 2)

    def advance(self) -> None:
        """Count the new tokens, after all layers have written theirs."""
        self.lengths = [length + 1 for length in self.lengths]

    def _reserve(self, layer: Hashable, tokens: int) -> None:
        tensors = self._layers[layer]
        capacity = tensors[0].shape[2]
        if tokens > capacity:
            # Doubled, so that rows are copied a logarithmic number of times.
            added = max(tokens, min(2 * capacity, self._longest)) - capacity
            self._layers[layer] = tuple(torch.nn.functional.pad(cache, (0, 0, 0, added)) for cache in tensors)


@dataclass(frozen=True)
class Prefill:
    """Prefill: a micro batch of complete rows, whose keys and values are written to the cache.

    Attributes:
        rows: the row in ``cache`` of each sample.
        lengths, padded_lengths: unpadded and padded lengths of the samples.
    """

    cache: KeyValues
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]

    def keep(self, layer: Hashable, *states: Tensor) -> None:
        """Write a layer's keys and values: [tokens, heads, head dim] of packed samples, [batch, tokens, ...] of padded ones."""
        by_row = (self.split(tensor if tensor.dim() == 3 else tensor.flatten(0, 1)) for tensor in states)
        for row, *row_states in zip(self.rows, *by_row, strict=True):
            self.cache.fill(layer, row, *row_states)

    def split(self, values: Tensor) -> Iterator[Tensor]:
        """Yield the part of each sample, without its padding, of values [tokens, ...]."""
        parts = values.split(self.padded_lengths)
        return (part[:length] for part, length in zip(parts, self.lengths, strict=True))


@dataclass(frozen=True)
class DecodeStep:
    """Decode: a micro batch of new tokens, one for each of ``rows`` of ``cache`` in order, then padding."""

    cache: KeyValues
    rows: slice

    def attend(
        self,
        layer: Hashable,
        query: Tensor,
        key: Tensor,
        value: Tensor | int,
        scale: float | None,
        window: int | None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Call :meth:`KeyValues.attend`; rows of padding are 0."""
        count = self.rows.stop - self.rows.start
        padding = len(query) - count
        value = value[:count] if isinstance(value, Tensor) else value
        mixed = self.cache.attend(self.rows, layer, query[:count], key[:count], value, scale, window, sink)
        return torch.nn.functional.pad(mixed, (0, 0, 0, 0, 0, padding)) if padding else mixed
