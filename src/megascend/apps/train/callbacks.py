"""Callbacks of a run: objects of the user's that rank 0 calls between steps, and that may ask to save or to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.config.plugins import load_object
from megascend.errors import ConfigError

if TYPE_CHECKING:
    from megascend.apps.train.learner import Run, RunResult
    from megascend.apps.train.run_log import MetricsRecord
    from megascend.config import TrainerConfig


@dataclass
class TrainerControl:
    """State of a run for its callbacks, and their requests, which take effect at the end of a step.

    Attributes:
        step: the last step that is done.
        should_save: set it to save a checkpoint after this step; reset by the run.
        should_training_stop: set it to end the run after this step with a checkpoint, as a signal does.
    """

    config: TrainerConfig
    step: int
    should_save: bool = False
    should_training_stop: bool = False


class Callback:
    """Base class of callbacks. All methods are called on rank 0 only, so they must not call those of a backend.

    An exception ends the run on every rank, after a checkpoint of the last step.
    """

    def on_start(self, control: TrainerControl) -> None:
        """Handle the start of a run, also of a resumed one, before anything is measured."""

    def on_step(self, control: TrainerControl, record: Mapping[str, Any]) -> None:
        """Handle a step that is done; ``record`` is its line of metrics.jsonl."""

    def on_evaluate(self, control: TrainerControl, record: Mapping[str, Any]) -> None:
        """Handle a measurement after a step; ``record`` is the line of metrics.jsonl that has it."""

    def on_save(self, control: TrainerControl, path: Path) -> None:
        """Handle a complete checkpoint, as soon as the run learns of it between steps; a later save may remove ``path``."""

    def on_end(self, control: TrainerControl, result: RunResult[Any]) -> None:
        """Handle the end of a run that has written its results, or was stopped; not called after an error."""


class Callbacks:
    """The callbacks of a run: on rank 0 those that the run file names, then those of the caller; none on other ranks."""

    def __init__(self, config: TrainerConfig, objects: Sequence[Callback]) -> None:
        self._makers: list[tuple[str, Callable[[], Callback]]] = [
            *((name, callback_class(name)) for name in config.callbacks),
            *((type(entry).__name__, lambda entry=entry: entry) for entry in objects),
        ]
        self._callbacks: list[tuple[str, Callback]] = []
        self._error: ConfigError | None = None
        self._stopped_by: str | None = None

    def start(self, run: Run[Any]) -> None:
        """Make the callbacks, and call ``on_start``. Collective."""
        self._backend, self._control = run.backend, TrainerControl(run.config, run.backend.step_count)
        for name, make in self._makers if run.main_rank else ():
            self._callbacks.append((name, self._guarded(name, "__init__", make)))
        self.call("on_start")
        self.check()

    def step(self, record: MetricsRecord) -> None:
        """Call ``on_step``, and ``on_evaluate`` if something was measured after the step."""
        if not self._callbacks:
            return
        row, self._control.step = record.to_dict(), record.step
        self.call("on_step", row)
        measured = any(getattr(record, name) is not None for name in record.at_intervals)
        if measured or any(name.startswith("tasks/") for name in row):
            self.call("on_evaluate", row)

    def call(self, event: str, *arguments: Any) -> None:
        """Call a method of every callback. An exception is kept, and raised by :meth:`check`."""
        for name, callback in self._callbacks:
            self._guarded(name, event, getattr(callback, event, None), self._control, *arguments)
            if self._control.should_training_stop and self._stopped_by is None:
                self._stopped_by = f"callback {name}"

    def requests(self) -> tuple[bool, bool]:
        """Return whether callbacks of this rank ask to stop, or have failed, and whether to save, which is reset."""
        stop, save = self._control.should_training_stop or self._error is not None, self._control.should_save
        self._control.should_save = False
        return stop, save

    def check(self) -> str | None:
        """Return the callback that has stopped the run, if one has; raise the error of one on every rank. Collective."""
        return self._backend.from_rank_0(self._outcome) if self._makers else None

    def _outcome(self) -> str | None:
        if self._error is not None:
            raise self._error
        return self._stopped_by

    def _guarded(self, name: str, event: str, function: Any, *arguments: Any) -> Any:
        if self._error is not None:
            return None
        try:
            return function(*arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001  raised by check(), once all ranks are there
            text = " ".join(f"callback {name}: {event} raised {type(error).__name__}: {error}".split())
            self._error = ConfigError(text if len(text) <= 160 else f"{text[:157]}...")
            self._error.__cause__ = error


def callback_class(name: str) -> type[Callback]:
    """Import a subclass of :class:`Callback`: ``path/to/file.py:Class``, or ``package.module:Class``."""
    kind = load_object(name, "callbacks")
    if not (isinstance(kind, type) and issubclass(kind, Callback)):
        raise ConfigError(f"callbacks: {name} is not a subclass of megascend.Callback")
    # A method that nothing calls, such as another trainer's on_step_end, would be noticed after hours.
    events = [method for method in vars(Callback) if method.startswith("on_")]
    if unknown := [method for method in dir(kind) if method.startswith("on_") and method not in events]:
        raise ConfigError(f"callbacks: {name} has {unknown[0]}, which is never called; there are {', '.join(events)}")
    return kind
