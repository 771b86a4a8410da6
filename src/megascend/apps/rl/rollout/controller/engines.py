"""Engines by name: concurrent calls, updates that all engines commit or drop, pauses that expire."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

from megascend.apps.rl.rollout.controller.ownership import Claim, Clock
from megascend.errors import ControllerError, EngineError, EngineLostError, EngineTimeoutError, MessageError
from weightwire.engine import InferenceEngine
from weightwire.engine_calls import call_all
from weightwire.offer import Offer, Seal
from weightwire.transports.choice import Location

T = TypeVar("T")
log = logging.getLogger(__name__)
RESUME_AGAIN_S = 5.0
"""Seconds until another attempt to resume an engine."""
RESUME_ATTEMPTS = 5
ERROR_S = 5.0
"""Seconds by which a call's deadline exceeds the engine's own, so that the engine's more precise error arrives."""


class Engines:
    """Engines by name.

    Args:
        timeout_s: default deadline of a call, in seconds.
        commit_s: deadline of a commit and of loading an adapter.
    """

    def __init__(self, engines: Mapping[str, InferenceEngine], timeout_s: float, commit_s: float) -> None:
        self._engines = dict(engines)
        self._timeout_s, self.commit_s = timeout_s, commit_s

    def __getitem__(self, name: str) -> InferenceEngine:
        return self._engines[name]

    async def call_each(
        self,
        names: Iterable[str],
        label: str,
        call: Callable[[InferenceEngine], Awaitable[T]],
        timeout_s: float | None = None,
    ) -> dict[str, T]:
        """Call engines concurrently, and wait for all.

        Args:
            label: label of the call, for messages.
            timeout_s: instead of the default deadline.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        succeeded, failed = await call_all([self._engines[name] for name in names], call, limit)
        if not failed:
            return succeeded
        # The kind that all errors share: a caller that waits for lost engines must not wait for one that refuses.
        kinds = ((TimeoutError, EngineTimeoutError), (ConnectionError, EngineLostError), (Exception, EngineError))
        kind = next(kind for base, kind in kinds if all(isinstance(error, base) for error in failed.values()))
        reasons = "; ".join(f"engine {name!r}: {type(error).__name__}: {error}" for name, error in failed.items())
        raise kind(f"{label} failed: {reasons}" + (f" (done by {', '.join(succeeded)})" if succeeded else ""))


@dataclass
class _OpenUpdate:
    """Open update of one claim.

    Attributes:
        engines: those that may have received it, fully or in part, and have not committed it.
    """

    name: str
    engines: set[str]
    verified: bool = False


class Updates:
    """Open updates, at most one for each claim."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._updates: dict[str, _OpenUpdate] = {}  # by claim
        self._members: dict[str, dict[str, int]] = {}  # claim -> engine -> members of a group

    async def members(self, claim: Claim) -> dict[str, int]:
        """Return the number of group members of each engine, in the claim's order."""
        members = await self._engines.call_each(claim.engines, "receivers", lambda engine: engine.receivers())
        self._members[claim.id] = members
        return members

    async def locations(self, claim: Claim) -> dict[str, list[Location | None]]:
        """Return where the group members of each engine receive, in the claim's order."""
        locations = await self._engines.call_each(claim.engines, "locations", lambda engine: engine.locations())
        # Trainers ask before every update: an engine may have been started again with other members.
        self._members[claim.id] = {name: len(places) for name, places in locations.items()}
        return locations

    async def begin(self, claim: Claim, offer: Offer) -> None:
        """Offer each engine its ranks of the group."""
        if (update := self._updates.get(claim.id)) is not None:
            raise ControllerError(f"update {update.name!r} of {claim.owner!r} is open: commit or drop it first")
        members = self._members.get(claim.id) or await self.members(claim)
        if offer.workers != sum(members.values()):
            raise MessageError(
                f"the offer is for {offer.workers} members; the engines {', '.join(members)} have {sum(members.values())}"
            )
        # Other claims of the trainer may have ranks before these.
        firsts = dict(zip(members, accumulate(members.values(), initial=offer.first), strict=False))

        async def begin(engine: InferenceEngine) -> None:
            await engine.begin_update(replace(offer, first=firsts[engine.name], workers=members[engine.name]))

        # Before the call: an engine may have begun even if its answer is lost, and must then drop.
        self._updates[claim.id] = _OpenUpdate(offer.update, set(claim.engines))
        await self._engines.call_each(claim.engines, "begin_update", begin)

    async def verify(self, claim: Claim, seal: Seal, timeout_s: float) -> None:
        """Make all engines compare the received update with the seal."""
        update = self._open(claim, seal.update)
        await self._engines.call_each(
            claim.engines, "verify", lambda engine: engine.verify(seal, timeout_s), timeout_s + ERROR_S
        )
        update.verified = True

    async def commit(self, claim: Claim, name: str) -> None:
        """Commit an update that all engines have verified."""
        update = self._open(claim, name)
        if not update.verified:
            raise ControllerError(f"update {name!r} of {claim.owner!r} has not been verified on all engines")

        async def commit(engine: InferenceEngine) -> None:
            await engine.commit(name)
            # A committed engine is not dropped if another one fails.
            update.engines.discard(engine.name)

        await self._engines.call_each(claim.engines, "commit", commit, self._engines.commit_s + ERROR_S)
        self._updates.pop(claim.id, None)

    async def drop(self, claim: Claim, name: str) -> None:
        """Drop an update."""
        await self._engines.call_each(claim.engines, "drop", lambda engine: engine.drop(name))
        if (update := self._updates.get(claim.id)) is not None and update.name == name:
            del self._updates[claim.id]

    async def undo(self, claim: Claim) -> None:
        """Drop the claim's open update on all engines that have not committed it; never raises."""
        if (update := self._updates.pop(claim.id, None)) is not None:
            try:
                await self._engines.call_each(sorted(update.engines), "drop", lambda engine: engine.drop(update.name))
            except EngineError as error:
                log.error("update %r of %r could not be dropped everywhere: %s", update.name, claim.owner, error)

    def forget(self, claim: Claim) -> None:
        """Forget a claim that has ended."""
        self._members.pop(claim.id, None)

    def _open(self, claim: Claim, name: str) -> _OpenUpdate:
        update = self._updates.get(claim.id)
        if update is None or update.name != name:
            current = "none is open" if update is None else f"{update.name!r} is open"
            raise ControllerError(f"{claim.owner!r} has no update {name!r}: {current}")
        return update


class Pauses:
    """Engines that are paused, or may be, with the end of their pauses.

    Args:
        changed: called when the time of the next lapse may have changed.
    """

    def __init__(self, engines: Engines, names: Iterable[str], clock: Clock, changed: Callable[[], None]) -> None:
        self._engines = engines
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

        await self._engines.call_each(names, "pause", pause)

    async def resume(self, names: Iterable[str]) -> None:
        """Resume engines, whether they are paused or not."""

        async def resume(engine: InferenceEngine) -> None:
            async with self._locks[engine.name]:
                await self._resume(engine)

        await self._engines.call_each(names, "resume", resume)

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
            await self._engines.call_each([name], "resume", resume)
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
