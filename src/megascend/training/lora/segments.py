"""Adapter segments of the rows of a micro batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megascend.training.lora.grouped import Segments


@dataclass(frozen=True)
class TokenSegments:
    """Adapters of the tokens of one micro batch on this rank, in the order in which layers see them.

    Attributes:
        single: the adapter of all tokens (its index among those of the call), or None if they have several.
        full: segments of all tokens; None if there is one adapter.
        local: segments of this rank's slice under sequence parallelism; the same as ``full`` without it.
        adapter_index: int64 [n], every token's adapter, by its index among those of the call.
        keys: int64 [n], seeds of the tokens' dropout, or None if no adapter has dropout.
        local_slice: this rank's slice of the tokens under sequence parallelism.
        patches, features: segments of the rows of a vision tower, before and after its patches are merged; None without images.
    """

    single: int | None
    full: Segments | None
    local: Segments | None
    adapter_index: Tensor
    keys: Tensor | None = None
    local_slice: slice = field(default_factory=lambda: slice(None))
    patches: TokenSegments | None = None
    features: TokenSegments | None = None


def tokens_per_adapter(adapter_index: Sequence[int], lengths: Sequence[int], count: int) -> list[int]:
    """Return the tokens of each of ``count`` adapters, by every sample's adapter and length."""
    totals = [0] * count
    for index, length in zip(adapter_index, lengths, strict=True):
        totals[index] += length
    return totals


def cut(counts: Sequence[int], start: int, stop: int) -> list[int]:
    """Return the rows of each segment, ``counts`` rows long, that are in [start, stop). Pure."""
    parts, begin = [], 0
    for count in counts:
        parts.append(max(0, min(stop, begin + count) - max(start, begin)))
        begin += count
    return parts


def token_segments(
    adapter_index: Tensor, counts: list[int], keys: Tensor | None, part: tuple[int, int], device: torch.device
) -> TokenSegments:
    """Build the segments of tokens that are sorted by adapter, ``counts`` of each.

    ``keys``: dropout keys [n], or None; ``part``: (rank, ranks) of the sequence parallel slice, (0, 1) without.
    """
    rank, ranks = part
    size = len(adapter_index) // ranks
    # Sequence parallelism gives each rank consecutive tokens.
    local_slice = slice(rank * size, (rank + 1) * size)
    present = [index for index, count in enumerate(counts) if count]
    # One adapter: plain products are faster than grouped ones with a single group.
    if len(present) == 1:
        return TokenSegments(present[0], None, None, adapter_index, keys, local_slice)
    full = Segments.of(counts, device)
    local = Segments.of(cut(counts, local_slice.start, local_slice.stop), device) if ranks > 1 else full
    return TokenSegments(None, full, local, adapter_index, keys, local_slice)


@dataclass(frozen=True)
class ExpertAdapterRows:
    """Rows of experts, grouped by expert and then by adapter.

    Attributes:
        segments: ``experts * adapters`` of them, in that order.
        order: int64 [rows], the permutation that sorts the rows; None if they are sorted already.
        inverse: inverse permutation of ``order``.
    """

    segments: Segments
    order: Tensor | None = None
    inverse: Tensor | None = None


def by_expert_and_adapter(
    expert: Tensor, adapter_index: Tensor, experts: int, adapters: int, *, in_order: bool
) -> ExpertAdapterRows:
    """Group rows by their expert and adapter, int64 [rows] each. Waits for no device.

    ``in_order``: the rows are sorted already; if that is not true, an assertion fails on the device.
    """
    key = expert * adapters + adapter_index
    if in_order:
        torch._assert_async((key[1:] >= key[:-1]).all(), "rows of experts are not sorted by expert and adapter")
        return ExpertAdapterRows(expert_segments(key, experts * adapters))
    key, order = torch.sort(key, stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return ExpertAdapterRows(expert_segments(key, experts * adapters), order, inverse)


def expert_segments(expert: Tensor, experts: int) -> Segments:
    """Build the segments of rows that are sorted by ``expert`` [rows]. Waits for no device."""
    numbers = torch.arange(experts, device=expert.device)
    return Segments(torch.searchsorted(expert, numbers, right=True, out_int32=True))
