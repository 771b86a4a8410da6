"""Stopping a run from outside: the step is finished and a checkpoint saved first."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGINT)
SAME_S = 2.0
"""Under a launcher one Ctrl-C arrives twice, from the terminal and from torchrun, within so many seconds."""


class StopSignals:
    """Context manager that takes note of SIGTERM and SIGINT instead of ending the process.

    A second SIGINT (Ctrl-C twice) interrupts at once, as Python does by itself. Outside the main thread, where Python lets nobody
    handle signals, nothing is changed.

    Args:
        launched: a launcher may pass a SIGINT on that has come from the terminal already; two at once count as one.

    Attributes:
        received: the first signal that came, or None.
    """

    def __init__(self, *, launched: bool = False) -> None:
        self.received: signal.Signals | None = None
        self._apart_s = SAME_S if launched else 0.0
        self._interrupted_at: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take_note) for number in STOPPING}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is None:
                self._interrupted_at = now
            elif now - self._interrupted_at >= self._apart_s:
                raise KeyboardInterrupt
