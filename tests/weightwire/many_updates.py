"""Do 63 updates in this process; AssertionError if its threads or open files grow with their number."""

from __future__ import annotations

import os
import threading
import time

from in_process import Engine, Trainer, tensors

from weightwire.group import MAX_IDLE
from weightwire.receiver import Receiver

WAIT_S = 120.0
ALLOWANCE = (2 * MAX_IDLE, 0)
"""Files and threads by which the numbers may differ: of idle connections, which are kept, this process has both ends."""


def resources() -> tuple[int, int]:
    """Return the numbers of open files and of threads."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def at_rest() -> tuple[int, int]:
    """Return the numbers once they have not changed for 1.5 s: closing is left to threads."""
    last, since = resources(), time.monotonic()
    while time.monotonic() < since + 1.5:
        time.sleep(0.05)
        if resources() != last:
            last, since = resources(), time.monotonic()
    return last


if __name__ == "__main__":
    receivers, engine, weights = [Receiver("engine-a"), Receiver("engine-b")], Engine(), tensors(2)
    trainer = Trainer(receivers)
    before = (0, 0)
    for version in range(63):
        seal = trainer.push(version, weights, 1000)
        for receiver in receivers:
            receiver.commit(seal.update, engine.load)
            receiver.settle(seal.update)
        if version == 2:  # the listener and its threads are there
            before = at_rest()
    until = time.monotonic() + WAIT_S
    while any(now > earlier + margin for now, earlier, margin in zip(resources(), before, ALLOWANCE, strict=True)):
        assert time.monotonic() < until, (resources(), before)
        time.sleep(0.1)
