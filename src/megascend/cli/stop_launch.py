"""Ctrl-C, SIGTERM and the other signals that stop a run, for the process that has started the ranks of a run on this machine.

torch's launcher would signal its workers and kill them 30 seconds later, whatever they still write, and fail itself. It runs in
a thread here, where it leaves signals alone; the main thread passes them on and waits for what the workers return.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from megascend.app.stop_signals import STOPPING, stopping

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

EXIT_INTERRUPTED = 130
LOOK_S = 0.2
"""How often the main thread looks for workers that have not been told to stop yet."""


class StopLaunch:
    """Context manager that takes note of the signals that stop a run, for the workers.

    Attributes:
        received: the first signal that came, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._interrupted = False
        self._told: set[int] = set()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopLaunch:
        self._before = {number: signal.signal(number, self._take_note) for number in stopping()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_on(self) -> None:
        """Tell each worker once. Those that are still starting do not handle signals yet: they end."""
        # SIGTERM for SIGINT: from a terminal the workers have had that themselves, and would take another one for impatience.
        if self.received:
            new = workers() - self._told
            self._told |= new
            send(signal.SIGTERM if self.received is signal.SIGINT else self.received, new)

    def exit(self) -> None:
        """End as a process does that the signal has ended.

        Raises:
            KeyboardInterrupt: for SIGINT.
            SystemExit: for the others, 128 and their number: 143 for SIGTERM.
        """
        assert self.received is not None
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.received)

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._interrupted:
            send(signal.SIGKILL, workers())  # a rank that waits in a collective would not hear of anything less
            raise KeyboardInterrupt
        self._interrupted = self._interrupted or number == signal.SIGINT
        self.received = self.received or signal.Signals(number)


def in_a_thread(function: Callable[..., Any], *args: Any, stop: StopLaunch) -> Any:
    """The result of ``function(*args)``, called in a thread, while signals are passed on to this process's children.

    Raises:
        Exception: what the function raises.
        KeyboardInterrupt: SIGINT came twice; the children are gone.
    """
    with ThreadPoolExecutor(1, "megascend-launch") as pool:
        future = pool.submit(function, *args)
        while not wait([future], LOOK_S).done:
            stop.pass_on()
        return future.result()


def workers() -> set[int]:
    """Process ids of this process's children, without the one that cleans up after multiprocessing."""
    import psutil

    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if not any("resource_tracker" in part for part in child.cmdline()):
                found.add(child.pid)
    return found


def send(number: signal.Signals, pids: set[int]) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def ended_by_signal(failure: ChildFailedError) -> bool:
    """True if the worker that failed first was ended by a signal to stop, not by an error of its own."""
    code = failure.get_first_failure()[1].exitcode
    return code == EXIT_INTERRUPTED or -code in STOPPING
