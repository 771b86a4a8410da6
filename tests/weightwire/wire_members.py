"""Members of a group in processes of their own, forked from a test: rank 0 has the listener, the others receive."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megascend.testing import run_distributed
from weightwire.group import Group, Listener, join

TIMEOUT_S = 30.0
KEPT: list[Listener] = []
"""A listener outlives its groups: it stays as long as the process, which ends when all members have."""


def run_members(fn: Callable[[Group], Any], size: int, *, timeout_s: float = 90.0, **options: Any) -> list[Any]:
    """``fn(group)`` on every member of one group; the results by rank."""
    return run_meeting(lambda meet: with_group(fn, meet), size, timeout_s=timeout_s, **options)


def with_group(fn: Callable[[Group], Any], meet: Callable[[], Group]) -> Any:
    group = meet()
    try:
        return fn(group)
    finally:
        group.close()


def run_meeting(
    fn: Callable[..., Any], size: int, *, timeout_s: float = 90.0, join_timeout_s: float = TIMEOUT_S, **options: Any
) -> list[Any]:
    """``fn(meet)`` in ``size`` processes, where ``meet()`` joins the group."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "place"

        def on_rank() -> Any:
            torch.set_num_threads(1)
            rank = int(os.environ["RANK"])
            if rank == 0:
                listener = Listener()
                KEPT.append(listener)
                name = listener.new_group(members(size))
                publish(place, [listener.host, listener.port, name])
            host, port, name = wait_for(place)
            return fn(lambda: join(host, port, name, rank, join_timeout_s))

        return run_distributed(on_rank, size, init=False, timeout_s=timeout_s, **options)


def members(size: int) -> Sequence[str]:
    return ["trainer", *(f"engine-{number}" for number in range(1, size))]


def publish(place: Path, content: Any) -> None:
    beside = place.with_suffix(".writing")
    beside.write_text(json.dumps(content))
    beside.rename(place)


def wait_for(place: Path) -> Any:
    wait_until(place.exists)
    return json.loads(place.read_text())


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for what another process does; the time is a deadline."""
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.005)


def next_group(group: Group) -> Group:
    """Another group of the same processes: the sender makes it, and tells its name through the store of this one, once."""
    store = group.store("next group", TIMEOUT_S)
    if group.rank == 0:
        store.set("name", KEPT[-1].new_group(group.members))
    return join(group.host, group.port, store.get("name").decode(), group.rank, TIMEOUT_S)
