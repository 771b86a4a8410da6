"""A program that ends, with all that it has started, when this process is gone, however that ended.

A watcher that is a child of this process is not enough: Ray, for one, ends an actor by killing it and its direct children
(SIGKILL), a watcher among them, and an engine's workers, which are children of a child, would stay. So :mod:`guard` starts the
watcher: it is nobody's child, and there before the program is.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from megascend.distributed.launch import child_environment

GUARD = Path(__file__).with_name("guard.py")


class GuardedProcess:
    """A program in a session of its own.

    Args:
        command: the program and its arguments.
        output: where it writes to; default: where this process does.
        environment: all of its variables; default: this process's, without what makes it a rank.
        descriptors: that it inherits.

    Attributes:
        process: it has the program's number and exit code, and leads its process group.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        output: IO[Any] | None = None,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        watched, self._held = os.pipe()  # not inherited: it is closed when this process is gone
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-IS", str(GUARD), str(os.getpid()), str(watched), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                env=child_environment() if environment is None else environment,
                pass_fds=(watched, *descriptors),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._held)
            raise
        finally:
            os.close(watched)

    def release(self) -> None:
        """Have the guard end what is left of the program, without waiting for it. May be called twice."""
        held, self._held = self._held, -1
        if held >= 0:
            with contextlib.suppress(OSError):
                os.close(held)
