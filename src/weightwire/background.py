"""Background threads that never end silently. Imports no torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class BackgroundThread(threading.Thread):
    """Thread whose exception is logged with its traceback, or given to whoever waits for the work.

    Python's own threads print to standard error, where no log has it, and drop SystemExit without a word.

    Args:
        on_error: called on the thread with the exception, instead of the log: stores it where another thread raises it.
        daemon: the interpreter does not wait for the thread when it ends.
    """

    def __init__(
        self,
        work: Callable[..., object],
        *arguments: Any,
        name: str,
        on_error: Callable[[BaseException], object] | None = None,
        daemon: bool = True,
    ) -> None:
        super().__init__(name=name, daemon=daemon)
        self._work, self._arguments, self._on_error = work, arguments, on_error

    def run(self) -> None:
        try:
            self._work(*self._arguments)
        except BaseException as error:  # SystemExit, and the panics of extensions in Rust, are no Exception
            if self._on_error is None:
                log.exception("thread %s has ended", self.name)
            else:
                self._report(error, self._on_error)
        finally:
            # As in threading.Thread: the references would form a cycle with an object that keeps its thread.
            del self._work, self._arguments, self._on_error

    def _report(self, error: BaseException, on_error: Callable[[BaseException], object]) -> None:
        try:
            on_error(error)
        except BaseException:
            log.exception("thread %s has ended, and its error could not be reported", self.name)


class Guard:
    """Context for one round of a thread that must go on: an exception is logged with its traceback, a repeated one once.

    Args:
        label: what has failed, for the log.
        passes: exceptions that end the thread all the same.
    """

    def __init__(self, label: str, passes: type[Exception] | tuple[type[Exception], ...] = ()) -> None:
        self._label, self._passes = label, passes
        self._logged: set[str] = set()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, self._passes):
            return False
        text = f"{type(error).__name__}: {error}"
        if text not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(text)
            log.error("%s has failed and goes on: %s", self._label, text, exc_info=error)
        return True


MAX_LOGGED = 10
"""Different errors of a guarded thread that are logged; texts may hold numbers that change with each round."""
