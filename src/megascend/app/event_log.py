"""What happened to a run, for people and for ``megascend doctor --run``.

OUTPUT/events.jsonl                        rank 0: a line for every start, save, stop...
OUTPUT/errors/attempt-0-rank-3.json        the error that ended a rank, in its own words; a line for each time the run was started
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from megascend.distributed.launch import Launch
from megascend.io.paths import make_directory

logger = logging.getLogger(__name__)

EVENTS = "events.jsonl"
ERRORS = "errors"


class EventLog:
    """Appends to the files of a run. A full disk must not end a run that trains: what cannot be written is dropped, and said so.

    Attributes:
        active: False while the directory is not, or not yet, this run's: nothing is written.
        started: True once this run's ``start`` event is due; errors before it happened on the way to the first step.
    """

    def __init__(
        self,
        output: Path,
        launch: Launch,
        *,
        active: bool = True,
        losses: Callable[[], Iterable[tuple[str, str]]] = tuple,
    ) -> None:
        """
        Args:
            losses: tells, once each, which standard streams drop what is written to them, and why.
        """
        self._output, self._launch = output, launch
        self._losses = losses
        self._waiting: list[tuple[Path, str]] | None = None
        self._agent = agent()  # of an orphan it would be another one
        self.active = active
        self.started = False
        self._failed = False
        # Errors of an earlier attempt stand in the same folder; the time tells them apart.
        self._since = round(time.time(), 3)
        self._recorded: BaseException | None = None

    def start(self, *, wait: bool = False, **values: Any) -> None:
        """Note that this run begins; from now on the directory is its own. On every rank.

        Args:
            wait: the directory still holds an earlier run: lines wait for :meth:`write_waiting`, and an error that comes before
                is not kept.
        """
        self.active = self.started = True
        # Nothing may be written beside an earlier run's files before this run has done a step.
        self._waiting = [] if wait else None
        launch = {"world_size": self._launch.world_size, "agent": self._agent, "command": command(self._launch)}
        self.event("start", **launch, directory=os.getcwd(), **values)

    def write_waiting(self) -> None:
        """Write the lines that wait since :meth:`start`: the directory is this run's now. On every rank."""
        waiting, self._waiting = self._waiting or (), None
        for path, line in waiting:
            self._append(path, line)

    def event(self, kind: str, **values: Any) -> None:
        """Add a line on rank 0; ``values`` are JSON, in which null stands for numbers that are not finite."""
        if self._launch.rank == 0:
            self._write(self._output / EVENTS, {"event": kind, **values})
            # Output that is lost cannot report its own loss; the file can.
            for stream, problem in self._losses():
                self._write(self._output / EVENTS, {"event": "output_lost", "stream": stream, "problem": problem})

    @contextlib.contextmanager
    def recording_errors(self, step: Callable[[], int]) -> Iterator[None]:
        """Record the error that leaves the block, unless an inner block did; ``step`` returns the current step."""
        try:
            yield
        except BaseException as error:
            # Blocks are nested, and the innermost one knows the step.
            if error is not self._recorded:
                self._recorded = error
                self.error(error, step())
            raise

    def error(self, error: BaseException, step: int) -> None:
        """Keep the error that ends this rank.

        Args:
            step: the step that was being worked on, from 1; 0: none yet.
        """
        path = self._output / ERRORS / f"attempt-{self._launch.attempt}-rank-{self._launch.rank}.json"
        values = {
            "rank": self._launch.rank,
            "world_size": self._launch.world_size,
            "started": self.started,
            "agent": self._agent,
            "since": self._since,
            "step": step,
            "error": type(error).__name__,
            "message": str(error),
            "traceback": "".join(traceback.format_exception(error)),
        }
        self._write(path, values)

    def _write(self, path: Path, values: dict[str, Any]) -> None:
        if not self.active:
            return
        stamp = {"time": round(time.time(), 3), "host": socket.gethostname(), "pid": os.getpid()}
        # One line, written at once: processes of several attempts append to the same file.
        line = json.dumps(finite(values | stamp | {"attempt": self._launch.attempt}), allow_nan=False) + "\n"
        if self._waiting is None:
            self._append(path, line)
        else:
            self._waiting.append((path, line))

    def _append(self, path: Path, line: str) -> None:
        try:
            make_directory(path.parent)
            with path.open("a", encoding="utf-8") as file:
                # A line that a crash cut off must not swallow this one.
                file.write(("\n" if _cut_off(path) else "") + line)
        except OSError as problem:
            if not self._failed:
                self._failed = True
                logger.warning("rank %d: %s cannot be written: %s", self._launch.rank, path, problem)


def finite(value: Any) -> Any:
    """Replace numbers that are not finite, which JSON cannot represent, by None."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def agent() -> str:
    """Return host and id of the process that started this one: the same for all attempts of a run under torchrun."""
    return f"{socket.gethostname()}:{os.getppid()}"


def command(launch: Launch) -> list[str]:
    """Return the command line that started the run: the launcher's, if there is one."""
    import psutil

    # The launcher may end, or be another user's, while it is looked at.
    with contextlib.suppress(psutil.Error):
        process = psutil.Process()
        above = process.parent()
        line = above.cmdline() if above is not None else []
        # Under torchrun this process's own command line is not one that the user could type again.
        launched = launch.world_size > 1 or any("torchrun" in part or "torch.distributed.run" in part for part in line)
        return line if launched else process.cmdline()
    return []


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the objects of a JSON Lines file, and remarks on lines that cannot be read. A missing file has none."""
    try:
        # A crash may have cut off a character.
        text = path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{path} cannot be read: {error}"]
    records, bad = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            records.append(value)
        else:
            bad.append(str(number))
    remark = f"{path}: not JSON, perhaps cut off by a crash: line{'s' if len(bad) > 1 else ''} {', '.join(bad)}"
    return records, [remark] if bad else []


def _cut_off(path: Path) -> bool:
    """Return True if a file does not end with a line break."""
    size = path.stat().st_size
    if not size:
        return False
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) != b"\n"
