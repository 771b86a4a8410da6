"""Programs that end, with all their children, when this process ends in any way.

A watcher that is a child of this process is not enough: Ray, for example, ends an actor by killing it and its direct children
(SIGKILL), including the watcher, and an engine's workers, which are grandchildren, would survive. So :mod:`guard` starts an
orphaned watcher before it starts the program.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from megascend.errors import EngineError
from megascend.runtime.distributed.launch import child_environment

GUARD = Path(__file__).with_name("guard.py")
RESTARTS, RESTARTS_S = 5, 3600.0
"""Restarts of a program that has ended, within so many seconds."""


class GuardedProcess:
    """A program in a new session, with a watcher.

    Args:
        output: output of the program; default: this process's output.
        environment: complete environment; default: this process's, without the variables of a rank.
        descriptors: file descriptors to inherit.

    Attributes:
        process: has the program's pid and exit code, and leads its process group.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        output: IO[Any] | None = None,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        # The write end is not inherited, so it closes when this process ends.
        read_end, self._write_end = os.pipe()
        try:
            self.process = subprocess.Popen(
                # -I and -S: neither the user's modules nor site packages, which take time and may fail.
                [sys.executable, "-IS", str(GUARD), str(os.getpid()), str(read_end), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                env=child_environment() if environment is None else environment,
                pass_fds=(read_end, *descriptors),
                # A Ctrl-C on the terminal is for this process, which ends the program in order.
                start_new_session=True,
            )
        except BaseException:
            os.close(self._write_end)
            raise
        finally:
            os.close(read_end)

    def release(self) -> None:
        """Make the watcher end what is left of the program, without waiting. May be called twice."""
        write_end, self._write_end = self._write_end, -1
        # Closing the pipe is the message to the watcher.
        if write_end >= 0:
            with contextlib.suppress(OSError):
                os.close(write_end)


class RestartLimit:
    """Limit on the restarts of a program, in any stretch of time."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=RESTARTS)

    def note(self, description: str) -> None:
        """Note another restart.

        Raises:
            EngineError: there were too many; the message begins with ``description``.
        """
        now = time.monotonic()
        if len(self._times) == RESTARTS and now - self._times[0] < RESTARTS_S:
            raise EngineError(f"{description}, after {RESTARTS} restarts within {RESTARTS_S:g} s")
        self._times.append(now)
