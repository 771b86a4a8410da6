"""Log of a run's events and errors, for people and for ``megascend doctor --run``.

OUTPUT/events.jsonl                        rank 0: a line for every start, save, stop...
OUTPUT/errors/attempt-0-rank-3.json        the error that ended rank 3 of attempt 0; a line for each such start of the run
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

from megascend.errors import redacted
from megascend.runtime.distributed.launch import Launch
from megascend.runtime.io.paths import make_directory
from megascend.surroundings import process_start

logger = logging.getLogger(__name__)

EVENTS = "events.jsonl"
ERRORS = "errors"


class EventLog:
    """Appends to the event and error files of a run. Lines that cannot be written are dropped with a warning.

    Attributes:
        active: False while the directory does not belong to this run: nothing is written.
        started: True after :meth:`start`; earlier errors are failures to start.
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
            losses: returns (standard stream, reason) for each stream that has begun to drop output, once each.
        """
        self._output, self._launch = output, launch
        self._losses = losses
        self._pending: list[tuple[Path, str]] | None = None
        self._agent = agent()  # read now: an orphan's parent process is another one
        self.active = active
        self.started = False
        self._failed = False
        # Errors of earlier attempts are in the same folder; the time distinguishes them.
        self._since = round(time.time(), 3)
        self._recorded: BaseException | None = None

    def start(self, *, hold: bool = False, **values: Any) -> None:
        """Log the start of this run, to which the directory belongs from now on. On every rank.

        Args:
            hold: the directory still holds an earlier run: lines are held back until :meth:`write_pending`, and lost if the run
                ends before.
        """
        self.active = self.started = True
        self._pending = [] if hold else None
        launch = {"world_size": self._launch.world_size, "agent": self._agent, "command": command(self._launch)}
        self.event("start", **launch, start_ticks=process_start(os.getpid()), directory=os.getcwd(), **values)

    def write_pending(self) -> None:
        """Write the lines held back since :meth:`start`. On every rank."""
        pending, self._pending = self._pending or (), None
        for path, line in pending:
            self._append(path, line)

    def event(self, kind: str, **values: Any) -> None:
        """Add a line on rank 0; ``values`` are JSON, in which numbers that are not finite become null."""
        if self._launch.rank == 0:
            self._write(self._output / EVENTS, {"event": kind, **values})
            # A broken standard stream cannot report itself.
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
        """Write the error that ends this rank.

        Args:
            step: the current step, from 1; 0 before the first one.
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
        line = json.dumps(finite(redacted(values) | stamp | {"attempt": self._launch.attempt}), allow_nan=False) + "\n"
        if self._pending is None:
            self._append(path, line)
        else:
            self._pending.append((path, line))

    def _append(self, path: Path, line: str) -> None:
        try:
            make_directory(path.parent)
            with path.open("ab+") as file:
                # A line that a crash cut off must not swallow this one.
                if file.tell() and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
                    line = f"\n{line}"
                file.write(line.encode())
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
    """Return a name for the process that started this one: the same for all attempts of a run under torchrun."""
    # Its id alone does not do: in a container torchrun has the id 1 at every start.
    return f"{socket.gethostname()}:{os.getppid()}:{process_start(os.getppid())}"


def command(launch: Launch) -> list[str]:
    """Return the command line that started the run: the launcher's, if there is one."""
    import psutil

    # The launcher may have ended, or belong to another user.
    with contextlib.suppress(psutil.Error):
        process = psutil.Process()
        above = process.parent()
        line = above.cmdline() if above is not None else []
        # Under torchrun this process's own command line is not one that the user could type again.
        launched = launch.world_size > 1 or any("torchrun" in part or "torch.distributed.run" in part for part in line)
        return line if launched else process.cmdline()
    return []


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the objects of a JSON Lines file, and a remark if lines cannot be read. A missing file counts as empty."""
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
