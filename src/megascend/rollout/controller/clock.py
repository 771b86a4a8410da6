"""Time for leases and deadlines: the event loop's, or a test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """What :meth:`Clock.call_at` returns."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Seconds that only go forward, and calls at a time of theirs."""

    def now(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer: ...


class LoopClock:
    """The clock of the event loop that runs."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_at(when, callback)
