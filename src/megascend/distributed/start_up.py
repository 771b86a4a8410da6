"""All ranks meet at the store, before there is a process group that they could meet in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store


def wait_for_all(store: Store, rank: int, world_size: int, timeout_s: float) -> list[int]:
    """Say that ``rank`` is there, and wait for the others.

    Returns:
        The ranks that did not come within ``timeout_s``; none if all are there.
    """
    keys = [f"started/{number}" for number in range(world_size)]
    store.set(keys[rank], "")
    deadline = time.monotonic() + timeout_s
    # Asked again and again: a wait that ends before its time has torch write two warnings to the terminal, every time.
    pause_s, longest_s = 0.002, max(0.05, world_size / 2000)
    while not store.check(keys):
        if time.monotonic() >= deadline:
            return [number for number, key in enumerate(keys) if not store.check([key])]
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, longest_s)
    return []


def did_not_arrive(rank: int, label: str, missing: Sequence[int], expected: int, timeout_s: float) -> str:
    """The message of every error about ranks that did not come.

    Args:
        label: where to.
        missing: ranks that did not.
        expected: how many should have.
    """
    names = ", ".join(str(number) for number in missing)
    return (
        f"rank {rank}: {len(missing)} of {expected} ranks did not arrive at {label} within {timeout_s:g} s: "
        f"{'rank' if len(missing) == 1 else 'ranks'} {names}. Look at the first error in their logs; if they are only "
        "slow, raise timeout_s"
    )
