"""A device's memory that runs out on one rank: an error of all ranks, before they meet on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from megascend.distributed.groups import ProcessGroups
from megascend.distributed.objects import raise_on_all_ranks
from megascend.errors import OutOfDeviceMemoryError

T = TypeVar("T")


def tried(make: Callable[[], T], rank: int) -> tuple[T | None, OutOfDeviceMemoryError | None]:
    """What ``make`` returns, or why memory has no room for it. Nothing that it has allocated is kept alive by the error."""
    try:
        return make(), None
    except torch.OutOfMemoryError as error:
        text = str(error)
    return None, OutOfDeviceMemoryError(f"the device's memory has no room for this request (rank {rank}): {text}")


def with_room(make: Callable[[], T], rank: int) -> T:
    """What ``make`` returns. Local.

    Raises:
        OutOfDeviceMemoryError: in place of torch's error.
    """
    value, problem = tried(make, rank)
    if problem is not None:
        raise problem
    return value  # type: ignore[return-value]


def with_room_everywhere(make: Callable[[], T], groups: ProcessGroups, what: str) -> T:
    """What ``make`` returns, which ranks call without meeting in it. One exchange, over Gloo.

    Args:
        what: that there must be room for, for errors of the exchange itself.

    Raises:
        OutOfDeviceMemoryError: on every rank: some rank has no room.
    """
    value, problem = tried(make, groups.rank)
    raise_on_all_ranks(problem, groups, f"whether there is room for {what}")
    return value  # type: ignore[return-value]
