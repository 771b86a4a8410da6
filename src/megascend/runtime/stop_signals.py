"""Stopping a run from outside: the step is finished and a checkpoint saved first."""

from __future__ import annotations

import signal
import threading
import time
from abc import ABC, abstractmethod
from types import FrameType
from typing import Any

from typing_extensions import Self

from megascend.surroundings import process_status

ALWAYS = (signal.SIGTERM, signal.SIGINT)
"""Signals that always stop a run."""
UNLESS_HANDLED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals that stop a run if they would otherwise end the process: for a lost connection or terminal, the warnings that
schedulers send before a job's time limit (Slurm's ``--signal``), a limit of processor time. A signal that is ignored, as SIGHUP
is under nohup, or that other code handles, is left alone."""
STOPPING = (*ALWAYS, *UNLESS_HANDLED)
DUPLICATE_S = 2.0
"""Seconds within which two SIGINTs count as one: under a launcher a Ctrl-C arrives from the terminal and from torchrun."""


def stopping() -> tuple[signal.Signals, ...]:
    """Return the signals that are to stop a run in this process."""
    # Signals that have a handler, including those set in C (by faulthandler), which Python reports as SIG_DFL.
    caught = process_status("SigCgt", 16) or 0
    return (
        *ALWAYS,
        *(
            number
            for number in UNLESS_HANDLED
            if signal.getsignal(number) is signal.SIG_DFL and not caught >> (number - 1) & 1
        ),
    )


class MeasurementStopped(Exception):
    """A stop signal came during a measurement, on any rank; raised on all. A resumed run measures again."""


class SignalRecorder(ABC):
    """Context manager that records :data:`STOPPING` signals instead of ending the process.

    Outside the main thread, where Python allows no signal handlers, nothing is changed.

    Attributes:
        received: the first signal received, or None; a run reports it as the reason of its stop.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Python sets signal handlers in the main thread only, and raises elsewhere.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._record) for number in stopping()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        if number == signal.SIGINT:
            self.interrupt()

    @abstractmethod
    def interrupt(self) -> None:
        """Handle a SIGINT, the first one or a later one."""


class StopSignals(SignalRecorder):
    """Recorder of a rank's signals. A second SIGINT (Ctrl-C twice) raises KeyboardInterrupt, as by default in Python.

    Args:
        launched: a launcher may forward a SIGINT that the terminal has sent to this process, too; two at once count as one.
    """

    def __init__(self, *, launched: bool = False) -> None:
        super().__init__()
        self._duplicate_s = DUPLICATE_S if launched else 0.0
        self._interrupted_at: float | None = None

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt from the second SIGINT on."""
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
        elif now - self._interrupted_at >= self._duplicate_s:
            raise KeyboardInterrupt
