"""A thread that appends to the journal what the event loop hands it, all that is there in one write, and keeps the file small."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megascend.serve.errors import RequestRefusedError
from megascend.serve.journal import Entry, Journal, Place
from megascend.serve.ledger import Ledger

LEAST_BYTES = 16 * 2**20
"""A journal smaller than this is not rewritten."""
FRAME_BYTES = 16 * 2**20
RETRY_S = 1.0
log = logging.getLogger("megascend.serve")


class JournalWriter:
    """Appends in the order of :meth:`put`.

    Args:
        journal: read already.
        ledger: what its entries add up to; this thread's from now on.
        gone: told which directories of saves are not needed any more; called in the thread.
        wait_s: how long a caller waits for the disk before it is refused.
    """

    def __init__(
        self, journal: Journal, ledger: Ledger, gone: Callable[[Sequence[str]], None], wait_s: float = 10.0
    ) -> None:
        self._journal, self._ledger, self._gone, self._wait_s = journal, ledger, gone, wait_s
        self._changed = threading.Condition()
        self._waiting: list[Entry] = []
        self._put = self._written = 0
        self._closed = False
        self._problem: OSError | None = None
        self._callers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._thread = threading.Thread(target=self._run_or_tell, name="journal", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> OSError | None:
        """Why nothing can be written now."""
        return self._problem

    def put(self, *entries: Entry) -> None:
        """Append entries, together or not at all, soon."""
        with self._changed:
            self._waiting += entries
            self._put += len(entries)
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
                why = "the disk is slow" if self._problem is None else (self._problem.strerror or str(self._problem))
                raise RequestRefusedError(f"the journal cannot be written: {why}", 503) from None

    def close(self) -> None:
        """Write what is left, if that is possible, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(10)
        self._journal.close()

    def _run_or_tell(self) -> None:
        try:
            self._run()
        except Exception as error:  # from here on nothing is promised any more
            log.exception("the journal's thread has ended")
            self._problem = OSError(0, f"internal error ({type(error).__name__}); the server has to be started again")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                entries, self._waiting = self._waiting, []
            if not entries:
                return
            places = self._append(entries)
            if places is None:
                return
            self._add(entries, places)
            with self._changed:
                self._written += len(entries)
                callers, self._callers = self._callers, []
            del entries, places  # whatever was in them is on the disk
            for loop, changed in callers:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(changed.set)
            self._rewrite_if_worth_it()

    def _append(self, entries: Sequence[Entry]) -> list[Place] | None:
        """Append, again and again while the disk refuses: where each is; None if it still did when this was closed."""
        while True:
            try:
                places = self._journal.append(entries)
            except OSError as error:
                if self._problem is None:
                    log.error("%s cannot be written (%s); requests wait until it can", self._journal.path, error)
                self._problem = error
                with self._changed:
                    if self._changed.wait_for(lambda: self._closed, RETRY_S):
                        return None
            else:
                if self._problem is not None:
                    log.warning("%s can be written again", self._journal.path)
                self._problem = None
                return places

    def _add(self, entries: Sequence[Entry], places: Sequence[Place]) -> None:
        gone = [name for entry, place in zip(entries, places, strict=True) for name in self._ledger.add(entry, place)]
        if gone:
            self._gone(gone)

    def _rewrite_if_worth_it(self) -> None:
        if self._journal.size > LEAST_BYTES and self._journal.size > 2 * self._ledger.bytes:
            try:
                rewrite(self._journal, self._ledger)
            except OSError as error:
                log.warning("%s could not be made smaller: %s", self._journal.path, error)


def rewrite(journal: Journal, ledger: Ledger) -> None:
    """Drop from a journal what no longer counts.

    Raises:
        OSError: it could not be written, and is as before.
    """
    live = list(ledger.live())

    def groups() -> Iterator[list[Entry]]:
        group, size = [], 0
        for kept in live:
            group.append(replace(kept.entry, body=journal.body(kept.place)))
            size += kept.place.size
            if size > FRAME_BYTES:
                yield group
                group, size = [], 0
        if group:
            yield group

    places = journal.rewrite(groups())
    fresh = Ledger()
    for kept, place in zip(live, places, strict=True):
        fresh.add(kept.entry, place)
    ledger.sessions, ledger.samplers = fresh.sessions, fresh.samplers
    ledger.sequences, ledger.models = fresh.sequences, fresh.models
