"""Collectives of Gloo on tensors that are not contiguous: it works on memory from a tensor's beginning on, whatever its strides.

Nothing says so: sums and copies are of other numbers (torch 2.13). NCCL refuses such tensors, but for lists that a program has
contiguous on CUDA from its copy to the device, where here they stay views.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megascend.changes import patch
from megascend.errors import PlatformError

WRITTEN = {
    "all_reduce": "tensor",
    "reduce": "tensor",
    "broadcast": "tensor",
    "scatter": "tensor",
    "reduce_scatter": "output",
}
"""The functions that compute wrong numbers, and which of their arguments they write to. All others are right, or refuse."""
LISTS = {"scatter": "scatter_list", "reduce_scatter": "input_list"}
"""Lists of tensors that they only read."""


def install() -> list[str]:
    """Have :data:`WRITTEN` refuse what they would write wrong, and read lists as they are; a second call does nothing."""
    for name in WRITTEN:
        original = getattr(dist, name)
        if not hasattr(original, "__megascend__"):
            function = _contiguous(original)
            for owner in (dist, distributed_c10d):
                patch(
                    owner,
                    name,
                    function,
                    "refuses to write to a tensor that is not contiguous, and reads such ones right",
                )
    return []


def _contiguous(original: Callable[..., Any]) -> Callable[..., Any]:
    name = original.__name__
    written, read = WRITTEN[name], LISTS.get(name, "")
    places = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        place = places.index(written)
        tensor = args[place] if len(args) > place else kwargs.get(written)
        if isinstance(tensor, Tensor) and not tensor.is_contiguous():
            raise PlatformError(
                f"torch.distributed.{name}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
                "contiguous. Gloo would write wrong numbers to it, and NCCL refuses it: pass tensor.contiguous(), and copy back"
            )
        if read and len(args) > (place := places.index(read)):
            args = (*args[:place], _copies(args[place]), *args[place + 1 :])
        elif read in kwargs:
            kwargs[read] = _copies(kwargs[read])
        return original(*args, **kwargs)

    function.__megascend__ = True  # type: ignore[attr-defined]
    return function


def _copies(tensors: Any) -> Any:
    """The same tensors, contiguous."""
    return tensors if tensors is None else [each.contiguous() for each in tensors]
