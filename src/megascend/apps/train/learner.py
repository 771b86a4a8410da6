"""What differs between kinds of run, as :mod:`megascend.apps.train.loop` uses it.

A :class:`RunKind` reads a :class:`RunData` before the model is built, and that makes a :class:`Learner` of the built model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from megascend.apps.train.plot import PANELS, Panel
from megascend.apps.train.preflight import AnyConfig, RunPlan
from megascend.apps.train.run_inputs import InputNames
from megascend.config import TrainerConfig
from megascend.errors import NonFiniteError
from megascend.models.checkpoint_files.files import read_config
from megascend.runtime.distributed.launch import Launch
from megascend.runtime.stop_signals import StopSignals

if TYPE_CHECKING:
    from megascend.apps.train.event_log import EventLog
    from megascend.apps.train.run_log import MetricsRecord, RunLog
    from megascend.backend import Backend
    from megascend.runtime.bootstrap import Runtime


TotalsT = TypeVar("TotalsT")


@dataclass(frozen=True)
class RunResult(Generic[TotalsT]):
    """Result of a run, the same on every rank but for times in ``totals``.

    Attributes:
        steps: optimizer steps done, skipped ones included.
        export: directory of the exported model, or of the adapter if one was trained, or None.
        stopped: the signal (``"SIGTERM"``) or callback that stopped the run before its last step, or None. It was saved.
        totals: figures over all steps, those before a resume included.
    """

    steps: int
    export: Path | None
    stopped: str | None
    totals: TotalsT


@dataclass(frozen=True)
class RunContext(Generic[AnyConfig]):
    """Process, plan and start point of a run before its model is built.

    Attributes:
        resume: ``auto``, the path of a checkpoint, or None.
    """

    plan: RunPlan[AnyConfig]
    launch: Launch
    runtime: Runtime
    resume: str | Path | None


@dataclass(frozen=True)
class Run(Generic[AnyConfig]):
    """A run whose model is built.

    Attributes:
        config: the settings as :class:`RunData` completed them.
        adapter: name of the adapter that is trained; None: the model itself.
        stack: closes what a learner opens, before the backend.
    """

    config: AnyConfig
    backend: Backend
    event_log: EventLog
    adapter: str | None
    stack: ExitStack
    signals: StopSignals

    @property
    def main_rank(self) -> bool:
        return self.backend.rank == 0

    @property
    def stop(self) -> bool:
        """True once this rank has received a stop signal."""
        return self.signals.received is not None


class RunKind(ABC, Generic[AnyConfig]):
    """A kind of run, before its data are read."""

    def check(self, config: AnyConfig, launch: Launch) -> None:
        """Check settings that :func:`megascend.apps.train.preflight.check_run` does not know. Called before torch is imported."""

    def start(self, plan: RunPlan[AnyConfig], launch: Launch, stack: ExitStack) -> None:
        """Start other processes that take long to start, before this one uses a device. The stack ends them with the run."""

    @abstractmethod
    def read(self, context: RunContext[AnyConfig]) -> RunData[AnyConfig]:
        """Read the data, and check everything that can be checked without the model. Local."""


class RunData(ABC, Generic[AnyConfig]):
    """What a run learns from, read and checked before its model is built.

    Attributes:
        progress_keys: keys of the dict that :meth:`Learner.state` returns; a checkpoint without them is from another kind of run.
        config: the settings, completed from the data.
        chat_template: template to export in place of the model's; None: the model's.
        ends: tokens that the model learns to end with, for generation_config.json of exports.
    """

    progress_keys: ClassVar[tuple[str, ...]]
    config: AnyConfig
    chat_template: str | None
    ends: Collection[int]

    @property
    def model_config(self) -> AnyConfig:
        """The settings with which the model is built."""
        return self.config

    @property
    @abstractmethod
    def inputs(self) -> InputNames:
        """What a resumed run reads again besides settings, data and checkpoint."""

    def evaluate_initial_model(self, run: Run[AnyConfig]) -> Any:
        """Run checks and computations that need the model before a checkpoint is loaded into it. Collective.

        Returns:
            What :meth:`learner` needs of it.
        """
        return None

    @abstractmethod
    def learner(self, run: Run[AnyConfig], initial: Any, progress: dict[str, Any] | None, log: RunLog) -> Learner:
        """Make the learner, which prints a summary of the run. Collective.

        Args:
            initial: result of :meth:`evaluate_initial_model`.
            progress: :meth:`Learner.state` of the checkpoint that has been loaded; None: the run begins.
        """


class Learner(ABC):
    """Learns from batches. Every method but :meth:`state` is collective.

    Attributes:
        totals: figures over all steps, those before a resume included.
        shared_errors: errors that a step raises on every rank, so that all of them can save the last step.
        stopped: a signal, on any rank, has stopped the learner while it measured or waited.
        skipped_in_a_row: steps with non-finite gradients up to the last one.
    """

    shared_errors: ClassVar[tuple[type[Exception], ...]] = ()
    panels: ClassVar[Sequence[Panel]] = PANELS
    totals: Any
    stopped = False
    skipped_in_a_row = 0

    @abstractmethod
    def start(self) -> None:
        """Measure what is due before the first step of this process."""

    @abstractmethod
    def next_batch(self, number: int) -> Any | None:
        """Return the batch of step ``number``; None if a signal stops the run before it."""

    @abstractmethod
    def step(self, number: int, batch: Any) -> MetricsRecord:
        """Train on a batch, and evaluate if that is due after it."""

    def after_step(self, number: int) -> None:  # noqa: B027
        """Run what is due after a logged step."""

    def save_batch(self, number: int, batch: Any) -> Path | None:
        """Write the batch of a step with non-finite gradients, for debugging; None if it is not written."""
        return None

    @property
    def finished(self) -> bool:
        """True if the run ends after this step, whatever ``steps`` is. The same on every rank."""
        return False

    @property
    def best_step(self) -> int | None:
        """The step whose checkpoint is to be kept and exported; None: no checkpoint is better than others."""
        return None

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state to save with the model, as of the last optimizer step, even if a later batch has been drawn."""

    @abstractmethod
    def title(self) -> str:
        """Return the title of the plot."""

    @abstractmethod
    def result(self) -> tuple[dict[str, Any], str]:
        """Return the values of the event ``finished``, and the summary line to print."""


def model_line(config: TrainerConfig, backend: Backend) -> str:
    count = backend.parameter_count
    size = f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"
    return f"{read_config(config.model).get('model_type', 'a model')} with {size} parameters ({config.model})"


def too_many_skips(config: TrainerConfig, step: int, in_a_row: int, batch: Path | None) -> NonFiniteError:
    """Build the error that ends a run whose gradients stay non-finite.

    Args:
        in_a_row: number of consecutive skipped steps.
        batch: file with the samples of the last one; None: they were not written.
    """
    remedy = "lower optimizer.lr" if config.precision == "fp32" else "lower optimizer.lr, or use a wider precision"
    return NonFiniteError(
        f"{in_a_row} steps in a row, up to step {step}, had non-finite gradients and were skipped on all ranks; the "
        f"limit is max_skipped_steps: {config.max_skipped_steps}. Look at the data"
        f"{f' (the last batch is in {batch})' if batch is not None else ''}, {remedy}"
    )
