"""Log of the rollouts: rollouts.jsonl, a line for each trajectory, and a few of them in the terminal and in trackers."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.apps.rl.rollout.advantages import ESTIMATORS, reward_parts, step_advantages
from megascend.apps.train.event_log import finite
from megascend.apps.train.run_log import MAX_CHARACTERS, AppendFile, complete_rows, quoted_text

if TYPE_CHECKING:
    from megascend.apps.rl.rollout.group import TrajectoryGroup
    from megascend.apps.train.run_log import RunLog
    from megascend.config.rl import RlConfig

ROLLOUTS = "rollouts.jsonl"
EARLIER = "rollouts.1.jsonl"
"""The file before the current one, once that has reached its size."""


OUTCOMES = {"learned": [], "equal": ["dropped: equal"], "stale": ["dropped: stale"], "evaluated": ["evaluation"]}
"""Uses of a trajectory, and what its description says about them."""


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
        self._size = last_row_end(self._path, steps_done)
        # Rows of those steps may have been moved there before the run was resumed.
        self._earlier_size: int | None = last_row_end(self._path.with_name(EARLIER), steps_done)
        self._file: AppendFile | None = None
        self._unwritten: list[str] = []

    def write(
        self,
        step: int,
        learned: Sequence[TrajectoryGroup],
        dropped: Sequence[tuple[str, TrajectoryGroup]],
        evaluated: Sequence[tuple[int, Sequence[TrajectoryGroup]]] = (),
        penalised: Sequence[TrajectoryGroup] | None = None,
    ) -> None:
        """Record the groups of a step and those dropped since the previous one, as the settings say, and evaluations.

        Args:
            dropped: reason (``equal`` or ``stale``) and group.
            evaluated: step after which an evaluation was made, and its groups.
            penalised: the groups of the step with the rewards that advantages come from; None: their own.
        """
        settings, graded = self._settings, learned if penalised is None else penalised
        rows = [
            list(self._rows(step, "learned", group, graded_group.rewards, advantages))
            for group, graded_group, advantages in zip(
                learned, graded, step_advantages(graded, self._objective), strict=True
            )
        ]
        if settings.every:
            for evaluation, groups in evaluated:
                for group in groups:
                    self._unwritten += map(to_line, self._rows(evaluation, "evaluated", group))
        if settings.every and step % settings.every == 0:
            self._unwritten += [to_line(row) for group_rows in rows for row in group_rows]
            for reason, group in dropped:
                self._unwritten += map(to_line, self._rows(step, reason, group, advantages=self._advantages(group)))
        # Not before: with --overwrite the earlier run's file stays until this run has taken a step.
        if self._log.writes:
            for line in self._unwritten:
                self._append(line)
            self._unwritten = []
        if settings.show_every and step % settings.show_every == 0:
            self._show(step, rows[0])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _advantages(self, group: TrajectoryGroup) -> Sequence[float] | None:
        """Return the advantages of a group that was not learned from; None where they depend on the others of a step."""
        if ESTIMATORS[self._objective.advantages].scope == "step":
            return None
        return step_advantages([group], self._objective)[0]

    def _rows(
        self,
        step: int,
        outcome: str,
        group: TrajectoryGroup,
        rewards: Sequence[float] | None = None,
        advantages: Sequence[float] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Yield a row for each trajectory of a group.

        Args:
            rewards: rewards from which the advantages were computed; default: those of the group.
            advantages: advantages of the trajectories; None: they have none.
        """
        rewards = group.rewards if rewards is None else rewards
        values: Sequence[float | None] = [None] * len(rewards) if advantages is None else advantages
        # An evaluation follows the step instead of entering it, and no objective adds to its rewards.
        evaluated = outcome == "evaluated"
        for trajectory, reward, advantage in zip(group.trajectories, rewards, values, strict=True):
            parts = {} if evaluated else reward_parts(trajectory, self._objective)
            row = {
                "step": step,
                "outcome": outcome,
                "prompt_number": group.number,
                "reward": trajectory.reward,
                "rewards": {**trajectory.rewards, **parts},
                **({"kl_penalty": trajectory.reward - reward} if reward != trajectory.reward else {}),
                "advantage": advantage,
                "turns": trajectory.turns,
                "sampled_tokens": trajectory.sampled_tokens,
                "finish_reason": trajectory.finish_reason,
                "versions": [trajectory.first_version, trajectory.last_version],
                "lag": step - (not evaluated) - trajectory.first_version,
                "engine": trajectory.engine,
                "prompt": self._decode(trajectory.prompt_tokens),
                "response": self._decode(trajectory.tokens),
            }
            if not all(trajectory.mask):
                row["segments"] = [
                    {"sampled": sampled, "text": self._decode([token for token, _ in segment])}
                    for sampled, segment in itertools.groupby(
                        zip(trajectory.tokens, trajectory.mask, strict=True), key=lambda pair: pair[1]
                    )
                ]
            if self._settings.tokens:
                row |= {
                    "prompt_tokens": list(trajectory.prompt_tokens),
                    "tokens": list(trajectory.tokens),
                    "sampled": [int(mark) for mark in trajectory.mask],
                    "logprobs": list(trajectory.logprobs),
                }
            yield row

    def _append(self, line: str) -> None:
        earlier = self._path.with_name(EARLIER)
        if self._earlier_size is not None and earlier.exists():
            os.truncate(earlier, self._earlier_size)
        self._earlier_size = None
        # A line longer than the limit has a file to itself.
        if self._size and self._size + len(line.encode()) > self._settings.max_bytes:
            self.close()
            if self._path.exists():
                os.replace(self._path, earlier)
            self._file, self._size = None, 0
        if self._file is None:
            self._file = AppendFile(self._path, self._size)
        self._file.write(line)
        self._size += len(line.encode())

    def _show(self, step: int, rows: list[dict[str, Any]]) -> None:
        ordered = sorted(rows, key=lambda row: row["reward"], reverse=True)
        # The best and the worst, side by side, show what the reward prefers.
        texts = [trajectory_text(row).rstrip() for row in (ordered[0], ordered[-1])]
        text = "\n".join([f"best and worst rollout of prompt {rows[0]['prompt_number']} at step {step}:", *texts])
        self._log.write_rollouts(step, text, [tracker_row(row) for row in ordered])


def to_line(row: Mapping[str, Any]) -> str:
    return json.dumps(finite(dict(row)), allow_nan=False) + "\n"


def trajectory_text(row: Mapping[str, Any], *, full: bool = False) -> str:
    """Describe a row of rollouts.jsonl: a line of figures, then the texts; those that the model did not write begin with ``>``.

    Args:
        full: texts are not cut.
    """
    parts = ", ".join(f"{name} {value:.3g}" for name, value in row["rewards"].items())
    first, last = row["versions"]
    figures = [
        f"reward {row['reward']:.4g}{f' ({parts})' if parts else ''}",
        *([] if row["advantage"] is None else [f"advantage {row['advantage']:+.3g}"]),
        f"lag {row['lag']}",
        f"version {first}" if first == last else f"versions {first} to {last}",
        f"{row['turns']} turn{'s' * (row['turns'] != 1)}",
        f"{row['sampled_tokens']} token{'s' * (row['sampled_tokens'] != 1)}",
        "cut off" if row["finish_reason"] == "length" else "complete",
        *OUTCOMES[row["outcome"]],
        *([row["engine"]] if row["engine"] else []),
    ]
    characters = None if full else MAX_CHARACTERS
    segments = row.get("segments", [{"sampled": True, "text": row["response"]}])
    texts = [
        quoted_text(segment["text"], "    " if segment["sampled"] else "  > ", characters)
        for segment in [{"sampled": False, "text": row["prompt"]}, *segments]
    ]
    return "\n".join(["  ".join(figures), *texts, ""])


def tracker_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of rollouts.jsonl as a row of a tracker's table, which holds no lists or mappings."""
    figures = (
        "step",
        "prompt_number",
        "reward",
        "advantage",
        "turns",
        "sampled_tokens",
        "finish_reason",
        "lag",
        "engine",
    )
    parts = {f"rewards/{name}": value for name, value in row["rewards"].items()}
    return {name: row[name] for name in figures} | parts | {name: row[name] for name in ("prompt", "response")}


def last_row_end(path: Path, step: int) -> int:
    return sum(size for _, size in complete_rows(path, step))
