"""``megascend train --profile``, or ``rl``: a trace of a few steps that Perfetto opens, and what took the time in them.

OUTPUT/profile/trace-rank-0.json.gz    for https://ui.perfetto.dev, or chrome://tracing
OUTPUT/profile/top-rank-0.txt          kernels and operators, the longest first
"""

from __future__ import annotations

import gzip
import json
import logging
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.config import Profile
from megascend.runtime.io.atomic import replacing
from megascend.runtime.io.paths import make_directory

if TYPE_CHECKING:
    from megascend.runtime.platforms.base import Platform

logger = logging.getLogger(__name__)

PROFILE = "profile"
FILES = (("trace", "json.gz"), ("top", "txt"))
MIB = 1024**2
Event = dict[str, Any]
"""One of ``traceEvents``: name, category, microseconds, process and thread."""

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a GPU did, as torch.profiler calls them."""
OPERATOR = "cpu_op"
MAX_ROWS = 25
NAME_WIDTH = 72


class StepProfiler:
    """Records some steps of a run on this rank; one step before them runs with the profiler on, for what that sets up.

    What it writes is bounded: if a trace comes out larger than the settings allow, fewer steps are recorded once more; of a
    single step that is too large nothing is kept, and a line says so. A disk that is full ends no run.
    """

    def __init__(self, settings: Profile | None, output: Path, platform: Platform, rank: int, steps: range) -> None:
        """
        Args:
            settings: None records nothing.
            steps: those of this process, by their numbers.
        """
        self._platform, self._rank, self._folder = platform, rank, output / PROFILE
        self._limit = 0 if settings is None else settings.max_mib * MIB
        self._recorded = range(0)
        self._seconds = 0.0
        self._session: Any = None
        if settings is not None and (rank == 0 or settings.ranks == "all"):
            self._recorded = recorded(steps, settings.after, settings.steps)
        self._last = steps.stop - 1

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surround a step. Local: it adds no collective, so recording and other ranks stay in step."""
        # One step earlier, for the warm-up.
        if self._session is None and self._recorded and number >= self._recorded.start - 1:
            self._begin(number)
        if self._session is None:
            yield
            return
        from torch.profiler import record_function

        since = time.perf_counter()
        try:
            with record_function(f"megascend: step {number}"):
                yield
        except BaseException:
            self.close()
            raise
        if number in self._recorded:
            self._seconds += time.perf_counter() - since
        if number == self._recorded.stop - 1:
            self._end(number)
        else:
            self._session.step()

    def finish(self) -> None:
        """End recording with the run; warn if steps were still to be recorded."""
        if self._recorded:
            logger.warning("profile: the run ended before the steps to record; no trace was written")
        self.close()

    def close(self) -> None:
        session, self._session, self._recorded = self._session, None, range(0)
        if session is not None:
            # stop() would write the trace of the discarded recording.
            session.on_trace_ready = None
            session.stop()

    def _begin(self, number: int) -> None:
        # The profiler's own set-up would be recorded as the first step's.
        warm_up = self._recorded.start - number
        self._seconds = 0.0
        self._session = self._platform.profiler(warm_up, len(self._recorded))
        self._session.start()

    def _end(self, number: int) -> None:
        session, steps = self._session, self._recorded
        self._session, self._recorded = None, range(0)
        session.stop()
        try:
            size = self._write(session, steps)
        except OSError as error:
            logger.warning("profile: %s cannot be written: %s", self._folder, error)
            return
        if size <= self._limit:
            return
        fewer = max(1, len(steps) * self._limit // size)
        problem = (
            f"the trace of {len(steps)} step(s) takes {size / MIB:.0f} MiB, above profile.max_mib: {self._limit // MIB}"
        )
        if len(steps) > 1 and number + 1 + fewer <= self._last:
            self._recorded = range(number + 2, number + 2 + fewer)
            logger.warning("profile: %s; recording %d instead", problem, fewer)
        else:
            logger.warning("profile: %s; nothing is kept: use smaller batches, or raise the limit", problem)

    def _write(self, session: Any, steps: range) -> int:
        """Write both files if the trace is within the limit; return its size in bytes."""
        make_directory(self._folder)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=self._folder) as scratch:
            full_trace = Path(scratch) / "trace.json"
            session.export_chrome_trace(str(full_trace))
            size = full_trace.stat().st_size
            # Measured after writing: torch can only export a whole trace.
            if size > self._limit:
                return size
            trace, table = (self._folder / f"{name}-rank-{self._rank}.{end}" for name, end in FILES)
            events = json.loads(full_trace.read_bytes())["traceEvents"]
            text = f"steps {steps.start} to {steps.stop - 1}: {render(events, len(steps), self._seconds)}"
            with (
                replacing(trace) as fresh,
                full_trace.open("rb") as source,
                gzip.open(fresh, "wb", compresslevel=5) as packed,
            ):
                shutil.copyfileobj(source, packed)
            with replacing(table) as fresh:
                fresh.write_text(text, encoding="utf-8")
        if self._rank == 0:
            files = f"{trace} (open it in https://ui.perfetto.dev); what took the time: {table}"
            print(f"profile: steps {steps.start} to {steps.stop - 1} in {files}", flush=True)
        return size


def recorded(steps: range, after: int, count: int) -> range:
    """Return which of ``steps`` are recorded: ``count`` of them behind the first ``after``, or as near to that as possible."""
    start = max(steps.start, min(steps.start + after, steps.stop - count))
    return range(start, min(start + count, steps.stop))


# --- what took the time, from the events of a Chrome trace; pure ---


@dataclass(frozen=True)
class ProfileRow:
    """Calls of one name: their count and total time in microseconds, without the time of what they called."""

    name: str
    calls: int
    micros: float


def kernels(events: Iterable[Event]) -> list[ProfileRow]:
    """Return the device's kernels, the longest first; those of several streams may overlap."""
    return _sums((event["name"], float(event["dur"])) for event in events if _is(event, ON_DEVICE))


def operators(events: Iterable[Event]) -> list[ProfileRow]:
    """Return the host's operators by their own time, without the operators that they called; the longest first."""
    threads: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in events:
        if _is(event, (OPERATOR,)):
            threads[event["pid"], event["tid"]].append(event)
    times: list[tuple[str, float]] = []
    for thread in threads.values():
        times += _self_times(thread)
    return _sums(times)


def busy_micros(events: Iterable[Event]) -> float:
    """Return how long at least one kernel ran."""
    spans = sorted((float(event["ts"]), float(event["dur"])) for event in events if _is(event, ON_DEVICE))
    total, end = 0.0, float("-inf")
    for start, took in spans:
        total += max(0.0, start + took - max(start, end))
        end = max(end, start + took)
    return total


def render(events: Sequence[Event], steps: int, seconds: float) -> str:
    """Write the tables of ``steps`` recorded steps that took ``seconds`` in all, as text."""
    lines = [f"{steps} step{'s' if steps > 1 else ''}, {1000 * seconds / steps:.1f} ms each while recorded", ""]
    on_device = kernels(events)
    if on_device:
        share = busy_micros(events) / (1e6 * seconds)
        lines += [f"The device was busy for {share:.0%} of that time. Its kernels and copies:", ""]
        lines += [*_table(on_device, steps, seconds), ""]
    lines += [
        "Operators of the host, each without those that it called:",
        "",
        *_table(operators(events), steps, seconds),
    ]
    return "\n".join([*lines, ""])


def _table(rows: Sequence[ProfileRow], steps: int, seconds: float) -> list[str]:
    lines = [f"{'ms a step':>10}  {'of step':>7}  {'calls a step':>12}  name"]
    for row in rows[:MAX_ROWS]:
        name = row.name if len(row.name) <= NAME_WIDTH else f"{row.name[: NAME_WIDTH - 3]}..."
        share = row.micros / (1e6 * seconds)
        lines.append(f"{row.micros / 1000 / steps:>10.3f}  {share:>7.1%}  {row.calls / steps:>12.1f}  {name}")
    if len(rows) > MAX_ROWS:
        rest = sum(row.micros for row in rows[MAX_ROWS:])
        lines.append(
            f"{rest / 1000 / steps:>10.3f}  {rest / (1e6 * seconds):>7.1%}  {'':>12}  {len(rows) - MAX_ROWS} others"
        )
    return lines


def _self_times(thread: list[Event]) -> list[tuple[str, float]]:
    """Return (name, microseconds without nested events) of the nested events of one thread."""
    thread.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
    times: list[tuple[str, float]] = []
    open_calls: list[tuple[float, int]] = []  # end, and index in times
    for event in thread:
        start, took = float(event["ts"]), float(event["dur"])
        while open_calls and open_calls[-1][0] <= start:
            open_calls.pop()
        if open_calls:
            name, outer = times[open_calls[-1][1]]
            times[open_calls[-1][1]] = (name, outer - took)
        open_calls.append((start + took, len(times)))
        times.append((event["name"], took))
    return times


def _sums(calls: Iterable[tuple[str, float]]) -> list[ProfileRow]:
    counts: dict[str, int] = defaultdict(int)
    micros: dict[str, float] = defaultdict(float)
    for name, took in calls:
        counts[name] += 1
        micros[name] += took
    rows = [ProfileRow(name, counts[name], micros[name]) for name in counts]
    return sorted(rows, key=lambda row: (-row.micros, row.name))


def _is(event: Event, categories: Sequence[str]) -> bool:
    return event.get("ph") == "X" and event.get("cat") in categories
