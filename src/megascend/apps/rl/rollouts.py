"""The rollouts of rank 0 as all ranks see them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import TYPE_CHECKING, Any, TypeVar

from megascend.apps.rl.rollout.buffer import Counts
from megascend.apps.rl.rollout.group import TrajectoryGroup
from megascend.apps.rl.rollout.prompts import Prompt
from megascend.errors import DataError, EngineTimeoutError
from megascend.runtime.stop_signals import MeasurementStopped

if TYPE_CHECKING:
    from megascend.apps.rl.rollout.collector import RolloutCollector
    from megascend.backend import Backend

SLICE_S = 5.0
"""Seconds that rank 0 waits for engines at a time. In between, ranks check that none is lost, and for stop signals."""

T = TypeVar("T")


class SharedRollouts:
    """A collector on rank 0, whose groups reach all ranks. Every method is collective.

    Attributes:
        recover: gives weights to engines that were lost and are back; called on every rank during waits. Set after construction,
            by the updates that are sent to the same engines.
        evaluated: groups of the last evaluation, on rank 0.
    """

    def __init__(self, backend: Backend, collector: RolloutCollector | None, patience_s: float) -> None:
        """
        Args:
            collector: rank 0's collector; None on all others.
            patience_s: seconds without any group, while there are engines, after which the run fails.
        """
        self.recover: Callable[[], object] = lambda: None
        self._backend, self._collector, self._patience_s = backend, collector, patience_s
        self.evaluated: list[TrajectoryGroup] = []
        # The others wait in a collective, whose deadline a slow engine must not reach.
        self._slice_s = min(SLICE_S, backend.groups.timeout_s / 4)

    def on_rank_0(self, act: Callable[[RolloutCollector], T]) -> T:
        """Return or raise on every rank what ``act`` returns or raises on rank 0."""

        def produce() -> T:
            assert self._collector is not None
            return act(self._collector)

        return self._backend.from_rank_0(produce)

    def take(self, step: int, stop: Callable[[], bool]) -> list[TrajectoryGroup] | None:
        """Return the groups of the next step, or None once any rank received a stop signal.

        Raises:
            EngineError, DataError: as :meth:`RolloutCollector.take`, on every rank.
            EngineTimeoutError: not one group has arrived within the patience.
        """
        patience_s = self._patience_s + self._slice_s  # engines' own deadlines come first
        last, since = self._progress(), time.monotonic()
        with self._backend.groups.monitor.phase("rollout"):
            while True:
                self.recover()
                groups = self.on_rank_0(lambda collector: collector.take(step, self._slice_s))
                if groups is not None:
                    return groups
                progress = self._progress()
                # The limit is for silence: slow engines that answer may take any time, and lost ones have another limit.
                if progress != last or progress is None:
                    last, since = progress, time.monotonic()
                # One exchange for both. Each rank has its own clock and its own signals.
                stopping, late = self._backend.any_rank(stop(), time.monotonic() - since > patience_s)
                if stopping:
                    return None
                if late:
                    waiting_for = self.on_rank_0(lambda collector: collector.describe_wait())
                    raise EngineTimeoutError(
                        f"step {step + 1}: {waiting_for} for {self._patience_s:g} s (rollout.timeout_s)"
                    )

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        temperature: float,
        n: int,
        offset: int | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> tuple[float, int]:
        """Return the mean reward of ``n`` responses to each prompt, and how many episodes failed.

        A failed episode counts as 0, or as the lowest reward of the evaluation if that is below: to fail is never better than the
        worst answer, and a mean without it would rise as the environment breaks.

        Args:
            offset: as for :meth:`RolloutCollector.start`.

        Raises:
            MeasurementStopped: any rank received a stop signal.
            EngineError, DataError: an engine or the reward function failed, on every rank.
            EngineTimeoutError: nothing has been graded within the patience.
        """
        running: list[Future[list[TrajectoryGroup]]] = []
        progress = [0, time.monotonic()]  # episodes ended, and since when

        def wait(collector: RolloutCollector) -> tuple[float, int] | None:
            if not running:
                running.append(collector.evaluate(prompts, temperature, n, offset))
            collector.call(collector.pool.require_any)
            try:
                groups = running[0].result(self._slice_s)
            except NotYet:
                # The engine's own timeout is of the same class as that of this wait.
                if running[0].done():
                    raise
                if collector.completed_episodes() > progress[0] or not collector.pool.ready:
                    progress[:] = collector.completed_episodes(), time.monotonic()
                patience_s = self._patience_s + self._slice_s  # engines' own deadlines come first
                if time.monotonic() - progress[1] > patience_s:
                    raise EngineTimeoutError(
                        f"evaluation: {collector.describe_wait()} for {self._patience_s:g} s (rollout.timeout_s)"
                    ) from None
                return None
            self.evaluated = groups
            rewards, failed = (
                [reward for group in groups for reward in group.rewards],
                sum(group.failed for group in groups),
            )
            if not rewards:
                raise DataError("evaluation: no episode succeeded")
            return (sum(rewards) + failed * min(0.0, *rewards)) / (len(rewards) + failed), failed

        # Named for the hang monitor, which would otherwise report a collective that takes long.
        with self._backend.groups.monitor.phase("evaluation"):
            while (result := self.on_rank_0(wait)) is None:
                if self._backend.any_rank(stop())[0]:
                    raise MeasurementStopped
                self.recover()
        return result

    def _progress(self) -> tuple[int, int] | None:
        """Return counts that change with each episode and each failed request; None while there is no engine to wait for."""

        def count(collector: RolloutCollector) -> tuple[int, int] | None:
            return (collector.counts().episodes, collector.pool.incidents) if collector.pool.ready else None

        return self.on_rank_0(count)

    def counts(self) -> Counts:
        return self.on_rank_0(lambda collector: collector.counts())

    def state_dict(self) -> dict[str, Any]:
        """Return :meth:`RolloutCollector.state_dict` on rank 0, an empty dict on all others. Not collective."""
        return {} if self._collector is None else self._collector.state_dict()
