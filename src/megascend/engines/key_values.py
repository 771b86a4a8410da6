"""Keys and values of tokens that have been through a model, so that only what is new has to.

Every attention layer of a rank has its own, of all rows: [rows, heads of keys and values, capacity, head dim]. Rows grow by one
token at a time. What a micro batch does with them is said by its ``cached``: :class:`Filling` or :class:`Growing`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

PLAIN_LAYERS = ("full_attention", "sliding_attention")
"""Kinds of layer, as ``layer_types`` has them, with nothing to keep but keys and values."""
SMALLEST = 64
"""Tokens that there is room for at first; capacity is doubled when it is used up."""


def other_attention(config: Any) -> str | None:
    """Return what a transformers model has beside attention whose keys and values can be kept; None: nothing."""
    text = config.get_text_config()
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - set(PLAIN_LAYERS))
    if kinds:
        return f"layers of kind {kinds[0]}"
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if any(kind in str(rope) for kind in ("'dynamic'", "'longrope'")):
        return "rotary embeddings that depend on the length"
    if any(getattr(text, name, None) for name in ("attn_logit_softcapping", "attn_logit_softcap")):
        return "a cap of the scores"
    return None


class KeyValues:
    """Of rows on this rank.

    Args:
        rows: how many.
        longest: tokens that no row ever has more than.

    Attributes:
        lengths: tokens of each row whose keys and values are there.
        layers: attention layers that have written.
    """

    def __init__(self, rows: int, longest: int, device: torch.device) -> None:
        self.lengths = [0] * rows
        self._longest, self._device = longest, device
        self._layers: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._positions, self._visible = torch.empty(0), torch.empty(0)

    @property
    def layers(self) -> int:
        return len(self._layers)

    @property
    def bytes(self) -> int:
        """Memory that they take."""
        return sum(part.numel() * part.element_size() for pair in self._layers.values() for part in pair)

    def fill(self, layer: Hashable, row: int, keys: Tensor, values: Tensor) -> None:
        """Take the first keys and values [tokens, heads, head dim] of a row."""
        if layer not in self._layers:
            room = max(len(keys), min(SMALLEST, self._longest))
            self._layers[layer] = tuple(of.new_zeros(len(self.lengths), of.shape[1], room, of.shape[2]) for of in (keys, values))  # type: ignore[assignment]  # fmt: skip
        self._reserve(layer, len(keys))
        for whole, of in zip(self._layers[layer], (keys, values), strict=True):
            whole[row, :, : len(of)] = of.transpose(0, 1)
        self.lengths[row] = len(keys)

    def take(self, rows: Sequence[int]) -> None:
        """Go on with these of the rows, in this order; one may be there several times, and each goes its own way then."""
        if list(rows) == list(range(len(self.lengths))):
            return
        index = torch.tensor(list(rows), dtype=torch.int64, device=self._device)
        for layer in self._layers:
            keys, values = self._layers[layer]
            self._layers[layer] = keys.index_select(0, index), values.index_select(0, index)
        self.lengths = [self.lengths[row] for row in rows]

    def begin(self) -> None:
        """All rows get a token next: it will be at the place that ``lengths`` has."""
        most = max(self.lengths) + 1
        for layer in self._layers:
            self._reserve(layer, most)
        self._positions = torch.tensor(self.lengths, device=self._device)
        self._visible = torch.arange(most, device=self._device) <= self._positions[:, None]

    def attend(
        self,
        rows: slice,
        layer: Hashable,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        """What each row's new token gets from its row's tokens, itself among them, whose keys and values are kept.

        Args:
            rows: those that the tokens are of.
            query: [rows, heads, head dim]; ``key`` and ``value`` may have fewer heads, each for as many of the query's in a row.
            scale: of the products; None: one by the root of the head dim.
            window: tokens that each token sees, itself among them; None: all.

        Returns:
            [rows, heads, head dim of the values].
        """
        keys, values = (of[rows] for of in self._layers[layer])
        positions, visible = self._positions[rows], self._visible[rows]
        every, most = torch.arange(len(query), device=query.device), visible.shape[1]
        keys[every, :, positions] = key
        values[every, :, positions] = value
        if window is not None:
            visible = visible & (torch.arange(most, device=query.device) > positions[:, None] - window)
        grouped = query.unflatten(1, (key.shape[1], -1))  # heads of one group as if they were tokens
        mixed = scaled_dot_product_attention(
            grouped, keys[:, :, :most], values[:, :, :most], visible[:, None, None], scale=scale
        )
        return mixed.flatten(1, 2)

    def advance(self) -> None:
        """All layers have seen the new tokens."""
        self.lengths = [length + 1 for length in self.lengths]

    def _reserve(self, layer: Hashable, needed: int) -> None:
        keys, values = self._layers[layer]
        room = keys.shape[2]
        if needed > room:
            more = max(needed, min(2 * room, self._longest)) - room
            self._layers[layer] = tuple(torch.nn.functional.pad(of, (0, 0, 0, more)) for of in (keys, values))  # type: ignore[assignment]  # fmt: skip


@dataclass(frozen=True)
class Filling:
    """A micro batch of whole rows, whose keys and values are to be kept.

    Attributes:
        rows: of each of its samples, the row in ``cache``.
        lengths, padded_lengths: of its samples.
    """

    cache: KeyValues
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]

    def keep(self, layer: Hashable, keys: Tensor, values: Tensor) -> None:
        """Keep what a layer has computed, [tokens, heads, head dim] of packed samples, [batch, tokens, ...] of padded ones."""
        for row, own_keys, own_values in zip(self.rows, self._split(keys), self._split(values), strict=True):
            self.cache.fill(layer, row, own_keys, own_values)

    def _split(self, states: Tensor) -> Iterator[Tensor]:
        parts = states.split(self.padded_lengths) if states.dim() == 3 else states
        return (part[:length] for part, length in zip(parts, self.lengths, strict=True))


@dataclass(frozen=True)
class Growing:
    """A micro batch of new tokens, one for each of ``rows`` of ``cache`` in their order, and padding behind them."""

    cache: KeyValues
    rows: slice

    def attend(
        self, layer: Hashable, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """As :meth:`KeyValues.attend`, with rows of zeros for padding."""
        count = self.rows.stop - self.rows.start
        padding = len(query) - count
        mixed = self.cache.attend(self.rows, layer, query[:count], key[:count], value[:count], scale, window)
        return torch.nn.functional.pad(mixed, (0, 0, 0, 0, 0, padding)) if padding else mixed
