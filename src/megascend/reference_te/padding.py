"""Fp8Padding and Fp8Unpadding: rows of each expert made a multiple of the alignment that quantised kernels need, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megascend.errors import ConfigError
from megascend.reference_te.unsupported import refuse


class _Aligned(torch.nn.Module):
    """Transformer Engine takes the alignment from the recipe in use where none is given; here no recipe ever is."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.align_size = align_size

    def _padded(self, m_splits: Sequence[int], inp: Tensor, rows_padded: bool) -> tuple[list[int], list[int]]:
        if self.align_size is None:
            refuse(f"{type(self).__name__} without align_size, which then comes from the fp8 recipe", "pass align_size")
        counts = [int(count) for count in m_splits]
        padded = [-(-count // self.align_size) * self.align_size for count in counts]
        expected = sum(padded if rows_padded else counts)
        if len(counts) != self.num_gemms or expected != inp.shape[0]:
            raise ConfigError(
                f"{type(self).__name__}: m_splits={counts} must be {self.num_gemms} counts; by them the input has "
                f"{expected} rows, and it has {inp.shape[0]}"
            )
        return counts, padded


class Fp8Padding(_Aligned):
    """``[sum(m_splits), hidden]`` -> ``[sum(padded), hidden]`` with rows of zeros after each run, and the padded counts.

    Raises PlatformError without ``align_size``, ConfigError if the counts do not fit the input.
    """

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[int]]:
        counts, padded = self._padded(m_splits, inp, rows_padded=False)
        if counts == padded:
            return inp, counts
        runs = zip(inp.split(counts), padded, strict=True)
        return torch.cat([torch.nn.functional.pad(run, (0, 0, 0, rows - len(run))) for run, rows in runs]), padded


class Fp8Unpadding(_Aligned):
    """The way back: ``[sum(padded), hidden]`` -> ``[sum(m_splits), hidden]``. Raises as :class:`Fp8Padding`."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:
        counts, padded = self._padded(m_splits, inp, rows_padded=True)
        if counts == padded:
            return inp
        return torch.cat([run[:count] for run, count in zip(inp.split(padded), counts, strict=True)])
