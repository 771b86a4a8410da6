"""Members of a group in forked processes: rank 0 has the listener, the others receive."""

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
LISTENERS: list[Listener] = []
"""Listeners of this process: a listener must outlive its groups, so it lives until the process ends."""


def run_members(fn: Callable[[Group], Any], size: int, *, timeout_s: float = 90.0, **options: Any) -> list[Any]:
    """Run ``fn(group)`` on every member of one group; return the results by rank."""
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
    """Run ``fn(meet)`` in ``size`` processes, where ``meet()`` joins the group."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "address"

        def on_rank() -> Any:
            torch.set_num_threads(1)
            rank = int(os.environ["RANK"])
            if rank == 0:
                listener = Listener()
                LISTENERS.append(listener)
                name = listener.new_group(members(size))
                publish(path, [listener.host, listener.port, name])
            host, port, name = wait_for(path)
            return fn(lambda: join(host, port, name, rank, join_timeout_s))

        return run_distributed(on_rank, size, init=False, timeout_s=timeout_s, **options)


def members(size: int) -> Sequence[str]:
    return ["trainer", *(f"engine-{number}" for number in range(1, size))]


def publish(path: Path, content: Any) -> None:
    temporary = path.with_suffix(".writing")
    temporary.write_text(json.dumps(content))
    temporary.rename(path)


def wait_for(path: Path) -> Any:
    wait_until(path.exists)
    return json.loads(path.read_text())


def wait_until(true: Callable[[], bool]) -> None:
    """Wait until a condition that another process fulfils holds; the time is a deadline."""
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until, "the condition did not hold within 60 s"
        time.sleep(0.005)


def next_group(group: Group) -> Group:
    """Join another group of the same processes; the sender publishes its name in this group's store, so call it once."""
    store = group.store("next group", TIMEOUT_S)
    if group.rank == 0:
        store.set("name", LISTENERS[-1].new_group(group.members))
    return join(group.host, group.port, store.get("name").decode(), group.rank, TIMEOUT_S)


def cross_messages(medium: Any, group: Group, device: torch.device) -> list[list[int]]:
    """Send four messages from ranks 0 and 1 to ranks 2 and 3, then one to the other receiver; return what arrives.

    Each receiver has all five in flight before it waits for any: a transport that waits for the other sender while it starts the
    last one stops all four members, since both senders, with two in flight, wait for their third one.
    """
    other = {0: 1, 1: 0, 2: 3, 3: 2}[group.rank]
    partner = (group.rank + 2) % 4
    peers = [partner] * 4 + [(other + 2) % 4]
    if group.rank < 2:
        buffers = [
            torch.full((1000,), 10 * group.rank + number, dtype=torch.uint8, device=device) for number in range(5)
        ]
        works = []
        for buffer, peer in zip(buffers, peers, strict=True):
            if len(works) == 2:
                works.pop(0).wait(TIMEOUT_S)
            works.append(medium.send_to(buffer, peer))
    else:
        buffers = [torch.zeros(1000, dtype=torch.uint8, device=device) for _ in peers]
        works = [medium.receive_from(buffer, peer) for buffer, peer in zip(buffers, peers, strict=True)]
    for work in works:
        work.wait(TIMEOUT_S)
    group.acknowledge("done")
    group.await_receivers("done", TIMEOUT_S, range(group.size))  # the last message may be in this process's memory
    return [buffer.unique().tolist() for buffer in buffers]
