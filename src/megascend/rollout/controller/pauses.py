"""Pauses of engines, each a lease."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from megascend.errors import EngineError
from megascend.rollout.controller.clock import Clock
from megascend.rollout.controller.engine_calls import EngineCalls, UpdatedEngine

log = logging.getLogger(__name__)
RESUME_AGAIN_S = 5.0
"""After how long an engine is tried again that could not be continued."""
RESUME_ATTEMPTS = 5


class Pauses:
    """Which engines are paused, or may be, and until when.

    Args:
        changed: called when the next lapse may be another one than before.
    """

    def __init__(self, calls: EngineCalls, engines: Iterable[str], clock: Clock, changed: Callable[[], None]) -> None:
        self._calls = calls
        self._clock = clock
        self._changed = changed
        self._until: dict[str, float] = {}
        self._attempts: dict[str, int] = {}
        self._locks = {name: asyncio.Lock() for name in engines}

    def until(self, name: str) -> float | None:
        """When the pause of an engine lapses; None if it is not paused."""
        return self._until.get(name)

    def among(self, names: Iterable[str]) -> list[str]:
        """Those that may be paused."""
        return [name for name in names if name in self._until]

    async def pause(self, names: Iterable[str], lease_s: float, allowed: Callable[[], object]) -> None:
        """Pause engines, or renew their pause. When this raises, any of them may be paused.

        Args:
            allowed: raises if that must not be any more; asked before each engine's turn.
        """
        until = self._clock.now() + lease_s

        async def one(engine: UpdatedEngine) -> None:
            async with self._locks[engine.name]:
                allowed()
                self._until[engine.name] = until  # before it is: it may be paused when the call fails
                self._attempts.pop(engine.name, None)
                self._changed()
                await engine.pause(lease_s)

        await self._calls.each(names, "pause", one)

    async def resume(self, names: Iterable[str]) -> None:
        """Continue engines, whether they are paused or not."""

        async def one(engine: UpdatedEngine) -> None:
            async with self._locks[engine.name]:
                await self._resume(engine)

        await self._calls.each(names, "resume", one)

    def next_lapse(self) -> float | None:
        """When the next pause lapses."""
        return min(self._until.values(), default=None)

    def lapsed(self) -> list[tuple[str, float]]:
        """Engines whose pause is over, and when they will be tried again; each pair must go to :meth:`end_lapsed`."""
        now = self._clock.now()
        found = [(name, now + RESUME_AGAIN_S) for name, until in self._until.items() if until <= now]
        self._until.update(found)
        return found

    async def end_lapsed(self, name: str, again: float) -> None:
        """Continue one engine whose pause has lapsed; on failure it lapses again, a few times."""

        async def one(engine: UpdatedEngine) -> None:
            async with self._locks[name]:
                if self._until.get(name) == again:  # neither continued nor paused anew meanwhile
                    log.warning("the pause of engine %r has lapsed; it is continued", name)
                    await self._resume(engine)

        try:
            await self._calls.each([name], "resume", one)
        except EngineError as error:
            attempts = self._attempts[name] = self._attempts.get(name, 0) + 1
            log.error("attempt %d of %d to continue an engine: %s", attempts, RESUME_ATTEMPTS, error)
            if attempts >= RESUME_ATTEMPTS and self._until.get(name) == again:
                del self._until[name]  # its own lease has ended its pause, or it is gone
        self._changed()

    async def _resume(self, engine: UpdatedEngine) -> None:
        await engine.resume()
        self._until.pop(engine.name, None)
        self._attempts.pop(engine.name, None)
