"""Which rows of a micro batch belong to which adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megascend.lora.grouped import Segments


@dataclass(frozen=True)
class TokenSegments:
    """Adapters of the tokens of one micro batch on this rank, in the order in which layers see them.

    Attributes:
        single: the one adapter of all tokens (its index among those of the call), or None.
        whole: segments of all tokens; None if there is one adapter.
        local: segments of this rank's slice under sequence parallelism; the same as ``whole`` without it.
        adapter_index: int64 [n], every token's adapter, by its index among those of the call.
        keys: int64 [n], what a token's dropout is drawn from, or None if no adapter has dropout.
        mine: this rank's slice of the tokens under sequence parallelism.
    """

    single: int | None
    whole: Segments | None
    local: Segments | None
    adapter_index: Tensor
    keys: Tensor | None = None
    mine: slice = field(default_factory=lambda: slice(None))


def tokens_per_adapter(adapter_index: Sequence[int], lengths: Sequence[int], count: int) -> list[int]:
    """Return the tokens of each of ``count`` adapters, by every sample's adapter and length."""
    totals = [0] * count
    for index, length in zip(adapter_index, lengths, strict=True):
        totals[index] += length
    return totals


def cut(counts: Sequence[int], start: int, stop: int) -> list[int]:
    """What of segments of ``counts`` rows lies in rows [start, stop). Pure."""
    parts, begin = [], 0
    for count in counts:
        parts.append(max(0, min(stop, begin + count) - max(start, begin)))
        begin += count
    return parts


def token_segments(
    adapter_index: Tensor, counts: list[int], keys: Tensor | None, part: tuple[int, int], device: torch.device
) -> TokenSegments:
    """Build the segments of tokens that lie by adapter, ``counts`` of each.

    ``keys``: dropout keys [n], or None; ``part``: (rank, ranks) of the sequence parallel slice, (0, 1) without.
    """
    rank, ranks = part
    size = len(adapter_index) // ranks
    mine = slice(rank * size, (rank + 1) * size)
    present = [index for index, count in enumerate(counts) if count]
    if len(present) == 1:
        return TokenSegments(present[0], None, None, adapter_index, keys, mine)
    whole = Segments.of(counts, device)
    local = Segments.of(cut(counts, mine.start, mine.stop), device) if ranks > 1 else whole
    return TokenSegments(None, whole, local, adapter_index, keys, mine)


@dataclass(frozen=True)
class ExpertAdapterRows:
    """Rows of experts by expert and, within it, by adapter.

    Attributes:
        segments: ``experts * adapters`` of them, in that order.
        order: int64 [rows], which row comes to each place; None: they lie like that.
        place: its inverse.
    """

    segments: Segments
    order: Tensor | None = None
    place: Tensor | None = None


def by_expert_and_adapter(
    expert: Tensor, adapter_index: Tensor, experts: int, adapters: int, *, in_order: bool
) -> ExpertAdapterRows:
    """Group rows by their expert and adapter, int64 [rows] each. Waits for no device.

    ``in_order``: they lie so already; where that is not true, an assertion fails on the device.
    """
    key = expert * adapters + adapter_index
    if in_order:
        torch._assert_async((key[1:] >= key[:-1]).all(), "rows of experts do not lie by expert and adapter")
        return ExpertAdapterRows(expert_segments(key, experts * adapters))
    key, order = torch.sort(key, stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return ExpertAdapterRows(expert_segments(key, experts * adapters), order, place)


def expert_segments(expert: Tensor, experts: int) -> Segments:
    """The segments of rows that are sorted by ``expert`` [rows]. Waits for no device."""
    numbers = torch.arange(experts, device=expert.device)
    return Segments(torch.searchsorted(expert, numbers, right=True, out_int32=True))
