"""Pauses of engines, which end with their leases; and the clock of leases and deadlines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from megascend.errors import EngineError
from weightwire.engine import InferenceEngine

log = logging.getLogger(__name__)
RESUME_AGAIN_S = 5.0
"""Seconds until another attempt to resume an engine."""
RESUME_ATTEMPTS = 5


class Timer(Protocol):
    """Handle of a call scheduled by :meth:`Clock.call_at`."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Monotonic clock in seconds, with scheduled calls."""

    def now(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer: ...


class LoopClock:
    """The clock of the running event loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_at(when, callback)


class CallEach(Protocol):
    """Calls engines concurrently (:meth:`Controller.call_each`)."""

    def __call__(
        self, names: Iterable[str], label: str, call: Callable[[InferenceEngine], Awaitable[None]]
    ) -> Awaitable[Any]: ...


class Pauses:
    """Engines that are paused, or may be, with the end of their pauses.

    Args:
        changed: called when the time of the next lapse may have changed.
    """

    def __init__(self, call_each: CallEach, names: Iterable[str], clock: Clock, changed: Callable[[], None]) -> None:
        self._call_each = call_each
        self._clock = clock
        self._changed = changed
        self._until: dict[str, float] = {}
        self._attempts: dict[str, int] = {}
        # A pause and a resume of one engine must not overtake each other.
        self._locks = {name: asyncio.Lock() for name in names}

    def until(self, name: str) -> float | None:
        """Return the end of an engine's pause; None if it is not paused."""
        return self._until.get(name)

    def among(self, names: Iterable[str]) -> list[str]:
        """Return those of the engines that may be paused."""
        return [name for name in names if name in self._until]

    async def pause(self, names: Iterable[str], lease_s: float, allowed: Callable[[], object]) -> None:
        """Pause engines, or renew their pause. If this raises, any of them may be paused.

        Args:
            allowed: raises if the pause is no longer permitted; called before each engine is paused.
        """
        until = self._clock.now() + lease_s

        async def pause(engine: InferenceEngine) -> None:
            async with self._locks[engine.name]:
                allowed()
                self._until[engine.name] = until  # before the call: the engine may be paused even if it fails
                self._attempts.pop(engine.name, None)
                self._changed()
                await engine.pause(lease_s)

        await self._call_each(names, "pause", pause)

    async def resume(self, names: Iterable[str]) -> None:
        """Resume engines, whether they are paused or not."""

        async def resume(engine: InferenceEngine) -> None:
            async with self._locks[engine.name]:
                await self._resume(engine)

        await self._call_each(names, "resume", resume)

    def next_lapse(self) -> float | None:
        """Return the end of the next pause; None without pauses."""
        return min(self._until.values(), default=None)

    def lapsed(self) -> list[tuple[str, float]]:
        """Return engines whose pause has ended, with the time of a second attempt; pass each pair to :meth:`end_lapsed`."""
        now = self._clock.now()
        lapsed = [(name, now + RESUME_AGAIN_S) for name, until in self._until.items() if until <= now]
        # Moved forward at once: the timer must not find the same pause again while its end is under way.
        self._until.update(lapsed)
        return lapsed

    async def end_lapsed(self, name: str, retry_at: float) -> None:
        """Resume an engine whose pause has lapsed; on failure it lapses again at ``retry_at``, a few times."""

        async def resume(engine: InferenceEngine) -> None:
            async with self._locks[name]:
                if self._until.get(name) == retry_at:  # neither resumed nor paused again meanwhile
                    log.warning("the pause of engine %r has lapsed; resuming it", name)
                    await self._resume(engine)

        try:
            await self._call_each([name], "resume", resume)
        except EngineError as error:
            attempts = self._attempts[name] = self._attempts.get(name, 0) + 1
            log.error("attempt %d of %d to resume an engine: %s", attempts, RESUME_ATTEMPTS, error)
            if attempts >= RESUME_ATTEMPTS and self._until.get(name) == retry_at:
                del self._until[name]  # its own lease has ended its pause, or it is gone
        self._changed()

    async def _resume(self, engine: InferenceEngine) -> None:
        await engine.resume()
        self._until.pop(engine.name, None)
        self._attempts.pop(engine.name, None)
