"""What a run leaves behind while it goes on: metrics.jsonl, figures for its trackers, and a progress display. Rank 0 only."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megascend.app.event_log import finite
from megascend.io.paths import make_directory

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from megascend.tracking.trackers import Trackers

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"

PLAIN_LINES = 20
"""How many progress lines a run prints where there is no terminal."""
WIDEST = 100
"""Columns of a terminal that the progress bar and what is beside it take at most."""
SHOWN = 400
"""Characters of a prompt and of an answer that are shown; events.jsonl has them whole."""
PROGRESS_S = 30.0
"""Seconds between lines about the micro batches of a step that takes longer."""


@dataclass(frozen=True)
class Record:
    """One line of metrics.jsonl, whatever the kind of run.

    Attributes:
        step: counted from 1.
        skipped: True if a non-finite gradient made all ranks skip the update.
        seconds: time since the first step began.
    """

    step: int
    skipped: bool
    seconds: float

    def summary(self) -> str:
        """The figures of a step in one short line."""
        raise NotImplementedError

    def progress(self) -> str:
        """How far the run is, beside its steps, with two spaces behind it; nothing for most kinds of run."""
        return ""

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON can hold it: rounded to six digits, null for numbers that are not finite."""
        values = dict(vars(self))
        for key, value in values.items():
            if isinstance(value, float):
                values[key] = rounded(value)
        return values


def rounded(value: float) -> float | None:
    """``value`` to six digits, or None if it is not finite, which JSON cannot say."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


@dataclass(frozen=True)
class StepRecord(Record):
    """A step of supervised training. ``loss`` and ``grad_norm`` are null where they are not finite.

    Attributes:
        loss: mean over the trained tokens of the step, before the update.
        grad_norm: global norm before clipping.
        lr: learning rate of the update.
        tokens: tokens of the step that carry loss, over all ranks.
        total_tokens: input tokens of the step, over all ranks.
        tokens_per_s: ``total_tokens`` over the step's time.
        epoch: how often the data has been gone through after this step.
        peak_memory_bytes: device memory of rank 0 since the run began; 0 where the platform cannot tell.
        step_seconds: what the step took on rank 0.
        dispatch_seconds: in which rank 0's process handed out the work of the forward and backward passes. On a GPU or NPU that
            runs ahead of the device; near ``step_seconds``, the device waits for the process. On the CPU it is the work itself.
        mfu: model-FLOPs utilisation, or None where the model's or the device's figure is not known.
        validation_loss: after this step, or None where it was not measured.
        metrics: what the loss reported beside its value, by name.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    total_tokens: int
    tokens_per_s: float
    epoch: float
    peak_memory_bytes: int
    step_seconds: float
    dispatch_seconds: float
    mfu: float | None = None
    validation_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON can hold it; each of ``metrics`` under its own name."""
        values = super().to_dict()
        return values | {key: rounded(value) for key, value in values.pop("metrics").items()}

    def progress(self) -> str:
        """How often the data has been gone through."""
        return f"epoch {self.epoch:.2f}  "

    def summary(self) -> str:
        """The figures of a step in one short line."""
        skipped = "  SKIPPED" if self.skipped else ""
        measured = "" if self.validation_loss is None else f"  validation {self.validation_loss:.4f}"
        return f"loss {self.loss:.4f}{measured}  grad norm {self.grad_norm:.3f}  {self.tokens_per_s:,.0f} tokens/s{skipped}"


class StepClock:
    """How far a step has come, from its micro batches, and when something is to be said about it. Local: no rank asks another.

    Args:
        steps: of the whole run.
        done: steps before this process.
        every_s: seconds between two reports.
        now: a clock in seconds.
    """

    def __init__(
        self, steps: int, done: int = 0, every_s: float = PROGRESS_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._steps, self._step, self._every_s, self._now = steps, done + 1, every_s, now
        self._began = self._said = now()
        self._earlier: float | None = None  # mean seconds of the steps before

    def step_done(self, record: Record, steps_here: int) -> None:
        """A step has ended, the ``steps_here``-th of this process."""
        self._step = record.step + 1
        now = self._now()
        took = now - self._began
        self._earlier = took if self._earlier is None else self._earlier + (took - self._earlier) / steps_here
        self._began = self._said = now

    def micro_batch(self, done: int, count: int) -> str | None:
        """A line, if one is due, when the next micro batch of a step begins.

        Args:
            done: micro batches before it.
            count: of the step.
        """
        now = self._now()
        if not done or now - self._said < self._every_s:
            return None
        self._said = now
        took = now - self._began
        left = took / done * (count - done)
        run_left = left + (self._steps - self._step) * (took + left if self._earlier is None else self._earlier)
        return (
            f"step {self._step}/{self._steps}  micro batch {done}/{count}  {clock(took)} in the step, {clock(left)} to its end  "
            f"ETA {clock(run_left)}"
        )


class RunLog:
    """Context manager over the outputs of a run; a display is closed and a file flushed however the run ends."""

    def __init__(
        self,
        output: Path,
        steps: int,
        trackers: Trackers | None = None,
        enabled: bool = True,
        done: int = 0,
        waiting: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            trackers: closed with the log.
            enabled: False, as on every rank but the first: nothing is written or shown.
            done: steps of an earlier part of the run, whose rows stay; what it has of later ones is dropped.
            waiting: the output directory still holds an earlier run: rows are written with the first one for which it does not.
        """
        self._output = output
        self._enabled = enabled
        self._trackers = trackers if enabled else None
        self._steps = steps
        self._display = make_display(steps, done)
        self._clock = StepClock(steps, done)
        self._file: AppendFile | None = None
        self._done, self._waiting = done, waiting
        self._unwritten: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self._earlier_bytes = 0  # of the metrics of steps before this process

    def __enter__(self) -> RunLog:
        if self._enabled:
            # Also of a run that is resumed at its last step and takes none: its plot shows them.
            if self._done:
                self.rows, self._earlier_bytes = rows_until(self._output / METRICS, self._done)
            self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            self._display.stop()
        if self._unwritten and not self._waiting():
            self._write_rows()
        if self._file is not None:
            self._file.close()
        if self._trackers is not None:
            complete = bool(self.rows) and self.rows[-1]["step"] >= self._steps
            self._trackers.close("failed" if kind is not None else "finished" if complete else "stopped")

    def write(self, record: Record) -> None:
        """Record one step. The files are created with the first one: a run that fails to start leaves none."""
        if not self._enabled:
            return
        row = record.to_dict()
        self._unwritten.append(row)
        if not self._waiting():
            self._write_rows()
        self._display.show(record)
        self._clock.step_done(record, record.step - self._done)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Show what the model answered after a step, by prompt, and hand it to the trackers."""
        if not self._enabled:
            return
        self._display.tell_more(f"answers after step {step}:\n" + "\n".join(map(quoted, texts.keys(), texts.values())))
        if self._trackers is not None and not self._waiting():
            self._trackers.log_texts(step, texts)

    def micro_batch(self, done: int, count: int) -> None:
        """The next of a step's ``count`` micro batches begins, after ``done`` others; for ``Backend.on_micro_batch``."""
        if self._enabled and (line := self._clock.micro_batch(done, count)) is not None:
            self._display.tell(line)

    def _write_rows(self) -> None:
        if self._file is None:
            self._file = AppendFile(self._output / METRICS, self._earlier_bytes)
        for row in self._unwritten:
            self.rows.append(row)
            self._file.write(json.dumps(finite(row), allow_nan=False) + "\n")
            if self._trackers is not None:
                self._trackers.log(row["step"], row)
        self._unwritten = []


class AppendFile:
    """A file of lines, each on its way to the disk at once. A full disk ends no run: lines wait until there is room again."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """
        Args:
            path: created, with the directory it is in, with the first line.
            size: bytes of what is there that stay.
        """
        self._path, self._size = path, size
        self._descriptor: int | None = None
        self._waiting = b""
        self._told = False

    def write(self, line: str) -> None:
        """Add a line, after those that still wait."""
        self._waiting += line.encode()
        try:
            if self._descriptor is None:
                self._descriptor = self._open()
            while self._waiting:
                self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]
            self._told = False
        except OSError as error:
            if not self._told:
                self._told = True
                logger.warning("%s cannot be written: %s; its lines are kept until it can be", self._path, error)

    def close(self) -> None:
        """Close the file; says what is lost, if something still waits."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        if self._waiting:
            lost = self._waiting.count(b"\n")
            logger.warning("%s: the last %d lines could not be written", self._path, lost)

    def _open(self) -> int:
        make_directory(self._path.parent)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.ftruncate(descriptor, self._size)  # needs no room, and leaves a link one
        return descriptor


def rows_until(path: Path, step: int) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a metrics.jsonl up to ``step``, and the bytes they take; none after a line that a crash cut off."""
    rows, size = [], 0
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
        try:
            row = json.loads(line)
            if row["step"] > step or not line.endswith(b"\n"):
                break
        except (ValueError, TypeError, KeyError):
            break
        rows.append(row)
        size += len(line)
    return rows, size


class Pace:
    """How long this process has been at its steps, and how long it still will be.

    Args:
        steps: of the whole run.
        done: steps before this process.
        now: a clock in seconds.
    """

    def __init__(self, steps: int, done: int = 0, now: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._done, self._now = steps, done, now
        self._began = now()

    def start(self) -> None:
        """The first step begins."""
        self._began = self._now()

    @property
    def elapsed_s(self) -> float:
        """Since the first step of this process began, with everything between steps."""
        return self._now() - self._began

    def remaining_s(self, step: int) -> float | None:
        """After ``step``, if the other steps take as long as those so far; None before the first one."""
        here = step - self._done
        return self.elapsed_s / here * (self._steps - step) if here > 0 else None


class PlainDisplay:
    """A line every few steps, for log files and pipes."""

    def __init__(self, steps: int, done: int = 0, now: Callable[[], float] = time.monotonic) -> None:
        self._steps = steps
        self._pace = Pace(steps, done, now)
        self._every = max(1, steps // PLAIN_LINES)

    def start(self) -> None:
        """The first step begins."""
        self._pace.start()

    def stop(self) -> None:
        """Nothing to take down."""

    def show(self, record: Record) -> None:
        """Print the step if it is the first, the last, skipped, or due."""
        if record.step in (1, self._steps) or record.skipped or record.step % self._every == 0:
            elapsed, remaining = self._pace.elapsed_s, self._pace.remaining_s(record.step) or 0.0
            print(
                f"step {record.step}/{self._steps}  {record.progress()}{record.summary()}  elapsed {clock(elapsed)}  "
                f"ETA {clock(remaining)}",
                flush=True,
            )

    def tell(self, line: str) -> None:
        """Print a line about a step that is running."""
        print(line, flush=True)

    def tell_more(self, text: str) -> None:
        """Print lines that stay."""
        print(text, flush=True)


class BarDisplay:
    """Two lines at the bottom of a terminal: how far the run is, whose counter is never cut, and the figures of the last step."""

    def __init__(
        self, steps: int, done: int = 0, console: Console | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        from rich import get_console
        from rich.live import Live

        self._console = console or get_console()
        self._steps, self._step = steps, done
        self._pace = Pace(steps, done, now)
        self._progress, self._summary = "", "waiting for the first step"
        self._live = Live(get_renderable=self.lines, refresh_per_second=4, console=self._console)

    def start(self) -> None:
        """Show the lines; the first step begins."""
        self._pace.start()
        self._live.start()

    def stop(self) -> None:
        """Leave the lines as they stand and give the terminal back."""
        self._live.stop()

    def show(self, record: Record) -> None:
        """Move to the step."""
        self._step, self._progress, self._summary = record.step, record.progress(), record.summary()
        if record.skipped:
            self._console.print(f"step {record.step}: non-finite gradients, skipped on all ranks", style="red")

    def tell(self, line: str) -> None:
        """Show a line about a step that is running in place of the figures, until the step ends."""
        self._summary = line

    def tell_more(self, text: str) -> None:
        """Show lines that stay, above the others."""
        self._console.print(text, markup=False, highlight=False)

    def lines(self) -> RenderableType:
        """Both lines, as they are now. The bar takes what the counter and the times leave of the width."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        remaining = self._pace.remaining_s(self._step)
        times = f"{self._progress}elapsed {clock(self._pace.elapsed_s)}  ETA {'-' if remaining is None else clock(remaining)}"
        first = Table.grid(padding=(0, 2, 0, 0), expand=True)
        first.width = min(self._console.width, WIDEST)
        first.add_column(no_wrap=True, min_width=len(counter := f"step {self._step}/{self._steps}"))
        first.add_column(ratio=1)
        first.add_column(no_wrap=True)
        first.add_row(counter, ProgressBar(self._steps, self._step), times)
        return Group(first, Text(self._summary, overflow="fold"))


def make_display(steps: int, done: int = 0) -> BarDisplay | PlainDisplay:
    """Lines that stay in place on a terminal, else a line every few steps."""
    return BarDisplay(steps, done) if sys.stdout.isatty() else PlainDisplay(steps, done)


def quoted(prompt: str, answer: str) -> str:
    """A prompt and its answer for a terminal: both begin a line, neither is longer than a few of them, nothing controls it."""
    short = [text if len(text) <= SHOWN else f"{text[:SHOWN].rstrip()}..." for text in (prompt, answer)]
    plain = ["".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text) for text in short]
    asked, answered = (text.strip().replace("\n", "\n    ") for text in plain)
    return f"  > {asked}\n    {answered}"


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
