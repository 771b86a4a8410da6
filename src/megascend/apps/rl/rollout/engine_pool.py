"""The engines of a run: which of them answer, and with which weights. Prompts go to no other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from megascend.apps.rl.rollout.availability import FIRST_S, LONGEST_S, Availability
from megascend.errors import EngineError, EngineLostError, EngineTimeoutError
from weightwire.engine import Completion, InferenceEngine, Sampling

log = logging.getLogger(__name__)

VERDICT_S = 10.0
"""Seconds after which an engine that failed and does not report its version is taken to be lost."""
POLL_S = 0.05
PATIENCE = 10
"""An engine that held up an update for a second is asked again after so many, while others sample."""


@dataclass(eq=False)
class Member:
    """An engine of the pool.

    Attributes:
        version: weights that it is known to have, in its own count; None: it needs weights before its next prompt.
        reported: version that it has reported; None: it has not been asked.
        target_version: version of the last update that this run has begun on it.
        problem: why it does not answer or takes no weights; None if it does.
        rejection: why it took no weights the last time; None once it has taken some.
        check: task that asks for its version; None while its version is certain.
        checked: set once ``check`` has had an answer or an error.
    """

    engine: InferenceEngine
    version: int | None = None
    reported: int | None = None
    target_version: int | None = None
    problem: Exception | None = None
    rejection: Exception | None = None
    check: asyncio.Task[None] | None = None
    checked: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ready(self) -> bool:
        """Return whether it may get prompts."""
        return self.version is not None and self.check is None

    @property
    def doubtful(self) -> bool:
        """Return whether it is being asked for its version and may still have its weights."""
        return self.version is not None and self.check is not None and self.problem is None

    @property
    def awaits_weights(self) -> bool:
        return self.version is None and self.check is None and self.reported is not None

    @property
    def state(self) -> str:
        """Describe why it gets no prompts."""
        if (reason := self.problem or self.rejection) is not None:
            return str(reason)
        return "it has no weights yet" if self.awaits_weights else "no answer yet"


class EnginePool:
    """Engines with the weights that each is known to have. All methods are called on one event loop.

    An engine that fails is checked: it gets no prompt until it has reported the version that it should have. One that does not
    answer is lost. It is logged once, asked again at a bounded rate, started again if this process had started it, and has to be
    given the current weights before its next prompt, unless it still has them. One that was restarted, and reports other weights,
    has to be given them, too.

    Args:
        lost_s: seconds without an engine that may get prompts, after which :meth:`require_any` raises.
        changed: called when more engines may get prompts.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        lost_s: float,
        changed: Callable[[], None],
    ) -> None:
        self._members = [Member(engine) for engine in engines]
        self._lost_s, self._changed = lost_s, changed
        self._availability, self._load = Availability(len(engines)), [0] * len(engines)
        self._newest = math.inf  # version of the last update that was begun
        self._ready_at = time.monotonic()  # when an engine could last get prompts
        self.incidents = 0

    @property
    def ready(self) -> bool:
        return any(member.ready for member in self._members)

    @property
    def returned(self) -> bool:
        """Return whether an engine answers and waits for weights."""
        return any(member.awaits_weights for member in self._members)

    @property
    def oldest(self) -> int | None:
        """Return the oldest version of the engines that may get prompts, in their own count; None if there is none."""
        return min((m.version for m in self._members if m.version is not None and m.check is None), default=None)

    # --- sampling ---

    async def choose(self, avoid: Collection[int]) -> int | None:
        """Return the least busy engine that may get prompts, not one of ``avoid`` if there is another; None if there is none."""

        preferred = [member for index, member in enumerate(self._members) if index not in avoid]
        # An engine that has just failed at another prompt may be sound: wait for the verdict on it.
        while not any(member.ready for member in preferred) and (doubtful := [m for m in preferred if m.doubtful]):
            if await self._wait_for_checks(doubtful):
                break
        ready = [index for index, member in enumerate(self._members) if member.ready]
        candidates = [index for index in ready if index not in avoid] or ready
        return self._availability.best(candidates, self._load) if candidates else None

    @contextlib.contextmanager
    def sampling(self, index: int, n: int) -> Iterator[CheckedEngine]:
        """Count ``n`` more responses of an engine within the context, which samples them with the yielded engine."""
        self._load[index] += n
        try:
            yield CheckedEngine(self, self._members[index])
        finally:
            self._load[index] -= n

    def succeeded(self, index: int) -> None:
        self._availability.succeeded(index)

    async def check_failure(self, index: int) -> bool:
        """Record that an engine has failed at a prompt; return whether it is lost. Otherwise the prompt may be at fault."""
        self.incidents += 1
        # Other prompts avoid it for a while, even if it is sound.
        self._availability.failed(index)
        member = self._members[index]
        late = await self._check([member])
        # member.ready would be wrong here: another prompt's failure may have begun another check meanwhile.
        return bool(late) or member.problem is not None or member.version is None

    async def version_of(self, member: Member) -> int | None:
        """Return the version that an engine is known to have, after a check in progress; None if it is lost."""
        while member.doubtful:
            if await self._wait_for_checks([member]):
                return None
        return member.version if member.ready else None

    def has_sampled(self, version: int, completion: Completion) -> bool:
        """Check that a completion is from weights that its engine is known to have had.

        Args:
            version: the engine's when it was asked.
        """
        return version <= completion.first_version <= completion.last_version <= self._newest

    # --- updates ---

    async def connect(self, timeout_s: float) -> list[int] | None:
        """Ask all engines for their versions, at the start of a run.

        Returns:
            Versions of those that answer; None if none has answered, or some have not yet failed, within ``timeout_s``.

        Raises:
            EngineError: an engine refuses, which waiting would not change.
            EngineLostError: as :meth:`require_any`.
        """
        end = time.monotonic() + timeout_s
        for member in self._members:
            if member.check is None and member.reported is None:
                self._begin_check(member)
        while True:
            for member in self._members:
                problem = member.problem
                # Lost and slow engines may answer once they are started; waiting changes no other error.
                if problem is not None and not isinstance(problem, EngineLostError | EngineTimeoutError):
                    raise EngineError(f"{member.engine.name}: {problem}") from problem
            if self.returned and all(member.checked.is_set() for member in self._members):
                return [member.reported for member in self._members if member.reported is not None]
            self.require_any()
            if time.monotonic() > end:
                return None
            await asyncio.sleep(POLL_S)

    async def targets(self, version: int, *, returned: bool) -> list[InferenceEngine]:
        """Return the engines that an update to ``version`` is for.

        Args:
            returned: those that answer and wait for weights; otherwise those that have earlier ones.
        """
        self._newest = version
        await self._wait_for_checks(self._members)
        for member in self._members:
            if not returned and member.check is not None:
                # What it had until it was lost is old after this update.
                member.version = None
            if not member.awaits_weights or member.reported is None or member.reported < version:
                continue
            if member.reported == member.target_version == version:
                # Committed in an update that failed elsewhere.
                self._confirm(member, version)
            else:
                # The number could be another run's: this engine was not there when this run chose its numbers, so they
                # prove nothing about its weights.
                reason = f"it has weights of version {member.reported} from elsewhere, and this run is at {version}: restart it"
                self._reject(member, EngineError(reason))
        if returned:
            members = [member for member in self._members if member.awaits_weights]
        else:
            members = [member for member in self._members if member.ready and member.version != version]
        for member in members:
            member.target_version = version
        return [member.engine for member in members]

    def updated(self, version: int, engines: Sequence[InferenceEngine] | None) -> None:
        """Record that engines (None: all) have the weights of ``version``."""
        for member in self._members:
            if engines is None or member.engine in engines:
                self._confirm(member, version)

    async def update_failed(self, version: int, engines: Sequence[InferenceEngine]) -> list[InferenceEngine]:
        """Check the engines of a failed update; return those that still need it, and whose failure no loss explains.

        None if an engine has been lost or restarted: the update may succeed on the others.
        """
        members = [member for member in self._members if member.engine in engines]
        before = {member: member.version for member in members}
        await self._check(members)
        for member in members:
            if member.check is None and member.reported == version:
                self._confirm(member, version)
        if any(
            member.check is not None or (member.version is None and before[member] is not None) for member in members
        ):
            return []
        return [member.engine for member in members if member.version != version]

    def reject(self, engines: Sequence[InferenceEngine], error: Exception, seconds: float = 0.0) -> None:
        """Record that engines answer but take no weights: they are lost, and asked again later.

        Args:
            seconds: for which the update was held up.
        """
        for member in self._members:
            if member.engine in engines and member.check is None:
                if member.ready:
                    # require_any() may not have been called for long: the trainer was in an update.
                    self._ready_at = time.monotonic()
                member.version = None
                self._reject(member, error, PATIENCE * seconds if self.ready else 0.0)

    def require_any(self) -> None:
        """Raise EngineLostError if no engine could get prompts for ``lost_s`` seconds."""
        # An engine that has just failed may be sound: it counts until the verdict.
        if any(member.ready or member.doubtful for member in self._members):
            self._ready_at = time.monotonic()
        elif time.monotonic() - self._ready_at > self._lost_s:
            problems = "; ".join(f"{member.engine.name}: {member.state}" for member in self._members)
            raise EngineLostError(
                f"no rollout engine could be used for {self._lost_s:g} s (rollout.engines_lost_s): {problems}; start them "
                "again and resume the run (--resume auto)"
            )

    async def close(self) -> None:
        tasks = [member.check for member in self._members if member.check is not None]
        for task in tasks:
            task.cancel()
        # Ended before the engines that they ask are closed.
        await asyncio.gather(*tasks, return_exceptions=True)
        closings = (member.engine.close() for member in self._members)
        for member, result in zip(self._members, await asyncio.gather(*closings, return_exceptions=True), strict=True):
            if isinstance(result, Exception):  # the end of the run is no place for an engine's error
                log.warning("%s was not closed: %s", member.engine.name, result)

    # --- checks ---

    async def _check(self, members: Sequence[Member]) -> list[Member]:
        """Ask engines for their versions, and wait for the answers or errors; return those without any within a bounded time."""
        for member in members:
            if member.check is None:
                self._begin_check(member)
        return await self._wait_for_checks(members)

    async def _wait_for_checks(self, members: Sequence[Member]) -> list[Member]:
        """Wait for the answers or errors of checks in progress; return the engines without any within a bounded time."""
        waits = {asyncio.ensure_future(m.checked.wait()): m for m in members if m.check is not None}
        if not waits:
            return []
        _, pending = await asyncio.wait(waits, timeout=VERDICT_S)
        for wait in pending:
            wait.cancel()
        late = [waits[wait] for wait in pending if not waits[wait].checked.is_set()]
        for member in late:
            # Nothing waits for it from now on, but its answer still counts.
            self._record_problem(member, EngineTimeoutError(f"{member.engine.name}: no answer within {VERDICT_S:g} s"))
        return late

    def _begin_check(self, member: Member, delay_s: float = 0.0) -> None:
        if member.ready:
            # require_any() may not have been called for long: the trainer was in a step.
            self._ready_at = time.monotonic()
        if delay_s == 0:
            member.checked.clear()
        member.check = asyncio.ensure_future(self._ask(member, delay_s))

    async def _ask(self, member: Member, delay_s: float) -> None:
        """Ask an engine for its version until it answers."""
        index = self._members.index(member)
        await asyncio.sleep(delay_s)
        while True:
            try:
                version = await member.engine.version()
                if type(version) is not int or version < 0:  # True is an int
                    raise EngineError(f"{member.engine.name}: its version is {version!r:.40}, not a number from 0 on")
                break
            except Exception as error:  # noqa: BLE001  one engine's error must not end the run
                self._record_problem(member, error)
            try:
                if await member.engine.revive():
                    log.warning("%s: started again", member.engine.name)
                    continue
            except Exception as error:  # noqa: BLE001
                self._record_problem(member, error)
            delay_s = self._availability.failed(index) or FIRST_S
            await asyncio.sleep(delay_s)
        member.check, member.reported = None, version
        if member.problem is not None:
            log.warning("%s answers again, with weights of version %d", member.engine.name, version)
            member.problem = None
        if version != member.version:
            member.version = None
        member.checked.set()
        self._changed()

    def _record_problem(self, member: Member, error: Exception) -> None:
        """Note why an engine does not answer; log it the first time."""
        if member.problem is None:
            log.warning(
                "%s is lost, and is asked again every %g to %g s: %s", member.engine.name, FIRST_S, LONGEST_S, error
            )
        member.problem = error
        member.checked.set()

    def _confirm(self, member: Member, version: int) -> None:
        member.version, member.rejection = version, None
        if member.check is None:
            member.problem, member.reported = None, version
            self._changed()

    def _reject(self, member: Member, error: Exception, delay_s: float = 0.0) -> None:
        self._record_problem(member, error)
        member.rejection = error
        delay_s = max(delay_s, self._availability.failed(self._members.index(member)) or FIRST_S)
        self._begin_check(member, delay_s=delay_s)


class CheckedEngine:
    """Engine of a pool as episodes see it: a response from other weights than the pool knows of is an error of the engine."""

    def __init__(self, pool: EnginePool, member: Member) -> None:
        self.name = member.engine.name
        self._pool, self._member = pool, member

    async def generate(self, prompt: Sequence[int], sampling: Sampling, n: int = 1) -> list[Completion]:
        """Sample as :meth:`InferenceEngine.generate`.

        Raises:
            EngineLostError: the engine has, or may have, other weights than those it was given.
        """
        # Between two turns of an episode it may have been lost, or have failed at another prompt.
        version = await self._pool.version_of(self._member)
        if version is None:
            raise EngineLostError(f"{self.name}: it was lost, or restarted, between two responses")
        completions = await self._member.engine.generate(prompt, sampling, n)
        for completion in completions:
            if not self._pool.has_sampled(version, completion):
                raise EngineLostError(
                    f"{self.name}: it has answered with weights of version {completion.first_version} to "
                    f"{completion.last_version}, not {version} or the next: it was restarted, or is not this run's alone"
                )
        return completions
