"""Reinforcement learning from an :class:`RlConfig`: what ``megascend rl`` runs on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from megascend.apps.train.learner import RunContext, RunKind, RunResult
from megascend.apps.train.loop import run
from megascend.apps.train.preflight import RunPlan
from megascend.config.rl import RlConfig
from megascend.runtime.distributed.launch import Launch

if TYPE_CHECKING:
    from megascend.apps.rl.learner import RlData, Totals
    from megascend.apps.rl.servers import EngineServers
    from megascend.apps.train.callbacks import Callback
    from weightwire.engine import InferenceEngine

EngineFactory = Callable[[RlConfig], "Sequence[InferenceEngine]"]


class ReinforcementLearning(RunKind[RlConfig]):
    """Learning from responses that inference engines sample and a reward function grades.

    Args:
        engines: makes the engines on rank 0 in place of those that ``config.engines`` names.
    """

    def __init__(self, engines: EngineFactory | None = None) -> None:
        self._make_engines = engines
        self._servers: EngineServers | None = None

    def check(self, config: RlConfig, launch: Launch) -> None:
        from megascend.apps.rl.engines import check_engines
        from megascend.apps.rl.servers import check_servers

        # Only rank 0 talks to engines, and only it needs their key.
        if self._make_engines is None and launch.rank == 0:
            check_engines(config.engines, config.rollout.controller, config.teacher_engine)
            check_servers(config)

    def start(self, plan: RunPlan[RlConfig], launch: Launch, stack: ExitStack) -> None:
        from megascend.apps.rl.engines import controller_engines
        from megascend.apps.rl.servers import start_servers

        if self._make_engines is not None:
            return
        if plan.config.started_engines:
            self._servers = start_servers(plan.config, launch, plan.limits, stack)
        if plan.config.rollout.controller is not None and launch.rank == 0:
            # It may be started after the run.
            controller_engines(plan.config, plan.config.rollout.controller)

    def read(self, context: RunContext[RlConfig]) -> RlData:
        from megascend.apps.rl.engines import make_engines
        from megascend.apps.rl.learner import RlData

        make = self._make_engines or (lambda config: make_engines(config, self._servers))
        return RlData.read(context, make, self._servers)


def train_rl(
    config: RlConfig,
    *,
    overwrite: bool = False,
    resume: str | Path | None = None,
    engines: EngineFactory | None = None,
    plan: RunPlan[RlConfig] | None = None,
    callbacks: Sequence[Callback] = (),
) -> RunResult[Totals]:
    """Train as ``config`` says, on one process or as one rank of many (torchrun's environment variables).

    Rank 0 talks to the engines: they sample while the trainer learns, at most ``rollout.max_lag`` steps behind it. What is
    written to ``config.output``, and how a run is stopped and resumed: as :func:`megascend.apps.train.train.train`. A resumed run
    has the prompts, groups and versions of the checkpoint; what was being sampled is sampled again.

    Args:
        engines: makes the engines on rank 0 in place of those that ``config.engines`` names; the run closes them.
        plan: result of :func:`megascend.apps.train.preflight.preflight` for ``config``; None: it was not called on this host.
        callbacks: as many on every rank; called on rank 0, after those that ``config.callbacks`` names.

    Raises:
        ConfigError: the output directory holds a run, the reward function or a callback cannot be used, or a setting cannot work.
        DataError: prompts cannot be read, or the reward function failed on a response.
        EngineError: an engine refused, is lost, or did not answer in time; on every rank.
        NonFiniteError: more than ``max_skipped_steps`` steps in a row had non-finite gradients.
        CheckpointError: there is no checkpoint to resume from, each is damaged, or one could not be written.
    """
    return run(ReinforcementLearning(engines), config, overwrite, resume, plan, callbacks)
