"""Bounded staleness: limits the prompts in flight, and drops finished groups that are too old to learn from. Pure.

The trainer's version is the number of its steps. Engines sample with the weights of a version, and a group that the trainer
learns from in step ``s + 1`` (from weights of version ``s``) has the lag ``s - version``. No group with a lag above ``max_lag``
is returned:

* A prompt is dispatched only if, taken in order, its group would be learned from in time. While engines have the trainer's
  weights that is a budget of ``batch * (max_lag + 1)`` prompts that are dispatched and not yet learned from.
* A group that was overtaken by later ones until it is too old is dropped and counted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megascend.apps.rl.rollout.group import TrajectoryGroup
from megascend.errors import ConfigError, DataError

DROPPED_BATCHES = 4
"""Batches of dropped groups that are kept for the records of a step."""


@dataclass
class Counts:
    """Counts of prompts by outcome.

    Attributes:
        dispatched: prompts sent to an engine; retries after a failure are not counted.
        learned: groups given to the trainer.
        stale: groups dropped because they were too old.
        equal: groups dropped because all their rewards were equal.
        discarded: groups dropped because fewer than two of their episodes succeeded.
        responses: trajectories of all groups.
        reward: sum of their rewards.
        timed_out, failed: episodes without a trajectory: at their deadline, or by an exception.
    """

    dispatched: int = 0
    learned: int = 0
    stale: int = 0
    equal: int = 0
    discarded: int = 0
    responses: int = 0
    reward: float = 0.0
    timed_out: int = 0
    failed: int = 0

    @property
    def episodes(self) -> int:
        """Number of episodes that have ended, whatever their outcome; one with several trajectories counts for each."""
        return self.responses + self.timed_out + self.failed


@dataclass
class EqualStreak:
    """Consecutive groups without a learning signal: within each, all rewards are equal.

    Attributes:
        groups, responses: their number.
        cut_off: responses that reached the maximum length.
        least, largest: smallest and largest reward.
    """

    groups: int = 0
    responses: int = 0
    cut_off: int = 0
    least: float = math.inf
    largest: float = -math.inf

    def add(self, group: TrajectoryGroup) -> None:
        self.groups += 1
        self.responses += len(group.trajectories)
        self.cut_off += sum(trajectory.finish_reason == "length" for trajectory in group.trajectories)
        self.least, self.largest = min(self.least, *group.rewards), max(self.largest, *group.rewards)


@dataclass(frozen=True)
class Dispatch:
    """A prompt in flight.

    Attributes:
        number: index in the order of prompts.
        prompt: JSON, with the fields that the reward function and the engine need.
        version: version of the engines' weights when the prompt was dispatched.
    """

    number: int
    prompt: dict[str, Any]
    version: int


class RolloutBuffer:
    """Prompts in flight and finished groups, from dispatch to the trainer's step. For one thread.

    Attributes:
        equal_streak: groups since the last one with a learning signal.
    """

    def __init__(self, batch: int, max_lag: int, *, in_order: bool = False) -> None:
        """
        Args:
            batch: groups that the trainer learns from in one step.
            max_lag: largest lag of a group; 0: sampling and learning alternate.
            in_order: return groups in the order of their prompts. A slow prompt then delays the trainer, but the groups of a step
                no longer depend on timing.
        """
        if batch < 1 or max_lag < 0:
            raise ConfigError(f"a rollout buffer needs batch >= 1 and max_lag >= 0, got {batch} and {max_lag}")
        self.batch, self.max_lag, self.in_order = batch, max_lag, in_order
        self.counts, self.equal_streak = Counts(), EqualStreak()
        # Bounded: with a constant reward every group is dropped, and no step ever fetches them.
        self._dropped: deque[tuple[str, TrajectoryGroup]] = deque(maxlen=DROPPED_BATCHES * batch)
        self._in_flight: dict[int, Dispatch] = {}
        self._retries: list[Dispatch] = []
        self._ready: dict[int, TrajectoryGroup] = {}

    def room(self, step: int, version: int) -> int:
        """Return how many more prompts may be dispatched now.

        Args:
            step: batches that the trainer has taken, including the one in progress.
        """
        # Each step that the engines are behind the trainer uses up one step of the permitted lag.
        return self.batch * (self.max_lag + 1 - (step - version)) - len(self._in_flight) - len(self._ready)

    def dispatch(self, prompt: dict[str, Any], version: int) -> Dispatch:
        """Record that a new prompt is sent to an engine; call :meth:`room` first, and :meth:`next_retry` for retries."""
        dispatch = Dispatch(self.counts.dispatched, prompt, version)
        self.counts.dispatched += 1
        self._in_flight[dispatch.number] = dispatch
        return dispatch

    def next_retry(self, version: int) -> Dispatch | None:
        """Dispatch the first prompt that must be retried, and return it; None if there is none."""
        if not self._retries:
            return None
        dispatch = replace(self._retries.pop(0), version=version)
        self._in_flight[dispatch.number] = dispatch
        return dispatch

    def failed(self, number: int) -> None:
        """Record that no engine answered this prompt, which must be retried."""
        self._retries.append(self._pop_in_flight(number))
        # In the order of prompts: with in_order the trainer waits for the first one.
        self._retries.sort(key=lambda dispatch: dispatch.number)

    def finished(self, group: TrajectoryGroup, *, equal: bool = False, dropped: bool | None = None) -> None:
        """Record a graded group, which is ready for the trainer.

        Args:
            dropped: it is not given to the trainer; default: ``equal``.
        """
        # A group that is not in flight is refused below, with its own message.
        dispatched = self._in_flight[group.number].version if group.number in self._in_flight else group.version
        if group.version < dispatched:
            raise DataError(
                f"group {group.number} was sampled with weights of version {group.version}, but the engines reported version "
                f"{dispatched} when it was dispatched: an engine has missed an update"
            )
        self._pop_in_flight(group.number)
        self.counts.responses += len(group.trajectories)
        self.counts.reward += sum(group.rewards)
        if equal:
            self.equal_streak.add(group)
        else:
            self.equal_streak = EqualStreak()
        # After the counts: the statistics of rewards include dropped groups.
        drop = equal if dropped is None else dropped
        if drop:
            self.counts.equal += 1
            self._dropped.append(("equal", group))
        else:
            self._ready[group.number] = group

    def discarded(self, number: int) -> None:
        """Record that too few episodes of this prompt succeeded to learn from them."""
        self._pop_in_flight(number)
        self.counts.discarded += 1

    def take(self, step: int) -> list[TrajectoryGroup] | None:
        """Return a batch to learn from, the oldest groups first; None if there are too few. Drops groups that are too old.

        Args:
            step: steps that the trainer has completed, which is the version of its weights.
        """
        # Checked here, not when a group is finished: later groups may overtake it while it waits.
        for number in [number for number, group in self._ready.items() if step - group.version > self.max_lag]:
            self._dropped.append(("stale", self._ready.pop(number)))
            self.counts.stale += 1
        numbers = sorted(self._ready)[: self.batch]
        if len(numbers) < self.batch:
            return None
        # An earlier prompt that is still being sampled belongs before the last of these.
        if self.in_order and any(number < numbers[-1] for number in (dispatch.number for dispatch in self._pending())):
            return None
        self.counts.learned += self.batch
        return [self._ready.pop(number) for number in numbers]

    def put_back(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Record that the trainer has not learned from groups of :meth:`take`: they are ready as before."""
        self.counts.learned -= len(groups)
        self._ready |= {group.number: group for group in groups}

    def take_dropped(self) -> list[tuple[str, TrajectoryGroup]]:
        """Return (``equal`` or ``stale``, group) of the groups dropped since the last call, and forget them.

        At most the latest ``DROPPED_BATCHES`` batches.
        """
        dropped = list(self._dropped)
        self._dropped.clear()
        return dropped

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state as JSON. Prompts in flight are retried after loading it."""
        waiting = sorted(self._pending(), key=lambda dispatch: dispatch.number)
        return {
            "counts": asdict(self.counts),
            "waiting": [asdict(dispatch) for dispatch in waiting],
            "ready": [group.to_json() for group in self._ready.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, with nothing in flight."""
        self.counts = Counts(**state["counts"])
        self._in_flight = {}
        # Their versions are of the earlier process; a retry gets the current one.
        self._retries = [Dispatch(**values) for values in state["waiting"]]
        self._ready = {values["number"]: TrajectoryGroup.from_json(values) for values in state["ready"]}

    def _pending(self) -> list[Dispatch]:
        return [*self._in_flight.values(), *self._retries]

    def _pop_in_flight(self, number: int) -> Dispatch:
        if number not in self._in_flight:
            raise DataError(f"prompt {number} is not in flight: answered twice, or never dispatched")
        return self._in_flight.pop(number)
