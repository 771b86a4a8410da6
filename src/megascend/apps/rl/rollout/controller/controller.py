"""Controller: runs owners' operations on engines, and undoes them on failure, when a lease lapses, and on close."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from typing_extensions import Self

from megascend.apps.rl.rollout.availability import Availability
from megascend.apps.rl.rollout.controller.engines import Engines, Pauses, Updates
from megascend.apps.rl.rollout.controller.ownership import Claim, Clock, LoopClock, Ownership, Timer
from megascend.apps.rl.rollout.controller.tasks import RolloutTasks
from megascend.errors import ControllerError, ControllerLostError, EngineError, EngineOwnedError
from weightwire.engine import Completion, InferenceEngine, Sampling, TopLogprobs
from weightwire.errors import UnsupportedCallError
from weightwire.manifest import TensorSpec
from weightwire.offer import Offer, Seal
from weightwire.plan import Region
from weightwire.transports.choice import Location

T = TypeVar("T")
log = logging.getLogger(__name__)


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
    """Asynchronous context that runs ``_close`` once, however often it is closed.

    Attributes:
        closed: the closing, once it has begun.
    """

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

    For one event loop. After a failed call the owner's update is dropped on all its engines, and paused ones are resumed; the
    error names the engines that failed. The same happens when a claim's lease lapses and when the controller closes. A pause
    expires here and, in case this process dies, in the engine.

    Args:
        engines: engines with unique names; not closed by the controller.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine] = (),
        *,
        limits: ControllerLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        # A client must notice a restart: claims and rollouts of the old process are gone.
        self.instance = secrets.token_hex(8)
        """Unique id of this controller: one that replaces it has another."""
        self.limits = limits or ControllerLimits()
        self._clock = clock or LoopClock()
        self._names = [engine.name for engine in engines]
        self._ownership = Ownership(self._names, self.limits.max_lease_s)
        self._engines = Engines(
            {engine.name: engine for engine in engines}, self.limits.engine_timeout_s, self.limits.commit_timeout_s
        )
        self._updates = Updates(self._engines)
        self._pauses = Pauses(self._engines, self._names, self._clock, self._arm)
        self._availability = Availability(len(self._names))
        self._sampling = [0] * len(self._names)  # responses that each engine is sampling
        self.tasks = RolloutTasks(self._clock, self.limits.max_tasks, self.limits.max_kept_bytes)
        """Rollouts in flight."""
        self._locks: dict[str, asyncio.Lock] = {}  # by claim: exclusive operations run one at a time
        self._waiting: set[asyncio.Future[bool]] = set()  # for released engines
        self._operations: set[asyncio.Task[Any]] = set()
        self._cleanups: set[asyncio.Future[Any]] = set()
        self._timer: Timer | None = None

    # --- ownership ---

    async def claim(
        self, owner: str, engines: Sequence[str] | None = None, *, lease_s: float, wait_s: float = 0.0
    ) -> Claim:
        """Claim engines (None: all) until the lease lapses or is renewed (:meth:`renew`).

        Args:
            wait_s: longest wait for another owner to release them, in seconds.
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
            self._locks[claim.id] = asyncio.Lock()
            self._arm()
            return claim

    def renew(self, claim_id: str, lease_s: float) -> Claim:
        """Extend a claim to at least ``lease_s`` from now."""
        claim = self._ownership.get(claim_id)
        self._ownership.renew(claim, lease_s, self._clock.now())
        self._arm()
        return claim

    async def release(self, claim_id: str) -> None:
        """Release the engines: an uncommitted update is dropped, paused engines are resumed."""
        claim = self._ownership.get(claim_id)
        reason = f"the claim of {claim.owner!r} on {', '.join(claim.engines)} was released"
        self._ownership.begin_end(claim, reason)
        # Shielded: a caller that disconnects must not leave engines paused or an update half dropped.
        await asyncio.shield(self._clean_up(self._end(claim)))

    def engine(self, claim_id: str) -> OwnedEngines:
        """Return the engines of a claim as one engine."""
        return OwnedEngines(self, claim_id)

    # --- the controller itself ---

    def status(self) -> dict[str, Any]:
        """Return engines with owner and remaining seconds of lease and pause, and counts of rollouts. Contains no secret."""
        now, engines = self._clock.now(), {}
        for name in self._names:
            claim, paused_until = self._ownership.owner_of(name), self._pauses.until(name)
            engines[name] = {
                "owner": claim and claim.owner,
                "lease_s": claim and claim.left_s(now),
                "paused_s": None if paused_until is None else max(0.0, paused_until - now),
            }
        return {"instance": self.instance, "engines": engines, "rollouts": dict(self.tasks.status())}

    # --- internals ---

    async def _sample(self, claim_id: str, work: Callable[[InferenceEngine], Awaitable[T]], n: int) -> T:
        """Sample on the least busy engine of a claim that has not failed recently, and renew the claim."""
        self._check_open()
        claim = self._ownership.get(claim_id)
        claim.renew(self._clock.now())
        # The least busy one, not the next in turn: responses differ in length.
        numbers = [self._names.index(name) for name in claim.engines]
        number = self._availability.best(numbers, self._sampling)
        # Counted before the call, so that requests of one moment spread over the engines.
        self._sampling[number] += n
        # A task of its own, which close() can cancel without the caller's.
        task = asyncio.ensure_future(work(self._engines[self._names[number]]))
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)
        try:
            result = await task
        except EngineError:
            self._availability.failed(number)
            raise
        except asyncio.CancelledError:
            if self.closed and task.cancelled():
                raise ControllerLostError("the controller is closing") from None
            raise
        finally:
            # If the caller has gone, the engine must not keep sampling for it.
            task.cancel()
            self._sampling[number] -= n
        self._availability.succeeded(number)
        return result

    async def _close(self, reason: str) -> None:
        """Cancel operations, drop updates, resume paused engines, fail rollouts in flight."""
        if self._timer is not None:
            self._timer.cancel()
        # First: an operation that continues could pause engines after they were resumed below.
        for operation in list(self._operations):
            operation.cancel()
        await asyncio.gather(*self._operations, return_exceptions=True)
        self._wake()  # waiting claims then fail: the controller is closed
        for claim in self._ownership.claims():
            if not claim.ending:
                self._ownership.begin_end(claim, f"{reason}: the claim of {claim.owner!r} has ended")
                self._clean_up(self._end(claim))
        await asyncio.gather(*self._cleanups, return_exceptions=True)
        self.tasks.close(reason)
        if paused := self._pauses.among(self._names):
            await self._pauses.resume(paused)

    async def _operation(self, claim_id: str, run: Callable[[Claim], Awaitable[T]], *, exclusive: bool = True) -> T:
        """Run an owner's operation, and undo it on failure. The claim does not lapse meanwhile, and is renewed at the end.

        Args:
            exclusive: run only one exclusive operation of the claim at a time.
        """
        self._check_open()
        claim = self._ownership.get(claim_id)
        # A pause and its end run beside the claim's update; what changes the update waits for its turn.
        turn = self._locks[claim.id] if exclusive else contextlib.nullcontext()

        async def run_or_undo() -> T:
            try:
                async with turn:
                    self._ownership.get(claim_id)  # the claim may have ended while waiting for the lock
                    return await run(claim)
            except ControllerError:
                raise  # refused without effect
            except BaseException:
                # Also if the caller disconnects: engines must not stay paused or half updated.
                await asyncio.shield(self._clean_up(self._undo(claim)))
                raise

        # A claim does not lapse during its own call, which may take longer than the lease.
        claim.running += 1
        task = asyncio.ensure_future(run_or_undo())
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
        finally:
            claim.running -= 1
            claim.renew(self._clock.now())
            self._arm()

    async def _undo(self, claim: Claim) -> None:
        """Drop the claim's update, then resume its paused engines; never raises."""
        await self._updates.undo(claim)
        if paused := self._pauses.among(claim.engines):
            try:
                await self._pauses.resume(paused)
            except EngineError as error:
                # Not raised: the error of the operation itself is what its caller has to learn.
                log.error("engines of %r could not be resumed: %s; their own leases end the pause", claim.owner, error)

    async def _end(self, claim: Claim) -> None:
        """Undo, and free a claim's engines, after its running exclusive operation has ended."""
        async with self._locks[claim.id]:
            await self._undo(claim)
        self._locks.pop(claim.id, None)
        # Only after its engines are as they were: a new owner must not find them paused.
        self._updates.forget(claim)
        self._ownership.end(claim)
        self._wake()

    def _wake(self) -> None:
        """Wake all waiting claims after engines were freed."""
        for freed in self._waiting:
            if not freed.done():
                freed.set_result(True)

    async def _freed_within(self, seconds: float) -> bool:
        """Wait until engines are freed; return False at the deadline."""
        # A future for each waiter, which the deadline can settle as well.
        freed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        timer = self._clock.call_at(self._clock.now() + seconds, lambda: freed.done() or freed.set_result(False))
        self._waiting.add(freed)
        try:
            return await freed
        finally:
            timer.cancel()
            self._waiting.discard(freed)

    def _arm(self) -> None:
        """Schedule :meth:`_on_lapse` for the end of the next lease."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = [end for end in (self._ownership.next_lapse(), self._pauses.next_lapse()) if end is not None]
        # A closing controller ends all claims itself.
        if ends and self.closed is None:
            self._timer = self._clock.call_at(min(ends), self._on_lapse)

    def _on_lapse(self) -> None:
        for claim in self._ownership.lapsed(self._clock.now()):
            reason = f"the lease of {claim.owner!r} on {', '.join(claim.engines)} lapsed"
            log.warning("%s; its engines are resumed", reason)
            self._ownership.begin_end(claim, reason)
            self._clean_up(self._end(claim))
        # The engine's own lease ends the pause too; this one covers engines without one.
        for name, retry_at in self._pauses.lapsed():
            self._clean_up(self._pauses.end_lapsed(name, retry_at))
        self._arm()

    def _clean_up(self, work: Awaitable[None]) -> asyncio.Future[None]:
        """Start work that must complete without its caller; :meth:`close` waits for it."""
        task = asyncio.ensure_future(work)
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)
        return task

    def _check_open(self) -> None:
        if self.closed is not None:
            raise ControllerLostError("the controller is closing")


class OwnedEngines(InferenceEngine):
    """The engines of one claim as one engine with all their members.

    Requests for responses go to the least busy engine; everything else to all. A call that fails on any engine, or is cancelled,
    is undone on all: the update is dropped, paused engines are resumed.

    Raises, in any method:
        LeaseLapsedError: the claim has ended.
        ControllerError: the call was refused without effect.
        EngineError: engines failed; the message names them.
    """

    def __init__(self, controller: Controller, claim_id: str) -> None:
        self.name = "the claim's engines"
        self._controller, self._claim = controller, claim_id
        self._engines, self._updates, self._pauses = controller._engines, controller._updates, controller._pauses

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

        return await self._controller._sample(self._claim, sample, n)

    async def logprobs(self, tokens: Sequence[int], adapter: str | None = None) -> list[float]:
        return await self._controller._sample(self._claim, lambda engine: engine.logprobs(tokens, adapter), 1)

    async def top_logprobs(self, tokens: Sequence[int], count: int, adapter: str | None = None) -> TopLogprobs:
        return await self._controller._sample(
            self._claim, lambda engine: engine.top_logprobs(tokens, count, adapter), 1
        )

    async def receivers(self) -> int:
        return sum((await self._do(self._updates.members)).values())

    async def locations(self) -> list[Location | None]:
        by_engine = await self._do(self._updates.locations)
        return [location for locations in by_engine.values() for location in locations]

    async def needs(self, tensors: Sequence[TensorSpec]) -> list[tuple[Region, ...]] | None:
        raise UnsupportedCallError("the engines of a controller take whole tensors, from one sender")

    async def begin_update(self, offer: Offer) -> None:
        """See :class:`InferenceEngine`. Each engine is offered its own ranks of the group."""
        await self._do(lambda claim: self._updates.begin(claim, offer))

    async def verify(self, seal: Seal, timeout_s: float) -> None:
        await self._do(lambda claim: self._updates.verify(claim, seal, timeout_s))

    async def commit(self, update: str) -> None:
        """See :class:`InferenceEngine`. No engine commits before all have verified the update."""
        await self._do(lambda claim: self._updates.commit(claim, update))

    async def drop(self, update: str) -> None:
        await self._do(lambda claim: self._updates.drop(claim, update))

    async def version(self, target: str = "model") -> int:
        """Return the newest version of all engines: the next update must be newer."""

        async def ask(claim: Claim) -> dict[str, int]:
            return await self._engines.call_each(claim.engines, "version", lambda engine: engine.version(target))

        return max((await self._do(ask)).values())

    async def load_adapter(self, name: str, directory: str, version: int | None = None) -> None:
        async def load(claim: Claim) -> None:
            await self._engines.call_each(
                claim.engines,
                "load_adapter",
                lambda engine: engine.load_adapter(name, directory, version),
                self._engines.commit_s,
            )

        await self._do(load)

    async def pause(self, lease_s: float) -> None:
        ownership = self._controller._ownership
        ownership.check_lease(lease_s)

        async def pause(claim: Claim) -> None:
            await self._pauses.pause(claim.engines, lease_s, allowed=lambda: ownership.get(self._claim))

        await self._do(pause, exclusive=False)

    async def resume(self) -> None:
        await self._do(lambda claim: self._pauses.resume(claim.engines), exclusive=False)

    async def _do(self, run: Callable[[Claim], Awaitable[T]], *, exclusive: bool = True) -> T:
        return await self._controller._operation(self._claim, run, exclusive=exclusive)
