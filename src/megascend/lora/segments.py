"""Which rows of a micro batch belong to which adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megascend.lora.grouped import Groups


@dataclass(frozen=True)
class Routing:
    """Adapters of the tokens of one micro batch on this rank, in the order in which layers see them.

    Attributes:
        single: the one adapter of all tokens (its number in the stage), or None.
        whole: runs of all tokens; None if there is one adapter.
        local: runs of this rank's slice under sequence parallelism; the same as ``whole`` without it.
        adapter_index: int64 [n], every token's adapter.
        keys: int64 [n], what a token's dropout is drawn from, or None if no adapter has dropout.
        mine: this rank's slice of the tokens under sequence parallelism.
    """

    single: int | None
    whole: Groups | None
    local: Groups | None
    adapter_index: Tensor
    keys: Tensor | None = None
    mine: slice = field(default_factory=lambda: slice(None))


def run_lengths(adapter_index: Sequence[int], lengths: Sequence[int], count: int) -> list[int]:
    """Tokens of each adapter. Pure.

    Args:
        adapter_index: adapter of every sample, ascending.
        lengths: tokens of every sample on this rank.
        count: adapters in the stage.
    """
    totals = [0] * count
    for slot, length in zip(adapter_index, lengths, strict=True):
        totals[slot] += length
    return totals


def cut(counts: Sequence[int], start: int, stop: int) -> list[int]:
    """What of runs of ``counts`` rows lies in rows [start, stop). Pure."""
    parts, begin = [], 0
    for count in counts:
        parts.append(max(0, min(stop, begin + count) - max(start, begin)))
        begin += count
    return parts


def route(
    adapter_index: Tensor, counts: list[int], keys: Tensor | None, part: tuple[int, int], device: torch.device
) -> Routing:
    """The :class:`Routing` of tokens that lie in runs of ``counts``.

    Args:
        adapter_index: int64 [n], every token's adapter.
        counts: tokens of every adapter of the stage.
        keys: dropout keys [n], or None.
        part: (rank, ranks) of the sequence parallel slice; (0, 1) without.
    """
    rank, ranks = part
    size = len(adapter_index) // ranks
    mine = slice(rank * size, (rank + 1) * size)
    present = [slot for slot, count in enumerate(counts) if count]
    if len(present) == 1:
        return Routing(present[0], None, None, adapter_index, keys, mine)
    whole = Groups.of(counts, device)
    local = Groups.of(cut(counts, mine.start, mine.stop), device) if ranks > 1 else whole
    return Routing(None, whole, local, adapter_index, keys, mine)
