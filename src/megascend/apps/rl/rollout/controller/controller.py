"""Controller: engines with one owner at a time, whose calls are undone on failure, when a lease lapses, and on close."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeVar

from typing_extensions import Self

from megascend.apps.rl.rollout.availability import Availability
from megascend.apps.rl.rollout.controller.tasks import Clock, RolloutTasks, Timer
from megascend.errors import (
    ControllerError,
    ControllerLostError,
    EngineError,
    EngineLostError,
    EngineOwnedError,
    EngineTimeoutError,
    LeaseLapsedError,
    MessageError,
)
from weightwire.engine import Completion, InferenceEngine, Lease, Sampling, TopLogprobs
from weightwire.engine_calls import call_all
from weightwire.errors import UnsupportedCallError
from weightwire.manifest import TensorSpec
from weightwire.offer import Offer, Seal
from weightwire.plan import Region
from weightwire.transports.choice import Location

T = TypeVar("T")
Call = Callable[[InferenceEngine], Awaitable[T]]
log = logging.getLogger(__name__)

REMEMBERED = 256
"""Number of ended claims of which :meth:`Controller.engine` can report the reason."""
ERROR_S = 5.0
"""Seconds by which a call's deadline exceeds the engine's own, so that the engine's more precise error arrives."""
RESUME_AGAIN_S = 5.0
"""Seconds until another attempt to resume an engine whose pause has lapsed."""
RESUME_ATTEMPTS = 5


@dataclass(frozen=True)
class ControllerLimits:
    """Bounds of a controller.

    Attributes:
        max_lease_s: longest lease of a claim or a pause, in seconds.
        engine_timeout_s: default deadline of a call of an engine, in seconds.
        commit_timeout_s: deadline of an engine's commit, and of loading an adapter.
        max_tasks: maximum number of rollouts in flight or not fetched.
        max_kept_bytes: maximum bytes of results that nobody has fetched.
    """

    max_lease_s: float = 600.0
    engine_timeout_s: float = 60.0
    commit_timeout_s: float = 660.0
    max_tasks: int = 8192
    max_kept_bytes: int = 256 * 2**20


class ClosedOnce(ABC):
    """Asynchronous context that runs ``_close`` once, however often it is closed."""

    closed: asyncio.Future[None] | None = None

    async def close(self, reason: str = "the controller is closing") -> None:
        """Close; a second call waits for the first."""
        if self.closed is None:
            self.closed = asyncio.ensure_future(self._close(reason))
        # A second signal, or a cancelled caller, must not end the closing halfway.
        await asyncio.shield(self.closed)

    @abstractmethod
    async def _close(self, reason: str) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class Controller(ClosedOnce):
    """Engines with one owner at a time, who updates and pauses them under leases.

    Made on the event loop that it belongs to. After a failed call the owner's update is dropped on all its engines, and paused
    ones are resumed; the error names the engines that failed. The same happens when a claim's lease lapses and when the
    controller closes. A pause expires here and, in case this process dies, in the engine.

    Args:
        engines: engines with unique names; not closed by the controller.
        clock: default: the running event loop.

    Attributes:
        instance: unique id: a client notices a restart by it, which has lost all claims and rollouts.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine] = (),
        *,
        limits: ControllerLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.instance = secrets.token_hex(8)
        self.limits = limits or ControllerLimits()
        self.clock = clock or asyncio.get_running_loop()
        self.tasks = RolloutTasks(self.clock, self.limits.max_tasks, self.limits.max_kept_bytes)
        self._engines = {engine.name: engine for engine in engines}
        self._names = [*self._engines]
        self._claims: dict[str, Claim] = {}
        self._ended: deque[tuple[str, str]] = deque(maxlen=REMEMBERED)  # claims, with the reason
        self._availability = Availability(len(self._names))
        self._sampling = [0] * len(self._names)  # responses that each engine is sampling
        self._waiting: set[asyncio.Event] = set()  # for released engines
        self._operations: set[asyncio.Task[Any]] = set()
        self._cleanups: set[asyncio.Task[Any]] = set()
        self._timer: Timer | None = None

    # --- ownership ---

    async def claim(
        self, owner: str, engines: Sequence[str] | None = None, *, lease_s: float, wait_s: float = 0.0
    ) -> Claim:
        """Claim engines (None: all) until the lease lapses or is renewed (:meth:`renew`).

        Args:
            wait_s: longest wait for another owner to release them, in seconds.
        """
        until = self.clock.time() + wait_s
        while True:
            self.check_open()
            try:
                claim = self._claim(owner, engines, lease_s)
            except EngineOwnedError:
                if self.clock.time() >= until:
                    raise
                await self._freed_until(until)
                continue
            self._claims[claim.id] = claim
            self.arm()
            return claim

    def _claim(self, owner: str, engines: Sequence[str] | None, lease_s: float) -> Claim:
        names = tuple(self._names if engines is None else dict.fromkeys(engines))
        if unknown := [name for name in names if name not in self._engines]:
            raise ControllerError(
                f"unknown engine {', '.join(map(repr, unknown))}; known: {', '.join(self._names) or 'none'}"
            )
        if not names:
            raise ControllerError("a claim on no engine")
        self.check_lease(lease_s)
        now = self.clock.time()
        # All or none: two owners with a part each would wait for each other.
        for name in names:
            if (other := self._owner_of(name)) is not None:
                state = "is being released by" if other.ended else "belongs to"
                raise EngineOwnedError(
                    f"engine {name!r} {state} {other.owner!r}, since {now - other.since:.1f} s ago, for another "
                    f"{other.left_s(now):.1f} s unless renewed; {owner!r} cannot have it before"
                )
        lease = {"owner": owner, "lease_s": lease_s, "until": now + lease_s}
        return Claim(controller=self, id=secrets.token_hex(16), engines=names, since=now, **lease)

    def _owner_of(self, engine: str) -> Claim | None:
        """Return the claim on an engine, even if it is ending; None if the engine is free."""
        return next((claim for claim in self._claims.values() if engine in claim.engines), None)

    async def _freed_until(self, moment: float) -> None:
        """Wait until engines are freed, or for a moment on the clock."""
        freed = asyncio.Event()
        timer = self.clock.call_at(moment, freed.set)
        self._waiting.add(freed)
        try:
            await freed.wait()
        finally:
            timer.cancel()
            self._waiting.discard(freed)

    def check_lease(self, lease_s: float) -> None:
        if not 0 < lease_s <= self.limits.max_lease_s:
            raise ControllerError(
                f"a lease of {lease_s:g} s; it must be above 0 and at most {self.limits.max_lease_s:g} s"
            )

    def renew(self, claim_id: str, lease_s: float) -> Claim:
        """Extend a claim to at least ``lease_s`` from now."""
        claim = self.engine(claim_id)
        self.check_lease(lease_s)
        claim.renew(self.clock.time(), lease_s)
        self.arm()
        return claim

    async def release(self, claim_id: str) -> None:
        """Release the engines: an uncommitted update is dropped, paused engines are resumed."""
        claim = self.engine(claim_id)
        # Shielded: a caller that disconnects must not leave engines paused or an update half dropped.
        await asyncio.shield(
            self._end(claim, f"the claim of {claim.owner!r} on {', '.join(claim.engines)} was released")
        )

    def engine(self, claim_id: str) -> Claim:
        """Return an active claim: its engines as one engine."""
        claim = self._claims.get(claim_id)
        if claim is not None and not claim.ended:
            return claim
        # A trainer whose lease has lapsed is told so, and by which cause; an id that never existed only that it is unknown.
        for ended, reason in self._ended:
            if ended == claim_id:
                raise LeaseLapsedError(f"{reason}; claim the engines again")
        raise ControllerError("no such claim")

    def status(self) -> dict[str, Any]:
        """Return engines with owner and remaining seconds of lease and pause, and counts of rollouts. Contains no secret."""
        now, engines = self.clock.time(), {}
        for name in self._names:
            claim = self._owner_of(name)
            pause_ends = None if claim is None else claim.pause_ends.get(name)
            engines[name] = {
                "owner": claim and claim.owner,
                "lease_s": claim and claim.left_s(now),
                "paused_s": None if pause_ends is None else max(0.0, pause_ends - now),
            }
        return {"instance": self.instance, "engines": engines, "rollouts": dict(self.tasks.status())}

    # --- calls of a claim ---

    async def sample(self, claim: Claim, work: Call[T], n: int) -> T:
        """Sample on the least busy engine of a claim that has not failed recently, and renew the claim."""
        self.check_open()
        self.engine(claim.id).renew(self.clock.time())
        # The least busy one, not the next in turn: responses differ in length.
        numbers = [self._names.index(name) for name in claim.engines]
        number = self._availability.best(numbers, self._sampling)
        # Counted before the call, so that requests of one moment spread over the engines.
        self._sampling[number] += n
        try:
            result = await self._cancellable(work(self._engines[self._names[number]]))
        except EngineError:
            self._availability.failed(number)
            raise
        finally:
            self._sampling[number] -= n
        self._availability.succeeded(number)
        return result

    async def call_each(
        self, names: Iterable[str], label: str, call: Call[T], timeout_s: float | None = None
    ) -> dict[str, T]:
        """Call engines concurrently, and wait for all.

        Args:
            timeout_s: instead of the default deadline.
        """
        limit = self.limits.engine_timeout_s if timeout_s is None else timeout_s
        succeeded, failed = await call_all([self._engines[name] for name in names], call, limit)
        if not failed:
            return succeeded
        # The kind that all errors share: a caller that waits for lost engines must not wait for one that refuses.
        kinds = ((TimeoutError, EngineTimeoutError), (ConnectionError, EngineLostError), (Exception, EngineError))
        kind = next(kind for base, kind in kinds if all(isinstance(error, base) for error in failed.values()))
        reasons = "; ".join(f"engine {name!r}: {type(error).__name__}: {error}" for name, error in failed.items())
        raise kind(f"{label} failed: {reasons}" + (f" (done by {', '.join(succeeded)})" if succeeded else ""))

    async def operate(self, claim: Claim, run: Callable[[], Awaitable[T]], *, exclusive: bool = True) -> T:
        """Run an owner's operation, and undo it on failure. The claim does not lapse meanwhile, and is renewed at the end.

        Args:
            exclusive: run only one exclusive operation of the claim at a time.
        """
        self.check_open()
        self.engine(claim.id)
        # A pause and its end run beside the claim's update; what changes the update waits for its turn.
        turn = claim.turn if exclusive else contextlib.nullcontext()

        async def run_or_undo() -> T:
            try:
                async with turn:
                    self.engine(claim.id)  # it may have ended while waiting for the lock
                    return await run()
            except ControllerError:
                raise  # refused without effect
            except BaseException:
                # Also if the caller disconnects: engines must not stay paused or half updated.
                await asyncio.shield(self._clean_up(claim.undo()))
                raise

        # A claim does not lapse during its own call, which may take longer than the lease.
        claim.running += 1
        try:
            return await self._cancellable(run_or_undo())
        finally:
            claim.running -= 1
            claim.renew(self.clock.time())
            self.arm()

    async def _cancellable(self, work: Awaitable[T]) -> T:
        """Await a claim's call, which ends with its caller and when the controller closes."""
        # A task of its own, which close() can cancel without the caller's.
        task = asyncio.ensure_future(work)
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self.closed and task.cancelled():
                raise ControllerLostError(
                    "the controller is closing; the update was dropped, engines were resumed"
                ) from None
            raise

    # --- ends of leases, and of the controller ---

    async def _close(self, reason: str) -> None:
        """Cancel operations, drop updates, resume paused engines, fail rollouts in flight."""
        if self._timer is not None:
            self._timer.cancel()
        # First: an operation that continues could pause engines after they were resumed below.
        for operation in list(self._operations):
            operation.cancel()
        await asyncio.gather(*self._operations, return_exceptions=True)
        self._wake()  # waiting claims then fail: the controller is closed
        active = [claim for claim in self._claims.values() if not claim.ended]
        ends = [self._end(claim, f"{reason}: the claim of {claim.owner!r} has ended") for claim in active]
        await asyncio.gather(*self._cleanups, return_exceptions=True)
        self.tasks.close(reason)
        for end in ends:
            if (problem := end.result()) is not None:
                raise problem

    def _end(self, claim: Claim, reason: str) -> asyncio.Task[EngineError | None]:
        """Refuse a claim's calls from now on; undo, and free its engines, after its running exclusive operation has ended."""
        claim.ended = reason
        self._ended.append((claim.id, reason))

        async def end() -> EngineError | None:
            async with claim.turn:
                problem = await claim.undo()
            # Only after its engines are as they were: a new owner must not find them paused.
            del self._claims[claim.id]
            self._wake()
            return problem

        return self._clean_up(end())

    def _wake(self) -> None:
        for freed in self._waiting:
            freed.set()

    def arm(self) -> None:
        """Schedule :meth:`_on_lapse` for the end of the next lease of a claim or a pause."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = [claim.until for claim in self._claims.values() if claim.can_lapse]
        ends += [moment for claim in self._claims.values() for moment in claim.pause_ends.values()]
        # A closing controller ends all claims itself.
        if ends and self.closed is None:
            self._timer = self.clock.call_at(min(ends), self._on_lapse)

    def _on_lapse(self) -> None:
        now = self.clock.time()
        for claim in list(self._claims.values()):
            if claim.can_lapse and claim.until <= now:
                reason = f"the lease of {claim.owner!r} on {', '.join(claim.engines)} lapsed"
                log.warning("%s; its engines are resumed", reason)
                self._end(claim, reason)
            # The engine's own lease ends the pause too; this one covers engines without one.
            for name in [name for name, moment in claim.pause_ends.items() if moment <= now]:
                # Moved forward at once: the timer must not find the same pause again while its end is under way.
                claim.pause_ends[name] = now + RESUME_AGAIN_S
                self._clean_up(claim.end_lapsed_pause(name, now + RESUME_AGAIN_S))
        self.arm()

    def _clean_up(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work that must complete without its caller; :meth:`close` waits for it."""
        task = asyncio.ensure_future(work)
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)
        return task

    def check_open(self) -> None:
        if self.closed is not None:
            raise ControllerLostError("the controller is closing")


@dataclass(kw_only=True, eq=False, repr=False)
class Claim(Lease, InferenceEngine):
    """The engines of one owner, until the lease lapses, as one engine with all their members.

    Requests for responses go to the least busy engine; everything else to all. A call that fails on any engine, or is cancelled,
    is undone on all: the update is dropped, paused engines are resumed.

    Attributes:
        id: secret by which the owner identifies itself to the controller.
        running: number of the owner's running calls; the claim does not lapse meanwhile.
        ended: why it was released or has lapsed: its engines are being resumed. Empty while it is active.
        turn: held by the call that changes the update.
        pause_ends: end of the pause of each engine that is paused, or may be.

    Raises, in any method:
        LeaseLapsedError: the claim has ended.
        ControllerError: the call was refused without effect.
        EngineError: engines failed; the message names them.
    """

    name = "the claim's engines"
    controller: Controller
    id: str
    engines: tuple[str, ...]
    since: float
    running: int = 0
    ended: str = ""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    pause_ends: dict[str, float] = field(default_factory=dict)
    _update: str = ""  # name of the open update
    _receiving: set[str] = field(default_factory=set)  # engines that may have any of it, and have not committed it
    _verified: bool = False
    _members: dict[str, int] = field(default_factory=dict)  # of a group, by engine
    _attempts: dict[str, int] = field(default_factory=dict)  # to end the lapsed pause of an engine

    def __post_init__(self) -> None:
        # A pause and a resume of one engine must not overtake each other.
        self._pausing = {name: asyncio.Lock() for name in self.engines}

    @property
    def can_lapse(self) -> bool:
        """Check whether the end of the lease ends the claim; a running call renews it at its end."""
        return not (self.ended or self.running)

    async def _call_all(self, label: str, call: Call[T], timeout_s: float | None = None) -> dict[str, T]:
        return await self.controller.call_each(self.engines, label, call, timeout_s)

    async def _operate(self, label: str, call: Call[T], timeout_s: float | None = None) -> dict[str, T]:
        return await self.controller.operate(self, lambda: self._call_all(label, call, timeout_s))

    # --- sampling ---

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, n: int = 1, adapter: str | None = None
    ) -> list[Completion]:
        async def sample(engine: InferenceEngine) -> list[Completion]:
            completions = await engine.generate(prompt, sampling, n, adapter)
            # A failure of the engine, which would otherwise get all requests: it answers them at once, and is the least busy.
            for completion in completions:
                if wrong := [value for value in completion.logprobs if not math.isfinite(value)]:
                    raise EngineError(
                        f"engine {engine.name!r} gave a token that it sampled the log-probability {wrong[0]}: its weights or its "
                        "numbers are not finite"
                    )
            return completions

        return await self.controller.sample(self, sample, n)

    async def logprobs(self, tokens: Sequence[int], adapter: str | None = None) -> list[float]:
        return await self.controller.sample(self, lambda engine: engine.logprobs(tokens, adapter), 1)

    async def top_logprobs(self, tokens: Sequence[int], count: int, adapter: str | None = None) -> TopLogprobs:
        return await self.controller.sample(self, lambda engine: engine.top_logprobs(tokens, count, adapter), 1)

    # --- updates ---

    async def receivers(self) -> int:
        return sum((await self.controller.operate(self, self._ask_members)).values())

    async def _ask_members(self) -> dict[str, int]:
        self._members = await self._call_all("receivers", lambda engine: engine.receivers())
        return self._members

    async def locations(self) -> list[Location | None]:
        places = await self._operate("locations", lambda engine: engine.locations())
        # Trainers ask before every update: an engine may have been started again with other members.
        self._members = {name: len(of_engine) for name, of_engine in places.items()}
        return [place for of_engine in places.values() for place in of_engine]

    async def needs(self, tensors: Sequence[TensorSpec]) -> list[tuple[Region, ...]] | None:
        raise UnsupportedCallError("the engines of a controller take whole tensors, from one sender")

    async def begin_update(self, offer: Offer) -> None:
        """See :class:`InferenceEngine`. Each engine is offered its own ranks of the group."""

        async def begin() -> None:
            if self._update:
                raise ControllerError(f"update {self._update!r} of {self.owner!r} is open: commit or drop it first")
            members = self._members or await self._ask_members()
            if offer.workers != sum(members.values()):
                raise MessageError(
                    f"the offer is for {offer.workers} members; the engines {', '.join(members)} have {sum(members.values())}"
                )
            # Other claims of the trainer may have ranks before these.
            firsts = accumulate(members.values(), initial=offer.first)
            offers = {
                name: replace(offer, first=first, workers=members[name])
                for name, first in zip(members, firsts, strict=False)
            }
            # Before the call: an engine may have begun even if its answer is lost, and must then drop.
            self._update, self._receiving, self._verified = offer.update, set(self.engines), False
            await self._call_all("begin_update", lambda engine: engine.begin_update(offers[engine.name]))

        await self.controller.operate(self, begin)

    async def verify(self, seal: Seal, timeout_s: float) -> None:
        async def verify() -> None:
            self._require_open(seal.update)
            await self._call_all("verify", lambda engine: engine.verify(seal, timeout_s), timeout_s + ERROR_S)
            self._verified = True

        await self.controller.operate(self, verify)

    async def commit(self, update: str) -> None:
        """See :class:`InferenceEngine`. No engine commits before all have verified the update."""

        async def commit_engine(engine: InferenceEngine) -> None:
            await engine.commit(update)
            # A committed engine is not dropped if another one fails.
            self._receiving.discard(engine.name)

        async def commit() -> None:
            self._require_open(update)
            if not self._verified:
                raise ControllerError(f"update {update!r} of {self.owner!r} has not been verified on all engines")
            await self._call_all("commit", commit_engine, self.controller.limits.commit_timeout_s + ERROR_S)
            self._update = ""

        await self.controller.operate(self, commit)

    async def drop(self, update: str) -> None:
        async def drop() -> None:
            await self._call_all("drop", lambda engine: engine.drop(update))
            if self._update == update:
                self._update = ""

        await self.controller.operate(self, drop)

    def _require_open(self, update: str) -> None:
        if not update or self._update != update:
            current = f"{self._update!r} is open" if self._update else "none is open"
            raise ControllerError(f"{self.owner!r} has no update {update!r}: {current}")

    async def version(self, target: str = "model") -> int:
        """Return the newest version of all engines: the next update must be newer."""
        return max((await self._operate("version", lambda engine: engine.version(target))).values())

    async def load_adapter(self, name: str, directory: str, version: int | None = None) -> None:
        timeout_s = self.controller.limits.commit_timeout_s
        await self._operate("load_adapter", lambda engine: engine.load_adapter(name, directory, version), timeout_s)

    async def undo(self) -> EngineError | None:
        """Drop the open update where it was not committed, then resume paused engines; return why engines may stay paused."""
        update, self._update = self._update, ""
        if update:
            try:
                await self.controller.call_each(sorted(self._receiving), "drop", lambda engine: engine.drop(update))
            except EngineError as error:
                log.error("update %r of %r could not be dropped everywhere: %s", update, self.owner, error)
        try:
            await self.controller.call_each([*self.pause_ends], "resume", self._resume)
        except EngineError as error:
            # Not raised: the error of the operation itself is what its caller has to learn.
            log.error("engines of %r could not be resumed: %s; their own leases end the pause", self.owner, error)
            return error
        return None

    # --- pauses ---

    async def pause(self, lease_s: float) -> None:
        """See :class:`InferenceEngine`. Another call renews the pause."""
        self.controller.check_lease(lease_s)
        until = self.controller.clock.time() + lease_s

        async def pause(engine: InferenceEngine) -> None:
            async with self._pausing[engine.name]:
                self.controller.engine(self.id)  # it may have ended meanwhile
                self.pause_ends[engine.name] = until  # before the call: the engine may be paused even if it fails
                self._attempts.pop(engine.name, None)
                self.controller.arm()
                await engine.pause(lease_s)

        await self.controller.operate(self, lambda: self._call_all("pause", pause), exclusive=False)

    async def resume(self) -> None:
        """See :class:`InferenceEngine`. All engines are resumed, whether they are paused or not."""
        await self.controller.operate(self, lambda: self._call_all("resume", self._resume), exclusive=False)

    async def _resume(self, engine: InferenceEngine, lapsed_until: float | None = None) -> None:
        """Resume an engine, unless its pause has lapsed and was ended or renewed meanwhile."""
        async with self._pausing[engine.name]:
            if lapsed_until is None or self.pause_ends.get(engine.name) == lapsed_until:
                await engine.resume()
                self.pause_ends.pop(engine.name, None)
                self._attempts.pop(engine.name, None)

    async def end_lapsed_pause(self, name: str, retry_at: float) -> None:
        """Resume an engine whose pause has lapsed; on failure it lapses again at ``retry_at``, a few times."""
        log.warning("the pause of engine %r has lapsed; resuming it", name)
        try:
            await self.controller.call_each([name], "resume", lambda engine: self._resume(engine, retry_at))
        except EngineError as error:
            attempts = self._attempts[name] = self._attempts.get(name, 0) + 1
            log.error("attempt %d of %d to resume an engine: %s", attempts, RESUME_ATTEMPTS, error)
            if attempts >= RESUME_ATTEMPTS and self.pause_ends.get(name) == retry_at:
                del self.pause_ends[name]  # its own lease has ended its pause, or it is gone
        self.controller.arm()
