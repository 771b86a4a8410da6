"""Bounded staleness: how many prompts may be on their way, and which finished groups a trainer may still learn from. Pure.

The trainer's version is the number of its steps. Engines sample with the weights of a version, and a group that the trainer
learns from in step ``s + 1`` (from weights of version ``s``) has the lag ``s - version``. No lag above ``max_lag`` is handed out:

* A prompt is dispatched only if, taken in order, its group would be learned from in time. While engines have the trainer's
  weights that is a budget of ``batch * (max_lag + 1)`` prompts that are dispatched and not yet learned from.
* A group that others have overtaken, and that is too old in the end, is dropped and counted.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from megascend.errors import ConfigError, DataError
from megascend.rollout.group import Group


@dataclass
class Counts:
    """What became of the prompts so far.

    Attributes:
        dispatched: prompts that went to an engine; one that went again after a failure counts once.
        learned: groups handed to the trainer.
        stale: groups dropped because they were too old.
        equal: groups dropped because all their rewards were equal.
        responses: graded ones, of all groups.
        reward: sum of their rewards.
    """

    dispatched: int = 0
    learned: int = 0
    stale: int = 0
    equal: int = 0
    responses: int = 0
    reward: float = 0.0


@dataclass
class EqualStreak:
    """Groups in a row whose rewards were all equal, so that nothing can be learned from any of them.

    Attributes:
        groups, responses: how many.
        cut_off: responses that reached the longest length.
        least, most: of their rewards.
    """

    groups: int = 0
    responses: int = 0
    cut_off: int = 0
    least: float = math.inf
    most: float = -math.inf

    def add(self, group: Group) -> None:
        """Count a group."""
        self.groups += 1
        self.responses += len(group.responses)
        self.cut_off += sum(response.finish_reason == "length" for response in group.responses)
        self.least, self.most = min(self.least, *group.rewards), max(self.most, *group.rewards)


@dataclass(frozen=True)
class Dispatch:
    """A prompt on its way.

    Attributes:
        number: its place in the order of prompts, from 0.
        prompt: JSON, whatever the reward function and the engine need of it.
        version: the engines' weights when it was dispatched.
    """

    number: int
    prompt: dict[str, Any]
    version: int


class RolloutBuffer:
    """Prompts on their way and finished groups, from dispatch to the trainer's step. For one thread.

    Attributes:
        counts: what became of the prompts.
        equal_streak: groups since the last one that something can be learned from.
    """

    def __init__(self, batch: int, max_lag: int, *, in_order: bool = False) -> None:
        """
        Args:
            batch: groups that the trainer learns from in one step.
            max_lag: largest lag of a group; 0: engines sample, then the trainer learns, by turns.
            in_order: hand groups out in the order of their prompts. Whoever is slow then keeps the trainer waiting; which groups
                a step learns from no longer depends on timing.

        Raises:
            ConfigError: ``batch`` is below 1, or ``max_lag`` below 0.
        """
        if batch < 1 or max_lag < 0:
            raise ConfigError(f"a rollout buffer needs batch >= 1 and max_lag >= 0, got {batch} and {max_lag}")
        self.batch, self.max_lag, self.in_order = batch, max_lag, in_order
        self.counts, self.equal_streak = Counts(), EqualStreak()
        self._flying: dict[int, Dispatch] = {}
        self._again: list[Dispatch] = []
        self._ready: dict[int, Group] = {}

    def room(self, step: int, version: int) -> int:
        """How many more prompts may be dispatched now.

        Args:
            step: batches that the trainer has taken, the one it learns from at the moment included.
            version: of the engines' weights.
        """
        return self.batch * (self.max_lag + 1 - (step - version)) - len(self._flying) - len(self._ready)

    def dispatch(self, prompt: dict[str, Any], version: int) -> Dispatch:
        """Note that a new prompt goes to an engine; ask :meth:`room` first, and :meth:`returned` for those to send again."""
        found = Dispatch(self.counts.dispatched, prompt, version)
        self.counts.dispatched += 1
        self._flying[found.number] = found
        return found

    def returned(self, version: int) -> Dispatch | None:
        """The first prompt that must be sent again, dispatched by this call; None if there is none."""
        if not self._again:
            return None
        earlier = self._again.pop(0)
        found = Dispatch(earlier.number, earlier.prompt, version)
        self._flying[found.number] = found
        return found

    def failed(self, number: int) -> None:
        """Note that no engine answered this prompt; it is to be sent again."""
        self._again.append(self._landed(number))
        self._again.sort(key=lambda dispatch: dispatch.number)

    def finished(self, group: Group, *, equal: bool = False, dropped: bool | None = None) -> None:
        """Note that this group is graded, and ready for the trainer.

        Args:
            equal: all its rewards are equal.
            dropped: it is not for the trainer; default: if they are equal.

        Raises:
            DataError: its version is older than that of its dispatch: the engine serves weights that it should not have any more.
        """
        dispatched = self._flying[group.number].version if group.number in self._flying else group.version
        if group.version < dispatched:
            raise DataError(
                f"group {group.number} was sampled with weights of version {group.version}, but was dispatched when the engines "
                f"were said to have version {dispatched}: an engine has missed an update"
            )
        self._landed(group.number)
        self.counts.responses += len(group.responses)
        self.counts.reward += sum(group.rewards)
        if equal:
            self.equal_streak.add(group)
        else:
            self.equal_streak = EqualStreak()
        if equal if dropped is None else dropped:
            self.counts.equal += 1
        else:
            self._ready[group.number] = group

    def take(self, step: int) -> list[Group] | None:
        """A batch to learn from, the oldest groups first; None while there are too few. Drops what is too old.

        Args:
            step: steps that the trainer has done, which is the version of its weights.
        """
        for number in [number for number, group in self._ready.items() if step - group.version > self.max_lag]:
            del self._ready[number]
            self.counts.stale += 1
        numbers = sorted(self._ready)[: self.batch]
        if len(numbers) < self.batch:
            return None
        if self.in_order and any(earlier < numbers[-1] for earlier in self._unanswered()):
            return None
        self.counts.learned += self.batch
        return [self._ready.pop(number) for number in numbers]

    @property
    def in_flight(self) -> int:
        """Prompts that an engine is at work on."""
        return len(self._flying)

    @property
    def ready(self) -> int:
        """Finished groups that wait for the trainer."""
        return len(self._ready)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON. Prompts on their way are sent again by whoever loads it."""
        waiting = sorted([*self._flying.values(), *self._again], key=lambda dispatch: dispatch.number)
        return {
            "counts": asdict(self.counts),
            "waiting": [asdict(dispatch) for dispatch in waiting],
            "ready": [group.to_json() for group in self._ready.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, with nothing in flight."""
        self.counts = Counts(**state["counts"])
        self._flying = {}
        self._again = [Dispatch(**values) for values in state["waiting"]]
        self._ready = {values["number"]: Group.from_json(values) for values in state["ready"]}

    def _unanswered(self) -> list[int]:
        return [*self._flying, *(dispatch.number for dispatch in self._again)]

    def _landed(self, number: int) -> Dispatch:
        if number not in self._flying:
            raise DataError(f"prompt {number} is not on its way: answered twice, or never dispatched")
        return self._flying.pop(number)
