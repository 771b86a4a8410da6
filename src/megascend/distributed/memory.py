"""A device's memory that runs out on one rank: an error of all ranks, before they meet on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from megascend.distributed.groups import ProcessGroups
from megascend.distributed.objects import raise_on_all_ranks
from megascend.errors import OutOfDeviceMemoryError

T = TypeVar("T")


def _attempt(make: Callable[[], T], rank: int) -> tuple[T | None, OutOfDeviceMemoryError | None]:
    """Return what ``make`` returns, or the error if memory has no room, which keeps no allocation alive."""
    try:
        return make(), None
    except torch.OutOfMemoryError as error:
        text = str(error)
    return None, OutOfDeviceMemoryError(f"the device's memory has no room for this request (rank {rank}): {text}")


def with_room(make: Callable[[], T], rank: int) -> T:
    """Return what ``make`` returns. Local.

    Raises:
        OutOfDeviceMemoryError: in place of torch's error.
    """
    value, problem = _attempt(make, rank)
    if problem is not None:
        raise problem
    return value  # type: ignore[return-value]


def with_room_everywhere(make: Callable[[], T], groups: ProcessGroups, what: str) -> T:
    """Return what ``make`` returns, in which ranks run no collective. One exchange, over Gloo.

    Args:
        what: that there must be room for, for errors of the exchange itself.

    Raises:
        OutOfDeviceMemoryError: on every rank: some rank has no room.
    """
    value, problem = _attempt(make, groups.rank)
    raise_on_all_ranks(problem, groups, f"whether there is room for {what}")
    return value  # type: ignore[return-value]
