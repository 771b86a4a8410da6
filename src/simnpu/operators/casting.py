"""Casts and formats, which have no meaning of their own on the simulated device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from simnpu.operators.dispatch import operator

ND = 2  # ACL_FORMAT_ND: the plain row-major format


@operator
def npu_dtype_cast(self: Tensor, dtype: torch.dtype) -> Tensor:
    """``self`` in another type."""
    return self.to(dtype)


@operator
def npu_format_cast(self: Tensor, acl_format: int) -> Tensor:
    """``self``: private memory formats hold the same values."""
    return self


@operator
def get_npu_format(self: Tensor) -> int:
    """Always ACL_FORMAT_ND."""
    return ND


@operator
def npu_confusion_transpose(self: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool) -> Tensor:
    """permute then reshape, or the other way round, as a contiguous tensor."""
    if transpose_first:
        return self.permute(*perm).reshape(*shape).contiguous()
    return self.reshape(*shape).permute(*perm).contiguous()
