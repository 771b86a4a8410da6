"""One step of the loop: learn, update the engines, evaluate, and what there is to write down about it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megascend.app.rl.learn import learn
from megascend.app.rl.records import RlRecord, count_figures, group_figures, mismatch_figures
from megascend.app.rl.rollouts import SharedRollouts
from megascend.app.run import too_many_skips
from megascend.config.rl import Evaluation, RlConfig
from megascend.errors import NonFiniteError
from megascend.rollout.group import Group
from megascend.rollout.prompts import Prompt

if TYPE_CHECKING:
    from megascend.backend import Backend
    from megascend.weightsync import WeightSync


@dataclass
class Progress:
    """What the loop saves beside the model and the rollouts.

    Attributes:
        seconds: in steps, waiting included.
        reward_before, reward_after: of the first and of the last evaluation.
    """

    seconds: float = 0.0
    reward_before: float = math.nan
    reward_after: float = math.nan


class Steps:
    """The steps of a run, one after the other. Collective."""

    def __init__(
        self,
        config: RlConfig,
        backend: Backend,
        rollouts: SharedRollouts,
        sync: WeightSync,
        offset: int,
        adapter: str | None,
        held_out: Sequence[Prompt],
        progress: Progress,
    ) -> None:
        """
        Args:
            offset: what engines call a version, less what the trainer calls it.
            adapter: what is trained; None: the model itself.
            held_out: prompts of evaluations.
        """
        self._config, self._backend, self._rollouts, self._sync = config, backend, rollouts, sync
        self._offset = offset
        self._adapter, self._held_out, self._progress = adapter, held_out, progress
        self._counts, self._version = rollouts.counts(), backend.step_count
        self._before = time.perf_counter()

    def do(self, number: int, groups: Sequence[Group]) -> RlRecord:
        """Step ``number`` from 1, on the groups that were taken for it.

        Raises:
            NonFiniteError: too many steps in a row had gradients that are not finite.
        """
        config, arrived = self._config, time.perf_counter()
        learned = learn(self._backend, groups, config.objective, self._adapter, measured(config, number))
        step = self._backend.optimizer_step()
        if step.skipped_in_a_row > config.max_skipped_steps:
            raise NonFiniteError(too_many_skips(config, number, step.skipped_in_a_row, None))
        stepped = time.perf_counter()
        pause_s = self._update_engines(number)
        synced = time.perf_counter()
        eval_reward = self._evaluate(number)
        earlier, self._counts = self._counts, self._rollouts.counts()
        now = time.perf_counter()
        seconds, waited = now - self._before, arrived - self._before
        self._before = now
        self._progress.seconds += seconds
        return RlRecord(
            step=number,
            skipped=step.skipped,
            seconds=self._progress.seconds,
            eval_reward=eval_reward,
            loss=learned.result.loss,
            grad_norm=step.grad_norm,
            lr=step.lr,
            version=self._version,
            tokens=learned.result.tokens,
            tokens_per_s=learned.result.tokens / seconds,
            wait_s=waited,
            sync_s=synced - stepped,
            pause_s=pause_s,
            **group_figures(groups, number - 1),
            **count_figures(earlier, self._counts),
            **mismatch_figures(learned.mismatch),
        )

    def _update_engines(self, number: int) -> float:
        """Give the engines the weights of step ``number`` if it is time to; how long that paused them, in seconds."""
        if number % self._config.sync.every and number != self._config.steps:
            return 0.0
        pushed = self._sync.push(version=number + self._offset, adapter=self._adapter)
        self._version = number
        self._rollouts.on_rank_0(lambda collector: collector.updated(number))
        return pushed.seconds["commit"]

    def _evaluate(self, number: int) -> float | None:
        settings = self._config.evaluation
        if settings is None or (number % settings.every and number != self._config.steps):
            return None
        self._progress.reward_after = evaluate(settings, self._rollouts, self._held_out)
        return self._progress.reward_after


def evaluate(settings: Evaluation, rollouts: SharedRollouts, prompts: Sequence[Prompt]) -> float:
    """Mean reward on the prompts of ``evaluation``, with the weights that the engines have. Collective."""
    return rollouts.evaluate(prompts, settings.temperature, settings.samples)


def measured(config: RlConfig, number: int) -> bool:
    """Whether step ``number`` measures the mismatch even if nothing is corrected for it."""
    every = config.objective.measure_every
    return every > 0 and number % every == 0
