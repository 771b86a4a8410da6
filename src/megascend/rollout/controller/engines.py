"""Engines by name: calls of several at once, updates that are in force on all or dropped, pauses that lapse."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

from megascend.errors import ControllerError, EngineError, EngineTimeoutError, MessageError
from megascend.rollout.controller.ownership import Claim, Clock
from weightwire.engine import InferenceEngine
from weightwire.engine_calls import call_all
from weightwire.offer import Offer, Seal

T = TypeVar("T")
log = logging.getLogger(__name__)
RESUME_AGAIN_S = 5.0
"""After how long an engine is tried again that could not be continued."""
RESUME_ATTEMPTS = 5
ERROR_S = 5.0
"""How much longer than an engine itself its call has: the engine's own error says what it waited for."""


class Engines:
    """Engines by name.

    Args:
        timeout_s: deadline of a call of an engine, in seconds; ``commit_s`` of a commit and of loading an adapter.
    """

    def __init__(self, engines: Mapping[str, InferenceEngine], timeout_s: float, commit_s: float) -> None:
        self._engines = dict(engines)
        self._timeout_s, self.commit_s = timeout_s, commit_s

    def __getitem__(self, name: str) -> InferenceEngine:
        return self._engines[name]

    async def each(
        self,
        names: Iterable[str],
        what: str,
        call: Callable[[InferenceEngine], Awaitable[T]],
        timeout_s: float | None = None,
    ) -> dict[str, T]:
        """Call engines side by side, and wait for all.

        Args:
            timeout_s: in place of the usual time.

        Raises:
            EngineTimeoutError: all that failed did not answer in time.
            EngineError: some failed; the message names them, and those that did not.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        done, failed = await call_all([self._engines[name] for name in names], call, limit)
        if not failed:
            return done
        kind = EngineTimeoutError if all(isinstance(error, TimeoutError) for error in failed.values()) else EngineError
        reasons = "; ".join(f"engine {name!r}: {type(error).__name__}: {error}" for name, error in failed.items())
        raise kind(f"{what} failed: {reasons}" + (f" (done by {', '.join(done)})" if done else ""))


@dataclass
class _Update:
    """An update of one claim.

    Attributes:
        engines: those that may be receiving it, or have it.
    """

    name: str
    engines: set[str]
    verified: bool = False


class Updates:
    """At most one for each claim."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._updates: dict[str, _Update] = {}  # by claim
        self._members: dict[str, dict[str, int]] = {}  # claim -> engine -> members of a group

    async def members(self, claim: Claim) -> dict[str, int]:
        """Return how many members of a group each engine is, in the claim's order."""
        members = await self._engines.each(claim.engines, "receivers", lambda engine: engine.receivers())
        self._members[claim.id] = members
        return members

    async def begin(self, claim: Claim, offer: Offer) -> None:
        """Offer each engine its places in the group.

        Raises:
            ControllerError: another update is open.
            MessageError: the offer is to another number of members.
        """
        if (there := self._updates.get(claim.id)) is not None:
            raise ControllerError(f"update {there.name!r} of {claim.owner!r} is open: commit or drop it first")
        members = self._members.get(claim.id) or await self.members(claim)
        if (offer.first, offer.workers) != (1, sum(members.values())):
            raise MessageError(
                f"the offer is to {offer.workers} members from number {offer.first} on; the engines {', '.join(members)} are "
                f"{sum(members.values())}, from 1 on"
            )
        firsts = dict(zip(members, accumulate(members.values(), initial=1), strict=False))

        async def one(engine: InferenceEngine) -> None:
            await engine.begin_update(replace(offer, first=firsts[engine.name], workers=members[engine.name]))

        self._updates[claim.id] = _Update(offer.update, set(claim.engines))
        await self._engines.each(claim.engines, "begin_update", one)

    async def verify(self, claim: Claim, seal: Seal, timeout_s: float) -> None:
        """Have all engines hold what they have against the seal."""
        update = self._open(claim, seal.update)
        await self._engines.each(
            claim.engines, "verify", lambda engine: engine.verify(seal, timeout_s), timeout_s + ERROR_S
        )
        update.verified = True

    async def commit(self, claim: Claim, name: str) -> None:
        """Put in force what all have verified.

        Raises:
            ControllerError: they have not, or there is no such update.
        """
        update = self._open(claim, name)
        if not update.verified:
            raise ControllerError(f"update {name!r} of {claim.owner!r} has not been verified on all engines")

        async def one(engine: InferenceEngine) -> None:
            await engine.commit(name)
            update.engines.discard(engine.name)

        await self._engines.each(claim.engines, "commit", one, self._engines.commit_s + ERROR_S)
        self._updates.pop(claim.id, None)

    async def drop(self, claim: Claim, name: str) -> None:
        """Give one up."""
        await self._engines.each(claim.engines, "drop", lambda engine: engine.drop(name))
        if (update := self._updates.get(claim.id)) is not None and update.name == name:
            del self._updates[claim.id]

    async def undo(self, claim: Claim) -> None:
        """Give up whatever is open; never raises."""
        if (update := self._updates.pop(claim.id, None)) is not None:
            try:
                await self._engines.each(sorted(update.engines), "drop", lambda engine: engine.drop(update.name))
            except EngineError as error:
                log.error("update %r of %r could not be dropped everywhere: %s", update.name, claim.owner, error)

    def forget(self, claim: Claim) -> None:
        """The claim has ended."""
        self._members.pop(claim.id, None)

    def _open(self, claim: Claim, name: str) -> _Update:
        update = self._updates.get(claim.id)
        if update is None or update.name != name:
            there = "none is open" if update is None else f"{update.name!r} is open"
            raise ControllerError(f"{claim.owner!r} has no update {name!r}: {there}")
        return update


class Pauses:
    """Which engines are paused, or may be, and until when.

    Args:
        changed: called when the next lapse may be another one than before.
    """

    def __init__(self, engines: Engines, names: Iterable[str], clock: Clock, changed: Callable[[], None]) -> None:
        self._engines = engines
        self._clock = clock
        self._changed = changed
        self._until: dict[str, float] = {}
        self._attempts: dict[str, int] = {}
        self._locks = {name: asyncio.Lock() for name in names}

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

        async def one(engine: InferenceEngine) -> None:
            async with self._locks[engine.name]:
                allowed()
                self._until[engine.name] = until  # before it is: it may be paused when the call fails
                self._attempts.pop(engine.name, None)
                self._changed()
                await engine.pause(lease_s)

        await self._engines.each(names, "pause", one)

    async def resume(self, names: Iterable[str]) -> None:
        """Continue engines, whether they are paused or not."""

        async def one(engine: InferenceEngine) -> None:
            async with self._locks[engine.name]:
                await self._resume(engine)

        await self._engines.each(names, "resume", one)

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

        async def one(engine: InferenceEngine) -> None:
            async with self._locks[name]:
                if self._until.get(name) == again:  # neither continued nor paused anew meanwhile
                    log.warning("the pause of engine %r has lapsed; it is continued", name)
                    await self._resume(engine)

        try:
            await self._engines.each([name], "resume", one)
        except EngineError as error:
            attempts = self._attempts[name] = self._attempts.get(name, 0) + 1
            log.error("attempt %d of %d to continue an engine: %s", attempts, RESUME_ATTEMPTS, error)
            if attempts >= RESUME_ATTEMPTS and self._until.get(name) == again:
                del self._until[name]  # its own lease has ended its pause, or it is gone
        self._changed()

    async def _resume(self, engine: InferenceEngine) -> None:
        await engine.resume()
        self._until.pop(engine.name, None)
        self._attempts.pop(engine.name, None)
