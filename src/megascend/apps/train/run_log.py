"""Outputs of a run during training: metrics.jsonl, its trackers, and a progress display. Rank 0 only."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from megascend.apps.train.event_log import finite
from megascend.apps.train.run_directory import METRICS, OutputDirectory
from megascend.runtime.io.paths import make_directory
from megascend.training.batch.metrics import Metric

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megascend.apps.tracking.trackers import Trackers

logger = logging.getLogger(__name__)

PLAIN_LINES = 20
"""Number of progress lines that a run prints without a terminal."""
WIDEST = 100
"""Maximum width of the progress bar and the figures beside it, in columns."""
MAX_CHARACTERS = 400
"""Characters of a prompt and of an answer that are shown; events.jsonl has all of them."""
PROGRESS_S = 30.0
"""Seconds between lines about the micro batches of a step that takes longer."""


EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class MetricsRecord:
    """One line of metrics.jsonl, whatever the kind of run. Its fields declare the metrics of the line."""

    step: Annotated[int, Metric("", "optimizer step, from 1")]
    skipped: Annotated[bool, Metric("", "true if the gradient was not finite, so that all ranks skipped the update")]
    seconds: Annotated[float, Metric("s", "time in steps since the run began")]

    at_intervals: ClassVar[tuple[str, ...]] = ()
    """Metrics that are measured at some steps only; their last values are shown until the next ones."""

    def summary(self, earlier: Mapping[str, tuple[int, float]] = EMPTY) -> str:
        """Return the figures of a step in one short line.

        Args:
            earlier: step and value of the last measurement of metrics in :attr:`at_intervals`.
        """
        raise NotImplementedError

    def last_measured(self, name: str, title: str, digits: int, earlier: Mapping[str, tuple[int, float]]) -> str:
        """Return the last value of a metric in :attr:`at_intervals`, with its step unless that is the current one; or ""."""
        value = getattr(self, name)
        if value is not None:
            return f"{title} {value:.{digits}f}"
        if name not in earlier:
            return ""
        step, value = earlier[name]
        return f"{title} {value:.{digits}f} (step {step})"

    def progress(self) -> str:
        """Return a measure of progress other than the step, followed by two spaces; empty for most kinds of run."""
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values: rounded to six digits, None for numbers that are not finite."""
        return {key: rounded(value) for key, value in vars(self).items()}


def rounded(value: Any) -> Any:
    """Round a float, and those of a mapping, to six digits; None if it is not finite, which JSON cannot represent."""
    if isinstance(value, Mapping):
        return {key: rounded(part) for key, part in value.items()}
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


class RunLog:
    """Context manager of a run's outputs: closes the display and flushes the file however the run ends.

    Attributes:
        rows: rows of metrics.jsonl, including those written before the run was resumed.
    """

    def __init__(self, directory: OutputDirectory, trackers: Trackers | None = None) -> None:
        """
        Args:
            directory: rows are held back while it still holds an earlier run.
        """
        self._directory, self._path, self._steps = directory, directory.config.output / METRICS, directory.config.steps
        self._enabled = directory.backend.rank == 0  # on the other ranks nothing is written or shown
        self._trackers = trackers if self._enabled else None
        # Rows of steps before this process are kept; those of later steps are dropped.
        self._steps_done = directory.backend.step_count
        self._clock = StepClock(self._steps, self._steps_done)
        self._display = BarDisplay(self._clock) if sys.stdout.isatty() else PlainDisplay(self._clock)
        self._file: AppendFile | None = None
        self._unwritten: list[dict[str, Any]] = []
        self._measured: dict[str, tuple[int, float]] | None = (
            None  # None before the first record, whose class names the metrics
        )
        self.rows: list[dict[str, Any]] = []
        self._earlier_bytes: list[int] = []  # of each row of steps before this process

    def __enter__(self) -> RunLog:
        # Also for a run that is resumed at its last step and takes none: its plot shows these rows.
        if self._enabled and self._steps_done:
            earlier = list(complete_rows(self._path, self._steps_done))
            self.rows, self._earlier_bytes = [row for row, _ in earlier], [size for _, size in earlier]
        return self

    def start(self) -> None:
        if self._enabled:
            self._clock.start()
            self._display.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            self._display.stop()
        if self._unwritten and not self._directory.holds_earlier_run:
            self._write_rows()
        if self._file is not None:
            self._file.close()
        if self._trackers is not None:
            # A stopped run has not failed, and trackers show the difference.
            complete = bool(self.rows) and self.rows[-1]["step"] >= self._steps
            self._trackers.close("failed" if kind is not None else "finished" if complete else "stopped")

    @property
    def writes(self) -> bool:
        """True if this rank may write to the output directory now."""
        return self._enabled and not self._directory.holds_earlier_run

    def write(self, record: MetricsRecord) -> None:
        """Record one step. The files are created with the first one: a run that fails to start leaves none."""
        if not self._enabled:
            return
        if self._measured is None:
            self._measured = {
                name: (row["step"], row[name])
                for row in self.rows
                for name in record.at_intervals
                if row.get(name) is not None
            }
        # Held back while the directory holds an earlier run, whose metrics must stay unchanged.
        self._unwritten.append(record.to_dict())
        if not self._directory.holds_earlier_run:
            self._write_rows()
        self._clock.step_done(record.step)
        self._display.show(record, self._measured)
        values = {name: getattr(record, name) for name in record.at_intervals}
        self._measured |= {name: (record.step, value) for name, value in values.items() if value is not None}

    def complete_last(self, step: int, values: Mapping[str, Any]) -> None:
        """Add values to the last row of a resumed run, that of ``step``, if it is there. Before the first :meth:`write`."""
        if self._enabled and self.rows and self.rows[-1]["step"] == step:
            self._earlier_bytes.pop()
            self._unwritten.append(self.rows.pop() | {name: rounded(value) for name, value in values.items()})
            self._write_rows()

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Show the model's answers after a step, by prompt, and pass them to the trackers."""
        if not self._enabled:
            return
        self._display.print_text(f"answers after step {step}:\n" + "\n".join(map(quoted, texts.keys(), texts.values())))
        if self._trackers is not None and not self._directory.holds_earlier_run:
            self._trackers.log_texts(step, texts)

    def show_text(self, text: str) -> None:
        if self._enabled:
            self._display.print_text(text)

    def write_rollouts(self, step: int, text: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show ``text`` about rollouts of a step, and pass ``rows`` to the trackers."""
        if not self._enabled:
            return
        self._display.print_text(text)
        if self._trackers is not None and not self._directory.holds_earlier_run:
            self._trackers.log_rollouts(step, rows)

    def micro_batch(self, finished: int, count: int) -> None:
        """Show that ``finished`` of a step's ``count`` micro batches are done; a callback for ``Backend.on_micro_batch``."""
        if self._enabled and (line := self._clock.micro_batch(finished, count)) is not None:
            self._display.show_line(line)

    def _write_rows(self) -> None:
        if self._file is None:
            self._file = AppendFile(self._path, sum(self._earlier_bytes))
        for row in self._unwritten:
            self.rows.append(row)
            self._file.write(json.dumps(finite(row), allow_nan=False) + "\n")
            if self._trackers is not None:
                self._trackers.log(row["step"], row)
        self._unwritten = []


class AppendFile:
    """A file of lines, each written at once. On a full disk, lines are held back until there is space again."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """
        Args:
            path: created, with the directory it is in, with the first line.
            size: bytes of what is there that stay.
        """
        self._path, self._size = path, size
        self._descriptor: int | None = None
        self._waiting = b""
        self._warned = False

    def write(self, line: str) -> None:
        """Add a line, after those that still wait."""
        self._waiting += line.encode()
        try:
            if self._descriptor is None:
                self._descriptor = self._open()
            while self._waiting:
                self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]
            self._warned = False
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("%s cannot be written: %s; its lines are kept until it can be", self._path, error)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        if self._waiting:
            unwritten = self._waiting.count(b"\n")
            logger.warning("%s: the last %d lines could not be written", self._path, unwritten)

    def _open(self) -> int:
        make_directory(self._path.parent)
        # Opened once and appended to: a file that is replaced would leave those who follow it (tail -f) behind.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.ftruncate(descriptor, self._size)  # works on a full disk, and keeps a link a link
        return descriptor


def complete_rows(path: Path, step: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Read the rows of a JSONL file up to ``step``, with the bytes of each; none after a line that a crash cut off."""
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for line in lines:
            try:
                row = json.loads(line)
                # Steps after the checkpoint will be done again, and must not be there twice.
                if row["step"] > step or not line.endswith(b"\n"):
                    return
            except (ValueError, TypeError, KeyError):
                return
            yield row, len(line)


class StepClock:
    """Progress and remaining time of a run and its current step. Local: no communication between ranks.

    Args:
        done: steps before this process.
    """

    def __init__(self, steps: int, steps_done: int = 0, now: Callable[[], float] = time.monotonic) -> None:
        self.steps, self.step, self._steps_done, self._now = steps, steps_done, steps_done, now
        self.start()

    def start(self) -> None:
        self._start = self._step_began = self._reported = self._now()

    def step_done(self, step: int) -> None:
        self.step = step
        self._step_began = self._reported = self._now()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first step of this process began, with everything between steps."""
        return self._now() - self._start

    @property
    def remaining_s(self) -> float | None:
        """Seconds that are left if the other steps take as long as those so far; None before the first one."""
        local_steps = self.step - self._steps_done
        return self.elapsed_s / local_steps * (self.steps - self.step) if local_steps > 0 else None

    def micro_batch(self, finished: int, count: int) -> str | None:
        """Return a line, if one is due, when the next micro batch of a step begins.

        Args:
            done: micro batches before it.
            count: number of the step.
        """
        now = self._now()
        # Until a micro batch is done, there is no estimate for the others.
        if not finished or now - self._reported < PROGRESS_S:
            return None
        self._reported = now
        local_steps, seconds = self.step - self._steps_done, now - self._step_began
        left = seconds / finished * (count - finished)
        # In the first step there is no earlier one: it is extrapolated from its own micro batches.
        mean = (self._step_began - self._start) / local_steps if local_steps else seconds + left
        run_left = left + (self.steps - self.step - 1) * mean
        return (
            f"step {self.step + 1}/{self.steps}  micro batch {finished}/{count}  {clock(seconds)} in the step, {clock(left)} "
            f"to its end  ETA {clock(run_left)}"
        )


class PlainDisplay:
    """A line every few steps, for log files and pipes."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._interval = max(1, clock.steps // PLAIN_LINES)

    def start(self) -> None:
        """Show nothing before the first step."""

    def stop(self) -> None:
        """Leave the lines where they are."""

    def show(self, record: MetricsRecord, earlier: Mapping[str, tuple[int, float]] = EMPTY) -> None:
        """Print the step if it is the first, the last, skipped, or due."""
        steps = self._clock.steps
        if record.step in (1, steps) or record.skipped or record.step % self._interval == 0:
            elapsed, remaining = self._clock.elapsed_s, self._clock.remaining_s or 0.0
            print(
                f"step {record.step}/{steps}  {record.progress()}{record.summary(earlier)}  elapsed {clock(elapsed)}  "
                f"ETA {clock(remaining)}",
                flush=True,
            )

    def print_text(self, text: str) -> None:
        print(text, flush=True)

    show_line = print_text


class BarDisplay:
    """Two lines at the bottom of a terminal: how far the run is, whose counter is never cut, and the figures of the last step."""

    def __init__(self, clock: StepClock) -> None:
        # Imported here: a log file needs none of it.
        from rich import get_console
        from rich.live import Live

        self._console = get_console()
        self._clock = clock
        self._progress, self._summary = "", "waiting for the first step"
        # Computed when it is drawn, so that the clock moves within a step.
        self._live = Live(get_renderable=self.lines, refresh_per_second=4, console=self._console)

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def show(self, record: MetricsRecord, earlier: Mapping[str, tuple[int, float]] = EMPTY) -> None:
        self._progress, self._summary = record.progress(), record.summary(earlier)
        if record.skipped:
            self._console.print(f"step {record.step}: non-finite gradients, skipped on all ranks", style="red")

    def show_line(self, line: str) -> None:
        """Show a line about a step that is running in place of the figures, until the step ends."""
        self._summary = line

    def print_text(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def lines(self) -> RenderableType:
        """Return both lines in their current state. The bar takes the width that counter and times leave."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        step, steps, remaining = self._clock.step, self._clock.steps, self._clock.remaining_s
        eta = "-" if remaining is None else clock(remaining)
        first = Table.grid(padding=(0, 2, 0, 0), expand=True)
        first.width = min(self._console.width, WIDEST)
        first.add_column(no_wrap=True, min_width=len(counter := f"step {step}/{steps}"))
        first.add_column(ratio=1)
        first.add_column(no_wrap=True)
        times = f"{self._progress}elapsed {clock(self._clock.elapsed_s)}  ETA {eta}"
        first.add_row(counter, ProgressBar(steps, step), times)
        return Group(first, Text(self._summary, overflow="fold"))


def quoted(prompt: str, answer: str) -> str:
    """Write a prompt and its answer for a terminal, each as :func:`quoted_text` does."""
    return f"{quoted_text(prompt, '  > ')}\n{quoted_text(answer, '    ')}"


def quoted_text(text: str, mark: str, characters: int | None = MAX_CHARACTERS) -> str:
    """Write a text for a terminal: behind ``mark``, cut to ``characters`` (None: whole), and without control characters."""
    short = text if characters is None or len(text) <= characters else f"{text[:characters].rstrip()}..."
    # A model may answer with escape sequences, which would act on the terminal.
    plain = "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in short)
    return mark + plain.strip().replace("\n", "\n    ")


def clock(seconds: float) -> str:
    """Write seconds as h:mm:ss or m:ss."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
