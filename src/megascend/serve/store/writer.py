"""A thread that writes to the database what the event loop hands it, all that has come together as one transaction."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable, Sequence

from megascend.serve.errors import RequestRefusedError
from megascend.serve.store.database import Removal, StateDatabase, StoredRow

RETRY_S = 1.0
log = logging.getLogger("megascend.serve")


class StateWriter:
    """Writes in the order of :meth:`put`, from :meth:`start` on.

    Args:
        database: used by the thread alone once that runs.
        remove_saves: called in the thread with directories of saves that no row names any more.
        wait_s: how long a caller waits for the disk before it is refused.

    Attributes:
        problem: why nothing can be written at present.
    """

    def __init__(
        self, database: StateDatabase, remove_saves: Callable[[Sequence[str]], None], wait_s: float = 10.0
    ) -> None:
        self._database, self._remove_saves, self._wait_s = database, remove_saves, wait_s
        self._changed = threading.Condition()
        self._waiting: list[StoredRow | Removal] = []
        self._put = self._written = 0
        self._closed = False
        self.problem: Exception | None = None
        self._callers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._thread = threading.Thread(target=self._run_or_log, name="state", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def put(self, *changes: StoredRow | Removal) -> None:
        """Write changes soon, in one transaction."""
        with self._changed:
            self._waiting += changes
            self._put += len(changes)
            self._changed.notify()

    async def durable(self) -> None:
        """Return when all that was put is on the disk.

        Raises:
            RequestRefusedError: 503; it is not yet.
        """
        position, loop = self._put, asyncio.get_running_loop()
        end = loop.time() + self._wait_s
        while self._written < position:
            changed = asyncio.Event()
            with self._changed:
                if self._written >= position:
                    return
                self._callers.append((loop, changed))
            try:
                await asyncio.wait_for(changed.wait(), max(0.0, end - loop.time()))
            except (TimeoutError, asyncio.TimeoutError):
                reason = "the disk is slow" if self.problem is None else str(self.problem)
                raise RequestRefusedError(f"the server's state cannot be written: {reason}", 503) from None

    def close(self) -> None:
        """Write what is left, if that is possible, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(10)

    def _run_or_log(self) -> None:
        try:
            self._run()
        except Exception as error:  # nothing can be promised from here on
            log.exception("the thread that writes the state has ended")
            self.problem = RuntimeError(f"internal error ({type(error).__name__}); the server has to be started again")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                changes, self._waiting = self._waiting, []
            if not changes:
                return
            unneeded = self._write(changes)
            if unneeded is None:
                return
            with self._changed:
                self._written += len(changes)
                callers, self._callers = self._callers, []
            del changes  # the bodies are on the disk
            for loop, changed in callers:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(changed.set)
            self._remove_saves(unneeded)

    def _write(self, changes: Sequence[StoredRow | Removal]) -> list[str] | None:
        """Write, again and again while the disk refuses; None if it still did when this was closed."""
        while True:
            try:
                unneeded = self._database.write(changes)
            except sqlite3.OperationalError as error:
                if self.problem is None:
                    log.error("%s cannot be written (%s); requests wait until it can", self._database.path, error)
                self.problem = error
                with self._changed:
                    if self._changed.wait_for(lambda: self._closed, RETRY_S):
                        return None
            else:
                if self.problem is not None:
                    log.warning("%s can be written again", self._database.path)
                self.problem = None
                return unneeded
