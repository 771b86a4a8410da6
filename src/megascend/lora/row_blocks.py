"""Rows that lie in a fused layer in blocks of one length, as views. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowBlocks:
    """``count`` blocks of ``length`` rows that follow each other, ``step`` rows from one's first to the next one's."""

    start: int
    length: int
    step: int
    count: int

    def of(self, tensor: Tensor) -> Tensor:
        """These of the last dimension of ``tensor``: [..., count, length], a view."""
        stop = self.start + (self.count - 1) * self.step + self.length
        return tensor[..., self.start : stop].unfold(-1, self.length, self.step)


def row_blocks(rows: Tensor) -> list[RowBlocks]:
    """Ascending rows, int64 [n], as few blocks: those of q in Megatron's fused layer are one, whatever the number of groups."""
    if not len(rows):
        return []
    gaps = rows.diff()
    if (gaps < 1).any():
        raise ValueError("rows of a slice have to ascend")
    ends = [*(gaps > 1).nonzero().flatten().tolist(), len(rows) - 1]
    firsts = [0, *(end + 1 for end in ends[:-1])]
    found: list[RowBlocks] = []
    for first, end in zip(firsts, ends, strict=True):
        start, length = int(rows[first]), end - first + 1
        last = found[-1] if found else None
        if last is not None and length == last.length and last.count == 1:
            found[-1] = RowBlocks(last.start, length, start - last.start, 2)
        elif last is not None and length == last.length and start == last.start + last.count * last.step:
            found[-1] = RowBlocks(last.start, length, last.step, last.count + 1)
        else:
            found.append(RowBlocks(start, length, length, 1))
    return found
