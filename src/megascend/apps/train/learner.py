"""Interface of a kind of run (:class:`Training`), and its arguments: the run before and after the model is built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from megascend.apps.train.plot import PANELS, Panel
from megascend.apps.train.preflight import AnyConfig, RunPlan
from megascend.config import TrainerConfig
from megascend.errors import NonFiniteError
from megascend.models.checkpoint_files.files import read_config
from megascend.runtime.distributed.launch import Launch

if TYPE_CHECKING:
    from megascend.apps.train.event_log import EventLog
    from megascend.apps.train.run_log import MetricsRecord, RunLog
    from megascend.backend import Backend
    from megascend.runtime.bootstrap import Runtime


@dataclass(frozen=True)
class RunContext(Generic[AnyConfig]):
    """Process, plan and start point of a run before its model is built.

    Attributes:
        plan: result of the preflight checks.
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
        config: the settings as :meth:`Training.prepare` completed them.
        adapter: name of the adapter that is trained; None: the model itself.
        stack: closes what callbacks open, before the backend.
    """

    config: AnyConfig
    backend: Backend
    event_log: EventLog
    adapter: str | None
    stack: ExitStack

    @property
    def main_rank(self) -> bool:
        """True on the rank that writes and prints."""
        return self.backend.rank == 0


class Training(ABC, Generic[AnyConfig]):
    """One kind of run. :func:`megascend.apps.train.loop.run` calls these methods in the order below, on every rank.

    Attributes:
        progress_keys: keys of the dict that :meth:`progress` returns; a checkpoint without them is from another kind of run.
        shared_errors: errors that a step raises on every rank, so that all of them can save the last step.
        panels: panels of the run's plot.
        chat_template: template to export in place of the model's; None: the model's.
        ends: tokens that the model learns to end with, for generation_config.json of exports.
        measurement_stopped: a signal has stopped what is measured after the last step (or before the first one).
    """

    progress_keys: ClassVar[tuple[str, ...]]
    shared_errors: ClassVar[tuple[type[Exception], ...]] = ()
    panels: ClassVar[Sequence[Panel]] = PANELS
    chat_template: str | None = None
    ends: Collection[int] = ()
    measurement_stopped: bool = False

    def check(self, config: AnyConfig, launch: Launch) -> None:
        """Check settings that :func:`megascend.apps.train.preflight.check_run` does not know. Called before torch is imported."""

    def start(self, plan: RunPlan[AnyConfig], launch: Launch, stack: ExitStack) -> None:
        """Start other processes that take long to start, before this one uses a device. The stack ends them with the run."""

    @abstractmethod
    def prepare(self, context: RunContext[AnyConfig]) -> AnyConfig:
        """Read the data, check everything that can be checked without the model, and return the completed settings. Local."""

    def model_config(self, config: AnyConfig) -> AnyConfig:
        """Return the settings with which the model is built."""
        return config

    def after_build(self, run: Run[AnyConfig]) -> None:
        """Run checks and computations that need the model, before a checkpoint is loaded into it. Collective."""

    @abstractmethod
    def begin(self, run: Run[AnyConfig], progress: dict[str, Any] | None, stop: Callable[[], bool]) -> None:
        """Resume from ``progress`` of a checkpoint, or begin at step 1; print a summary of the run. Collective.

        Args:
            stop: returns True once this rank has received a signal. It ends measurements, and waits for other processes;
                :meth:`next_batch` then returns None.
        """

    @abstractmethod
    def start_loop(self, log: RunLog) -> None:
        """Prepare for the loop, whose records go to ``log``. Collective."""

    @abstractmethod
    def next_batch(self, number: int, stop: Callable[[], bool]) -> Any | None:
        """Return the batch of step ``number``; None if a signal stops any rank while they wait for it. Collective."""

    @abstractmethod
    def step(self, number: int, batch: Any) -> MetricsRecord:
        """Train on a batch. Collective."""

    def after_step(self, number: int) -> None:
        """Run checks and evaluations that are due after a logged step. Collective."""

    @property
    def finished(self) -> bool:
        """True if the run ends after this step, whatever ``steps`` is. The same on every rank."""
        return False

    @property
    def best_step(self) -> int | None:
        """The step whose checkpoint is to be kept and exported; None: no checkpoint is better than others."""
        return None

    @abstractmethod
    def progress(self) -> dict[str, Any]:
        """Return the state to save with the model, as of the last optimizer step, even if a later batch has been drawn."""

    def weights(self, config: AnyConfig) -> dict[str, Path]:
        """Return the checkpoint directories that a resumed run reads again, by setting; they must be unchanged."""
        return {} if config.lora is None else {"model": config.model}

    def code(self, config: AnyConfig) -> dict[str, str]:
        """Return the names of functions and modules that determine what is learned, by setting."""
        return {f"plugins: {name}": name for name in config.plugins}

    def packages(self, config: AnyConfig) -> dict[str, str]:
        """Return the names of installed packages that determine what is learned, by setting."""
        return {}

    @abstractmethod
    def title(self, run: Run[AnyConfig]) -> str:
        """Return the title of the plot."""

    @abstractmethod
    def result(self) -> tuple[dict[str, Any], str]:
        """Return the values of the event ``finished``, and the summary line to print."""


@dataclass(frozen=True)
class RunResult:
    """Result of a run, the same on every rank.

    Attributes:
        steps: optimizer steps done, skipped ones included.
        export: directory of the exported model, or of the adapter if one was trained, or None.
        stopped: the signal that stopped the run before its last step (``"SIGTERM"``), or None. A checkpoint was saved.
    """

    steps: int
    export: Path | None
    stopped: str | None


def model_line(config: TrainerConfig, backend: Backend) -> str:
    """Describe the model that a run trains: its architecture, its size, and its directory."""
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
