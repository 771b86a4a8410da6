"""What owners have done to engines, and how it is undone when they fail, fall silent, or the controller closes."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol, TypeVar

from megascend.errors import (
    ControllerError,
    ControllerLostError,
    EngineError,
    EngineOwnedError,
    EngineTimeoutError,
    MessageError,
)
from megascend.rollout.controller.clock import Clock, LoopClock, Timer
from megascend.rollout.controller.ownership import Claim, Ownership
from megascend.rollout.controller.tasks import RolloutTasks
from weightwire.offer import Offer, Seal

T = TypeVar("T")
log = logging.getLogger(__name__)
RESUME_AGAIN_S = 5.0
RESUME_ATTEMPTS = 5


@dataclass(frozen=True)
class Limits:
    """Bounds of a controller.

    Attributes:
        max_lease_s: longest lease of a claim or a pause, in seconds.
        engine_timeout_s: what an engine has for one call, in seconds, unless the call has a time of its own.
        max_tasks: most rollouts in flight or not fetched.
        max_kept_bytes: most bytes of results that nobody has fetched.
    """

    max_lease_s: float = 600.0
    engine_timeout_s: float = 60.0
    max_tasks: int = 8192
    max_kept_bytes: int = 256 * 2**20


class UpdatedEngine(Protocol):
    """What of an engine (:class:`megascend.rollout.engines.base.InferenceEngine`) the controller calls."""

    name: str

    async def receivers(self) -> int: ...
    async def begin_update(self, offer: Offer) -> None: ...
    async def verify(self, seal: Seal, timeout_s: float) -> None: ...
    async def commit(self, update: str) -> None: ...
    async def drop(self, update: str) -> None: ...
    async def pause(self, lease_s: float) -> None: ...
    async def resume(self) -> None: ...


@dataclass
class _Update:
    """An update of one owner.

    Attributes:
        engines: those that may be receiving it, or have it.
    """

    name: str
    engines: set[str]
    verified: bool = False


class Controller:
    """Engines that have one owner at a time, who updates and pauses them under leases.

    Belongs to one event loop. After a failure of any call the owner's update is dropped on all its engines, and those that were
    paused are continued; the error names the engines that failed. The same happens when a claim's lease lapses and when the
    controller closes. A pause lapses by itself: here and, should this process be gone, in the engine.

    Args:
        engines: each with a name of its own; not closed here.
    """

    def __init__(
        self, engines: Sequence[UpdatedEngine] = (), *, limits: Limits | None = None, clock: Clock | None = None
    ) -> None:
        self.instance = secrets.token_hex(8)
        """Of this controller alone: one that is started in its place has another."""
        self.limits = limits or Limits()
        self._clock = clock or LoopClock()
        self._engines = {engine.name: engine for engine in engines}
        self._ownership = Ownership([engine.name for engine in engines], self.limits.max_lease_s)
        self.tasks = RolloutTasks(self._clock, self.limits.max_tasks, self.limits.max_kept_bytes)
        """Rollouts in flight."""
        self._paused: dict[str, float] = {}  # engine -> when its pause lapses; those that may be paused included
        self._resume_attempts: dict[str, int] = {}
        self._updates: dict[str, _Update] = {}  # by claim
        self._members: dict[str, dict[str, int]] = {}  # claim -> engine -> members of a group
        self._claim_locks: dict[str, asyncio.Lock] = {}
        self._pause_locks = {name: asyncio.Lock() for name in self._engines}
        self._waiting: set[asyncio.Future[bool]] = set()
        self._operations: set[asyncio.Task[Any]] = set()
        self._cleanups: set[asyncio.Task[Any]] = set()
        self._timer: Timer | None = None
        self._closed: asyncio.Future[None] | None = None

    # --- ownership ---

    async def claim(
        self, owner: str, engines: Sequence[str] | None = None, *, lease_s: float, wait_s: float = 0.0
    ) -> Claim:
        """Own engines (None: all) until the lease lapses; :meth:`renew` it before.

        Args:
            wait_s: how long to wait for another owner to give them up, in seconds.

        Raises:
            EngineOwnedError: one of them belongs to another owner, who is named.
        """
        until = self._clock.now() + wait_s
        while True:
            self._check_open()
            try:
                claim = self._ownership.claim(owner, engines, lease_s, self._clock.now())
            except EngineOwnedError:
                if (left := until - self._clock.now()) <= 0 or not await self._freed_within(left):
                    raise
                continue
            self._claim_locks[claim.id] = asyncio.Lock()
            self._arm()
            return claim

    def renew(self, claim_id: str, lease_s: float) -> Claim:
        """Have a claim last at least ``lease_s`` from now."""
        claim = self._ownership.get(claim_id)
        self._ownership.renew(claim, lease_s, self._clock.now())
        self._arm()
        return claim

    async def release(self, claim_id: str) -> None:
        """Give the engines up: an update that is not committed is dropped, those that are paused are continued."""
        claim = self._ownership.get(claim_id)
        why = f"the claim of {claim.owner!r} on {', '.join(claim.engines)} was released"
        self._ownership.begin_end(claim, why)
        await asyncio.shield(self._clean_up(self._end(claim)))

    # --- what an owner has done to its engines ---

    async def init_group(self, claim_id: str) -> dict[str, int]:
        """Engine -> how many members of an update's group it is. The trainer is member 0, they follow in this order."""
        return await self._operation(claim_id, self._init_group)

    async def begin_update(self, claim_id: str, offer: Offer) -> None:
        """Have all engines receive what is offered; returns without waiting for it.

        Args:
            offer: as if to one engine of all members: ``first`` is 1, ``workers`` the sum of :meth:`init_group`. Each engine is
                offered its own places.
        """
        await self._operation(claim_id, lambda claim: self._begin(claim, offer))

    async def verify(self, claim_id: str, seal: Seal, timeout_s: float) -> None:
        """Wait until all engines have everything and have held it against what was sent."""
        await self._operation(claim_id, lambda claim: self._verify(claim, seal, timeout_s))

    async def commit(self, claim_id: str, update: str) -> None:
        """Put weights in force that all engines have verified."""
        await self._operation(claim_id, lambda claim: self._commit(claim, update))

    async def finish_update(self, claim_id: str, seal: Seal, timeout_s: float) -> None:
        """Verify on all engines, then commit on all."""

        async def both(claim: Claim) -> None:
            await self._verify(claim, seal, timeout_s)
            await self._commit(claim, seal.update)

        await self._operation(claim_id, both)

    async def drop(self, claim_id: str, update: str) -> None:
        """Give up an update on all engines."""
        await self._operation(claim_id, lambda claim: self._drop(claim, update))

    async def pause(self, claim_id: str, lease_s: float) -> None:
        """Stop sampling on all engines for at most ``lease_s``; another call renews the lease."""
        if not 0 < lease_s <= self.limits.max_lease_s:
            raise ControllerError(
                f"a lease of {lease_s:g} s; it must be above 0 and at most {self.limits.max_lease_s:g} s"
            )
        await self._operation(claim_id, lambda claim: self._pause(claim, lease_s), exclusive=False)

    async def resume(self, claim_id: str) -> None:
        """End the pause of all engines; nothing happens to those that are not paused."""
        await self._operation(claim_id, lambda claim: self._resume(claim.engines), exclusive=False)

    # --- the controller itself ---

    def status(self) -> dict[str, Any]:
        """Engines with owner and seconds left of lease and pause, and counts of rollouts. Holds no secret."""
        now, engines = self._clock.now(), {}
        for name in self._engines:
            claim = self._ownership.owner_of(name)
            engines[name] = {
                "owner": claim and claim.owner,
                "lease_s": claim and max(0.0, claim.lapses - now),
                "paused_s": max(0.0, self._paused[name] - now) if name in self._paused else None,
            }
        return {"instance": self.instance, "engines": engines, "rollouts": dict(self.tasks.status())}

    async def close(self, why: str = "the controller is closing") -> None:
        """Stop what runs, drop updates, continue what is paused, fail rollouts in flight. A second call waits for the first.

        Raises:
            EngineError: engines that could not be continued; everything else is done. Their own leases end their pause.
        """
        if self._closed is None:
            self._closed = asyncio.ensure_future(self._close(why))
        await asyncio.shield(self._closed)

    async def __aenter__(self) -> Controller:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # --- below ---

    async def _close(self, why: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for operation in list(self._operations):
            operation.cancel()
        await asyncio.gather(*self._operations, return_exceptions=True)
        self._wake()  # those that wait for a claim find it closed
        for claim in self._ownership.claims():
            if not claim.ending:
                self._ownership.begin_end(claim, f"{why}: the claim of {claim.owner!r} has ended")
                self._clean_up(self._end(claim))
        await asyncio.gather(*self._cleanups, return_exceptions=True)
        self.tasks.close(why)
        if self._paused:
            await self._resume(list(self._paused))

    async def _init_group(self, claim: Claim) -> dict[str, int]:
        members = await self._on_each(claim.engines, "receivers", lambda engine: engine.receivers())
        self._members[claim.id] = members
        return members

    async def _begin(self, claim: Claim, offer: Offer) -> None:
        if (open_ := self._updates.get(claim.id)) is not None:
            raise ControllerError(f"update {open_.name!r} of {claim.owner!r} is open: commit or drop it first")
        members = self._members.get(claim.id) or await self._init_group(claim)
        if (offer.first, offer.workers) != (1, sum(members.values())):
            raise MessageError(
                f"the offer is to {offer.workers} members from number {offer.first} on; the engines {', '.join(members)} are "
                f"{sum(members.values())}, from 1 on"
            )
        firsts = dict(zip(members, accumulate(members.values(), initial=1), strict=False))
        self._updates[claim.id] = _Update(offer.update, set(claim.engines))
        await self._on_each(
            claim.engines,
            "begin_update",
            lambda engine: engine.begin_update(replace(offer, first=firsts[engine.name], workers=members[engine.name])),
        )

    async def _verify(self, claim: Claim, seal: Seal, timeout_s: float) -> None:
        update = self._update(claim, seal.update)
        await self._on_each(claim.engines, "verify", lambda engine: engine.verify(seal, timeout_s), timeout_s)
        update.verified = True

    async def _commit(self, claim: Claim, name: str) -> None:
        update = self._update(claim, name)
        if not update.verified:
            raise ControllerError(f"update {name!r} of {claim.owner!r} has not been verified on all engines")

        async def one(engine: UpdatedEngine) -> None:
            await engine.commit(name)
            update.engines.discard(engine.name)

        await self._on_each(claim.engines, "commit", one)
        self._updates.pop(claim.id, None)

    async def _drop(self, claim: Claim, name: str) -> None:
        await self._on_each(claim.engines, "drop", lambda engine: engine.drop(name))
        if (update := self._updates.get(claim.id)) is not None and update.name == name:
            del self._updates[claim.id]

    def _update(self, claim: Claim, name: str) -> _Update:
        update = self._updates.get(claim.id)
        if update is None or update.name != name:
            there = "none is open" if update is None else f"{update.name!r} is open"
            raise ControllerError(f"{claim.owner!r} has no update {name!r}: {there}")
        return update

    async def _pause(self, claim: Claim, lease_s: float) -> None:
        until = self._clock.now() + lease_s

        async def one(engine: UpdatedEngine) -> None:
            async with self._pause_locks[engine.name]:
                self._ownership.get(claim.id)  # still
                self._paused[engine.name] = until  # before it is: it may be paused when the call fails
                self._resume_attempts.pop(engine.name, None)
                self._arm()
                await engine.pause(lease_s)

        await self._on_each(claim.engines, "pause", one)

    async def _resume(self, names: Iterable[str]) -> None:
        async def one(engine: UpdatedEngine) -> None:
            async with self._pause_locks[engine.name]:
                await engine.resume()
                self._paused.pop(engine.name, None)
                self._resume_attempts.pop(engine.name, None)

        await self._on_each(names, "resume", one)

    async def _operation(self, claim_id: str, run: Callable[[Claim], Awaitable[T]], *, exclusive: bool = True) -> T:
        """Run what an owner asked for, and undo on failure. The claim does not lapse meanwhile, and is renewed.

        Args:
            exclusive: one at a time; others wait.
        """
        self._check_open()
        claim = self._ownership.get(claim_id)

        async def whole() -> T:
            try:
                if not exclusive:
                    return await run(claim)
                async with self._claim_locks[claim.id]:
                    self._ownership.get(claim_id)  # still
                    return await run(claim)
            except ControllerError:
                raise  # refused; nothing was done
            except BaseException:
                await asyncio.shield(self._clean_up(self._undo(claim)))
                raise

        claim.running += 1
        task = asyncio.ensure_future(whole())
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed and task.cancelled():
                raise ControllerLostError(
                    "the controller is closing; the update was dropped, engines were continued"
                ) from None
            raise
        finally:
            claim.running -= 1
            claim.lapses = max(claim.lapses, self._clock.now() + claim.lease_s)
            self._arm()

    async def _on_each(
        self,
        names: Iterable[str],
        what: str,
        call: Callable[[UpdatedEngine], Awaitable[T]],
        timeout_s: float | None = None,
    ) -> dict[str, T]:
        """Call engines side by side, each with a deadline; wait for all.

        Raises:
            EngineTimeoutError: all that failed did not answer in time.
            EngineError: some failed; the message names them, and those that did not.
        """
        names = list(names)
        limit = self.limits.engine_timeout_s if timeout_s is None else timeout_s
        done = await asyncio.gather(
            *(_within(limit, call(self._engines[name]), f"{name}: {what}") for name in names), return_exceptions=True
        )
        results = dict(zip(names, done, strict=True))
        failures = {name: result for name, result in results.items() if isinstance(result, BaseException)}
        if not failures:
            return results  # type: ignore[return-value]
        for failure in failures.values():
            if not isinstance(failure, Exception):
                raise failure
        kind = (
            EngineTimeoutError if all(isinstance(error, TimeoutError) for error in failures.values()) else EngineError
        )
        told = "; ".join(f"engine {name!r}: {type(error).__name__}: {error}" for name, error in failures.items())
        fine = [name for name in names if name not in failures]
        raise kind(f"{what} failed: {told}" + (f" (done by {', '.join(fine)})" if fine else ""))

    async def _undo(self, claim: Claim) -> None:
        """Drop what a claim's engines are receiving, then continue those that are paused; never raises."""
        if (update := self._updates.pop(claim.id, None)) is not None:
            try:
                await self._on_each(sorted(update.engines), "drop", lambda engine: engine.drop(update.name))
            except EngineError as error:
                log.error("update %r of %r could not be dropped everywhere: %s", update.name, claim.owner, error)
        if paused := [name for name in claim.engines if name in self._paused]:
            try:
                await self._resume(paused)
            except EngineError as error:
                log.error(
                    "engines of %r could not be continued: %s; their own leases end the pause", claim.owner, error
                )

    async def _end(self, claim: Claim) -> None:
        """Undo, and free a claim's engines, when what runs on them has ended."""
        async with self._claim_locks[claim.id]:
            await self._undo(claim)
        self._claim_locks.pop(claim.id, None)
        self._members.pop(claim.id, None)
        self._ownership.end(claim)
        self._wake()

    def _wake(self) -> None:
        """Engines are free: all who wait for some look again."""
        for freed in self._waiting:
            if not freed.done():
                freed.set_result(True)

    async def _freed_within(self, seconds: float) -> bool:
        """Wait until engines are freed; False if that takes longer."""
        freed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        timer = self._clock.call_at(self._clock.now() + seconds, lambda: freed.done() or freed.set_result(False))
        self._waiting.add(freed)
        try:
            return await freed
        finally:
            timer.cancel()
            self._waiting.discard(freed)

    def _arm(self) -> None:
        """Have :meth:`_on_lapse` called when the next lease is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = [end for end in (self._ownership.next_lapse(), *self._paused.values()) if end is not None]
        if ends and self._closed is None:
            self._timer = self._clock.call_at(min(ends), self._on_lapse)

    def _on_lapse(self) -> None:
        now = self._clock.now()
        for claim in self._ownership.lapsed(now):
            why = f"the lease of {claim.owner!r} on {', '.join(claim.engines)} lapsed"
            log.warning("%s; its engines are continued", why)
            self._ownership.begin_end(claim, why)
            self._clean_up(self._end(claim))
        for name in [name for name, until in self._paused.items() if until <= now]:
            log.warning("the pause of engine %r has lapsed; it is continued", name)
            self._paused[name] = now + RESUME_AGAIN_S
            self._clean_up(self._lapse(name))
        self._arm()

    async def _lapse(self, name: str) -> None:
        """Continue one engine whose pause has lapsed; on failure try again later, a few times."""
        expected = self._paused.get(name)
        async with self._pause_locks[name]:
            if expected is None or self._paused.get(name) != expected:  # continued or paused anew meanwhile
                return
            try:
                await _within(self.limits.engine_timeout_s, self._engines[name].resume(), f"{name}: resume")
                self._paused.pop(name, None)
                self._resume_attempts.pop(name, None)
            except Exception as error:  # noqa: BLE001 - whatever an engine raises, another attempt follows
                attempts = self._resume_attempts[name] = self._resume_attempts.get(name, 0) + 1
                log.error(
                    "engine %r could not be continued (attempt %d of %d): %s", name, attempts, RESUME_ATTEMPTS, error
                )
                if attempts >= RESUME_ATTEMPTS:
                    self._paused.pop(name, None)  # its own lease has ended its pause, or it is gone
                else:
                    self._paused[name] = self._clock.now() + RESUME_AGAIN_S
            self._arm()

    def _clean_up(self, work: Awaitable[None]) -> asyncio.Future[None]:
        """Start what must be finished whoever asked for it is gone; :meth:`close` waits for it."""
        task = asyncio.ensure_future(work)
        self._cleanups.add(task)  # type: ignore[arg-type]
        task.add_done_callback(self._cleanups.discard)
        return task

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ControllerLostError("the controller is closing")


async def _within(seconds: float, call: Awaitable[T], what: str) -> T:
    """Await a call for so long at most. Then it is cancelled and left alone, should it not heed that.

    Raises:
        EngineTimeoutError: it took longer.
    """
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
        raise EngineTimeoutError(f"{what}: no answer within {seconds:g} s")
    return task.result()
