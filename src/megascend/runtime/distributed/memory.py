"""Turn out-of-memory on one rank into an error of all ranks, before they enter a collective on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from megascend.errors import OutOfDeviceMemoryError
from megascend.runtime.distributed.groups import ProcessGroups
from megascend.runtime.distributed.objects import raise_on_all_ranks

T = TypeVar("T")


def _attempt(make: Callable[[], T], rank: int) -> tuple[T | None, OutOfDeviceMemoryError | None]:
    """Return the result of ``make``, or an error that keeps no allocation alive if the device runs out of memory."""
    try:
        return make(), None
    except torch.OutOfMemoryError as error:
        text = str(error)
    # After the except block: torch's error refers to the frames of `make`, which would keep their tensors alive.
    return None, OutOfDeviceMemoryError(f"the device's memory has no room for this request (rank {rank}): {text}")


def catch_oom(make: Callable[[], T], rank: int) -> T:
    """Return the result of ``make``, without communication; raise OutOfDeviceMemoryError in place of torch's error."""
    value, problem = _attempt(make, rank)
    if problem is not None:
        raise problem
    return value  # type: ignore[return-value]


def catch_oom_on_all_ranks(make: Callable[[], T], groups: ProcessGroups, purpose: str) -> T:
    """Return the result of ``make``, which must not run collectives, or raise on every rank. One exchange, over Gloo."""
    value, problem = _attempt(make, groups.rank)
    # Before the next collective on the device: a rank that raised alone would leave the others waiting in it.
    raise_on_all_ranks(problem, groups, f"the memory check of {purpose}")
    return value  # type: ignore[return-value]
