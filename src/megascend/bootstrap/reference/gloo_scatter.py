"""Scatter over Gloo, which reads the bytes from a tensor's beginning on, whatever its strides: columns of a matrix arrived wrong.

A program that scatters columns on CUDA has them contiguous from its copy to the device. Here they stay views.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megascend.changes import patch


def install() -> list[str]:
    """Have ``torch.distributed.scatter`` send contiguous copies where tensors are not; a second call does nothing."""
    original = dist.scatter
    if not hasattr(original, "__megascend__"):

        @functools.wraps(original)
        def function(tensor: Tensor, scatter_list: Sequence[Tensor] | None = None, *args: Any, **kwargs: Any) -> Any:
            given = None if scatter_list is None else [each.contiguous() for each in scatter_list]
            return original(tensor, given, *args, **kwargs)

        function.__megascend__ = True  # type: ignore[attr-defined]
        for owner in (dist, distributed_c10d):
            patch(owner, "scatter", function, "sends tensors that are not contiguous as they read")
    return []
