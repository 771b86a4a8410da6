"""Supervised training from a :class:`RunConfig`: what ``megascend train`` runs on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megascend.apps.train.learner import RunContext, RunKind, RunResult
from megascend.apps.train.loop import run
from megascend.apps.train.preflight import RunPlan
from megascend.apps.train.records import TrainCounts
from megascend.config import RunConfig

if TYPE_CHECKING:
    from megascend.apps.train.callbacks import Callback
    from megascend.apps.train.supervised import SupervisedData


class SupervisedRun(RunKind[RunConfig]):
    """Learning from tokens, preference pairs or labelled samples."""

    def read(self, context: RunContext[RunConfig]) -> SupervisedData:
        from megascend.apps.train.supervised import SupervisedData  # imports torch, and transformers with it

        return SupervisedData.read(context)


def train(
    config: RunConfig,
    *,
    overwrite: bool = False,
    resume: str | Path | None = None,
    plan: RunPlan[RunConfig] | None = None,
    callbacks: Sequence[Callback] = (),
) -> RunResult[TrainCounts]:
    """Train as ``config`` says, on one process or as one rank of many (torchrun's environment variables).

    Rank 0 writes to ``config.output``: metrics.jsonl and the TensorBoard log step by step; config.yaml, the exported
    model in hf/ (or, with ``lora``, the adapter in peft's format in adapter/) and metrics.png each complete or not at all. A
    directory that holds an earlier run is refused before anything starts, unless ``overwrite``; the earlier run's files are then
    removed, but only after this run's first step. Signals (:mod:`megascend.runtime.stop_signals`) end a run after
    its present step, with a checkpoint; output that cannot be written (:mod:`megascend.runtime.io.lasting_output`) does not.

    Args:
        resume: ``"auto"``: resume from the newest checkpoint in ``config.output`` that is complete, if there is any. A path: from
            that checkpoint, or the newest of that run.
        plan: result of :func:`megascend.apps.train.preflight.preflight` for ``config``; None: it was not called on this host.
        callbacks: as many on every rank; called on rank 0, after those that ``config.callbacks`` names.

    Raises:
        ConfigError: the output directory holds a run, a callback failed, or a setting cannot work, for example ``lora.targets``.
        MissingDependencyError: ``plot`` is set, or a tracker is named, and its package is not installed.
        DataError: the data cannot be trained on; the message names file and line.
        NonFiniteError: more than ``max_skipped_steps`` steps in a row had non-finite gradients.
        CheckpointError: there is no checkpoint to resume from, each is damaged, or one could not be written.
    """
    return run(SupervisedRun(), config, overwrite, resume, plan, callbacks)
