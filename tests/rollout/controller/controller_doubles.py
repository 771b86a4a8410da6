"""An engine that notes what it is asked for, a clock that a test moves, and a server to call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from megascend.errors import EngineError
from megascend.rollout.controller.clock import Timer

KEY = "0123456789abcdef" * 2


class ManualClock:
    """Time that passes when a test says so. Timers fire in :meth:`advance`, in order."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._timers: list[_ManualTimer] = []

    def now(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        timer = _ManualTimer(when, callback)
        self._timers.append(timer)
        return timer

    async def advance(self, seconds: float) -> None:
        """Let time pass, and whatever that sets off run until nothing is left to do at once."""
        await settle()
        end = self._now + seconds
        while due := sorted((timer for timer in self._timers if timer.when <= end), key=lambda timer: timer.when):
            self._timers.remove(due[0])
            self._now = max(self._now, due[0].when)
            if not due[0].cancelled:
                due[0].callback()
            await settle()
        self._now = end
        await settle()


class _ManualTimer:
    def __init__(self, when: float, callback: Callable[[], object]) -> None:
        self.when = when
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


async def settle() -> None:
    """Let tasks run that wait for nothing outside this loop."""
    for _ in range(30):
        await asyncio.sleep(0)


class NotingEngine:
    """What an engine has to do for the controller. Paused and updated as asked, it fails where a test wants it to.

    Attributes:
        calls: what it was asked for, in order.
        fails: names of methods that raise.
        hangs: names of methods that do not return until cancelled.
    """

    stages = True

    def __init__(self, name: str, receivers: int = 1) -> None:
        self.name = name
        self.calls: list[str] = []
        self.fails: set[str] = set()
        self.hangs: set[str] = set()
        self.paused = False
        self.open: int | None = None
        self.in_force = 0
        self._receivers = receivers

    async def _called(self, what: str, told: object = "") -> None:
        self.calls.append(f"{what} {told}".strip())
        if what in self.hangs:
            await asyncio.Event().wait()
        if what in self.fails:
            raise EngineError(f"{self.name} cannot {what}")

    async def receivers(self) -> int:
        await self._called("receivers")
        return self._receivers

    async def begin_update(self, offer: dict[str, Any]) -> None:
        self.open = offer["version"]
        await self._called("begin", offer["version"])

    async def verify(self, version: int, timeout_s: float) -> None:
        await self._called("verify", version)

    async def commit(self, version: int) -> None:
        await self._called("commit", version)
        assert self.open == version
        self.in_force, self.open = version, None

    async def drop(self, version: int) -> None:
        await self._called("drop", version)
        self.open = None

    async def pause(self, lease_s: float) -> None:
        self.paused = True  # also when the answer never comes
        await self._called("pause", f"{lease_s:g}")

    async def resume(self) -> None:
        await self._called("resume")
        self.paused = False
