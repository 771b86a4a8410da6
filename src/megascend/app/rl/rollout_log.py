"""What the model did: rollouts.jsonl, a line for each trajectory, and a few of them in the terminal and in trackers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.app.event_log import finite
from megascend.app.rl.step_advantages import reward_parts, step_advantages
from megascend.app.run_log import AppendFile, complete_rows
from megascend.rollout.advantages import ESTIMATORS

if TYPE_CHECKING:
    from megascend.app.run_log import RunLog
    from megascend.config.rl import RlConfig
    from megascend.rollout.group import TrajectoryGroup

ROLLOUTS = "rollouts.jsonl"
EARLIER = "rollouts.1.jsonl"
"""The file before the current one, once that has reached its size."""


class RolloutLog:
    """Writer of rollouts.jsonl, on rank 0. Lines wait, as those of metrics.jsonl do, until the directory is the run's own."""

    def __init__(self, config: RlConfig, decode: Callable[[Sequence[int]], str], log: RunLog, steps_done: int) -> None:
        """
        Args:
            decode: returns the text of token ids, special tokens included.
            log: the run's log, which shows trajectories and knows whether the directory may be written.
            steps_done: lines of later steps are removed: a resumed run does these steps again.
        """
        self._settings, self._objective = config.rollout.records, config.objective
        self._decode, self._log, self._path = decode, log, config.output / ROLLOUTS
        self._size = last_row_end(self._path, steps_done) if steps_done else 0
        self._file: AppendFile | None = None
        self._unwritten: list[str] = []

    def write(
        self,
        step: int,
        learned: Sequence[TrajectoryGroup],
        dropped: Sequence[tuple[str, TrajectoryGroup]],
        penalised: Sequence[TrajectoryGroup] | None = None,
    ) -> None:
        """Record the groups of a step and those dropped since the previous one, as the settings say.

        Args:
            dropped: reason (``equal`` or ``stale``) and group.
            penalised: the groups of the step with the rewards that advantages come from; None: their own.
        """
        settings = self._settings
        if settings.every and step % settings.every == 0:
            graded = learned if penalised is None else penalised
            outcomes = [
                ("learned", *pair)
                for pair in zip(learned, graded, step_advantages(graded, self._objective), strict=True)
            ]
            outcomes += [(reason, group, group, self._advantages(group)) for reason, group in dropped]
            self._unwritten += [
                json.dumps(finite(line), allow_nan=False) + "\n"
                for outcome, group, graded_group, advantages in outcomes
                for line in self._lines(step, outcome, group, graded_group.rewards, advantages)
            ]
        # Not before: with --overwrite the earlier run's file stays until this run has taken a step.
        if self._log.writes:
            for line in self._unwritten:
                self._append(line)
            self._unwritten = []
        if settings.show_every and step % settings.show_every == 0:
            self._show(step, learned[0])

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _advantages(self, group: TrajectoryGroup) -> Sequence[float | None]:
        """Return the advantages of a group that was not learned from; None where they depend on the others of a step."""
        if ESTIMATORS[self._objective.advantages].scope == "step":
            return [None] * len(group.trajectories)
        return step_advantages([group], self._objective)[0]

    def _lines(
        self,
        step: int,
        outcome: str,
        group: TrajectoryGroup,
        rewards: Sequence[float],
        advantages: Sequence[float | None],
    ) -> Iterator[dict[str, Any]]:
        for trajectory, reward, advantage in zip(group.trajectories, rewards, advantages, strict=True):
            line = {
                "step": step,
                "outcome": outcome,
                "prompt_number": group.number,
                "reward": trajectory.reward,
                "rewards": {**trajectory.rewards, **reward_parts(trajectory, self._objective)},
                **({"kl_penalty": trajectory.reward - reward} if reward != trajectory.reward else {}),
                "advantage": advantage,
                "turns": trajectory.turns,
                "sampled_tokens": trajectory.sampled_tokens,
                "finish_reason": trajectory.finish_reason,
                "versions": [trajectory.first_version, trajectory.last_version],
                "lag": step - 1 - trajectory.first_version,
                "engine": trajectory.engine,
                "prompt": self._decode(trajectory.prompt_tokens),
                "response": self._decode(trajectory.tokens),
            }
            if self._settings.tokens:
                line |= {
                    "prompt_tokens": list(trajectory.prompt_tokens),
                    "tokens": list(trajectory.tokens),
                    "sampled": [int(mark) for mark in trajectory.mask],
                    "logprobs": list(trajectory.logprobs),
                }
            yield line

    def _append(self, line: str) -> None:
        # A line longer than the limit has a file to itself.
        if self._size and self._size + len(line.encode()) > self._settings.max_bytes:
            self.close()
            if self._path.exists():
                os.replace(self._path, self._path.with_name(EARLIER))
            self._file, self._size = None, 0
        if self._file is None:
            self._file = AppendFile(self._path, self._size)
        self._file.write(line)
        self._size += len(line.encode())

    def _show(self, step: int, group: TrajectoryGroup) -> None:
        # Both ends: what a reward likes, and what it does not, show best beside each other.
        ordered = sorted(group.trajectories, key=lambda trajectory: trajectory.reward, reverse=True)
        texts = {
            f"[reward {trajectory.reward:g}] {self._decode(trajectory.prompt_tokens)}": self._decode(trajectory.tokens)
            for trajectory in (ordered[0], ordered[-1])
        }
        self._log.write_texts(step, texts, "best and worst rollout of a prompt at step")


def last_row_end(path: Path, step: int) -> int:
    """Return the bytes of a file's rows up to ``step``."""
    return sum(size for _, size in complete_rows(path, step))
