"""Hang monitor: publish this rank's current phase, so that an error can name the ranks that blocked a collective.

A failed tensor collective raises an error of gloo, NCCL or HCCL that names no rank. Every rank therefore marks its phases
(:meth:`HangMonitor.phase`) and publishes them from a thread (:mod:`megascend.runtime.diagnostics.heartbeat`). When a collective
fails, the ranks' records show which rank is gone, has failed, is late or has gone ahead
(:mod:`megascend.runtime.diagnostics.diagnosis`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megascend.errors import CollectiveTimeoutError, PeerLostError, ProcessGroupError
from megascend.runtime.diagnostics.collective_sequence import CollectiveCounts, CollectiveSequence
from megascend.runtime.diagnostics.diagnosis import (
    LOST,
    Diagnosis,
    PeerStatus,
    PeerVerdict,
    PhaseFailure,
    RankRecord,
    diagnose,
    not_arrived,
    phase_text,
    shorten,
    store_lost,
)
from megascend.runtime.diagnostics.heartbeat import HeartbeatThread
from megascend.runtime.diagnostics.upstream_errors import is_secondary, library_of, members_of
from megascend.runtime.diagnostics.watchdog import PhaseStack, Watchdog
from weightwire.liveness import Identity

if TYPE_CHECKING:
    from torch.distributed import Store

    from megascend.runtime.diagnostics.faults import ArmedFaults

logger = logging.getLogger(__name__)

PUBLISH_S = 1.0
"""Maximum number of seconds to wait until a failure is published."""
PUBLICATION = "_megascend_publication"
"""The attribute by which a published exception carries its :class:`Publication`."""


@dataclass(frozen=True, eq=False)
class Publication:
    """Mark of a published exception, stored as an attribute of the exception.

    An exception cannot be identified by its address, which Python reuses, and a reference to it would keep the objects of
    its frames alive, such as tensors in device memory.

    Attributes:
        stack: phases of the thread that published it.
        generation: generation of the stack when the exception was recorded. Phases entered later publish it again: for
            them it was raised again.
        failure: the published record.
    """

    stack: PhaseStack[Phase]
    generation: int
    failure: PhaseFailure

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None: the process that receives a copy of the exception has not published it."""
        return type(None), ()


class Phase:
    """A named activity of a thread: a context manager.

    Attributes:
        name: identifier.
        label: name used in messages.
        since: time of entry (``time.monotonic``).
        entered: generation of its thread's stack at entry.
    """

    # Phases are created in every micro batch.
    __slots__ = ("_monitor", "entered", "label", "name", "since")

    def __init__(self, monitor: HangMonitor, name: str, label: str) -> None:
        self._monitor, self.name, self.label = monitor, name, label
        self.since, self.entered = 0.0, 0

    def __enter__(self) -> None:
        self._monitor.enter(self, skippable=False)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._monitor.leave(self, error)


class HangMonitor:
    """Publisher of this rank's current phase and step; turns communication errors into errors that name the culprit.

    In a world of one, or after :meth:`close`, phases cost the same and nothing is published.

    The phases of the thread that created the monitor are this rank's position; phases of other threads (a checkpoint
    written in the background) are tracked separately.

    Args:
        timeout_s: timeout of collectives, in seconds.
        store: a connection to the store that no other code uses; None: publish nothing.
        attempt: number of restarts of the run by the launcher.
        waits_on_host: collectives block the calling thread (Gloo), rather than the device.

    Attributes:
        step: number of the current optimizer step, from 1.
        sequence: the object collectives that this rank enters.
        on_fatal: called with the error, on the monitor's thread, before it ends the process.
        on_phase: called with the name of every phase that the main thread enters.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_s: float,
        store: Store | None = None,
        attempt: int = 0,
        waits_on_host: bool = True,
    ) -> None:
        self.step = 1
        self.sequence = CollectiveSequence()
        self.on_fatal: Callable[[BaseException], None] | None = None
        self.on_phase: Callable[[str], None] | None = None
        self._rank, self._waits_on_host = rank, waits_on_host
        self._process = Identity.current()
        # One table for all threads: it counts how often the rank entered a phase, on whichever thread.
        self._counts: dict[str, int] = {}
        self._main = PhaseStack[Phase](threading.get_ident(), since=time.monotonic())
        self._background: dict[int, PhaseStack[Phase]] = {}
        self._watchdog = Watchdog(
            rank, self._main, lambda: self._describe(self._main, 0), self._report_fatal, timeout_s
        )
        self._failure: PhaseFailure | None = None
        self._published: Publication | None = None  # of the failure
        self._explaining = self._ended = False
        self._faults = _armed_faults(rank, attempt)
        self._heartbeat: HeartbeatThread | None = None
        if store is not None and world_size > 1:
            record = functools.partial(self._describe, self._main)
            self._heartbeat = HeartbeatThread(store, rank, world_size, record, self._moved, self._check_heartbeat)
            # A daemon thread that is inside the store during interpreter shutdown would crash the process.
            atexit.register(self._at_exit)

    # --- marking ---

    def phase(self, name: str, label: str = "") -> Phase:
        """Mark the current activity of this thread within the context; nestable, the innermost phase counts.

        An error of a communication library that leaves the block is replaced by a megascend error that names the culprit.
        Every other exception passes unchanged. Both are published for the other ranks.

        Args:
            label: name used in messages; default: ``name``.

        Raises:
            PeerLostError: from the block: a rank is gone or has failed.
            CollectiveTimeoutError: from the block: a rank is late, or has gone ahead.
            ProcessGroupError: from the block: communication failed although every rank is present.
        """
        return Phase(self, name, label or name)

    @property
    def outer_label(self) -> str:
        """Return the label of the outermost phase that this thread is in; empty between phases."""
        phases = self._stack().phases
        return phases[0].label if phases else ""

    @property
    def alive(self) -> bool:
        """Check whether this rank's phase is published, or need not be: in a world of one."""
        return self._heartbeat is None or self._heartbeat.alive

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run ``function`` in a phase; only for functions that return nothing, because fault injection can skip the phase."""
        phase = Phase(self, name, name)
        skip = self.enter(phase, skippable=True)
        try:
            if not skip:
                function(*args, **kwargs)
        except BaseException as error:
            self.leave(phase, error)
            raise
        self.leave(phase, None)

    def close(self) -> None:
        """Publish that this rank leaves, and stop publishing. Idempotent."""
        if self._faults is not None and self._faults.waiting:
            logger.warning("rank %d: armed, but never fired: %s", self._rank, self._faults)
            self._faults = None
        heartbeat, self._heartbeat = self._heartbeat, None
        # A forked child inherits the monitor, but not its thread, and must not end the parent's record.
        if heartbeat is not None and os.getpid() == self._process.pid:
            self._ended = True
            atexit.unregister(self._at_exit)
            heartbeat.close()

    def enter(self, phase: Phase, *, skippable: bool) -> bool:
        """Enter ``phase`` on this thread; return True if fault injection skips its body."""
        stack = self._stack()
        if self.on_phase is not None and stack is self._main:
            self.on_phase(phase.name)
        if not stack.phases:
            self._counts[phase.name] = self._counts.get(phase.name, 0) + 1
            if stack is self._main:
                self._failure = None  # a new outermost phase: the program handled the failure and continues
        phase.since = stack.since = time.monotonic()
        stack.phases.append(phase)
        # At entry as well as at exit, so that Publication can tell an error published inside this phase from an older one.
        stack.generation += 1
        phase.entered = stack.generation
        if self._faults is None:
            return False
        try:
            return self._faults.fire(
                phase.name, self.step, skippable=skippable, publish=self._publish, quiet=self._store_lock
            )
        except BaseException as error:
            self.leave(phase, error)
            raise

    def leave(self, phase: Phase, error: BaseException | None) -> None:
        """Leave ``phase`` on this thread; see :meth:`phase`."""
        stack = self._stack()
        try:
            if error is None:
                # The phase completes without an error, so that a failure published inside it was handled.
                if self._published is not None and _is_inside(self._published, phase, stack):
                    self._published = self._failure = None
            elif not self._is_published(error, phase, stack):
                self._failed(phase, stack, error)
        finally:
            stack.phases.pop()
            stack.last, stack.since = phase.label, time.monotonic()
            stack.generation += 1
            # Thread identifiers are reused, so a finished background phase must not leave a stack behind.
            if stack is not self._main and not stack.phases:
                del self._background[stack.thread]

    def _stack(self) -> PhaseStack[Phase]:
        thread = threading.get_ident()
        if thread == self._main.thread:
            return self._main
        return self._background.setdefault(thread, PhaseStack(thread))

    # --- errors ---

    def _is_published(self, error: BaseException, phase: Phase, stack: PhaseStack[Phase]) -> bool:
        """Check whether a phase inside ``phase`` has published ``error``; if so, make it the current failure again."""
        publication = vars(error).get(PUBLICATION)
        if not isinstance(publication, Publication) or not _is_inside(publication, phase, stack):
            return False
        if self._failure is not publication.failure:  # another error was raised, and handled, on the way out
            self._published, self._failure = publication, publication.failure
            self._publish()
        return True

    def _failed(self, phase: Phase, stack: PhaseStack[Phase], error: BaseException) -> None:
        """Publish ``error``, which leaves ``phase``; replace a communication error by one that names the culprit."""
        if self._heartbeat is None or os.getpid() != self._process.pid:  # a forked child has no heartbeat thread
            return
        if library_of(error) is None:
            self._publish_failure(phase, error)
            return
        seconds = time.monotonic() - phase.since
        headline = f"rank {self._rank}: {phase_text(phase.label, self.step)} failed after {seconds:.1f} s"
        # Raised from __exit__, it replaces the error that is leaving the phase.
        raise self.explain(error, headline) from error

    def explain(
        self, error: BaseException, headline: str, suspects: Iterable[int] | None = None
    ) -> CollectiveTimeoutError | ProcessGroupError:
        """Return the error (see :meth:`phase`) to raise in place of ``error``, which another rank caused. Call inside the phase.

        Args:
            headline: the beginning of its message.
            suspects: ranks known not to have joined; default: derived from the published records.
        """
        return self._explain(error, lambda _: headline, lambda _: list(suspects or ()))

    def explain_collective(
        self,
        error: BaseException,
        channel: str,
        number: int,
        ranks: Sequence[int],
        headline: Callable[[list[int]], str],
    ) -> CollectiveTimeoutError | ProcessGroupError:
        """Explain, as :meth:`explain` does, why an object collective failed on this rank.

        Args:
            channel, number: position in the collective sequence.
            ranks: participants of the collective.
            headline: builds the beginning of the message from the ranks that have not entered the collective, as far as known.
        """
        participants = set(ranks)

        def missing(peers: Mapping[int, PeerStatus | None]) -> list[int]:
            return not_arrived(channel, number, {rank: peers[rank] for rank in peers if rank in participants})

        return self._explain(error, headline, missing)

    def _explain(
        self,
        error: BaseException,
        headline: Callable[[list[int]], str],
        suspected: Callable[[Mapping[int, PeerStatus | None]], list[int]],
    ) -> CollectiveTimeoutError | ProcessGroupError:
        stack = self._stack()
        phase = stack.phases[-1]
        # Not marked as published: if a caller raises the original error again, it has to be explained again.
        # Secondary, whatever its class: Gloo's wait for part of the timeout raises a plain RuntimeError.
        self._publish_failure(phase, error, mark=False, secondary=True)
        # After the failure is published: peers that fail at the same moment read each other's.
        peers = self._poll_peers()
        suspects = suspected(peers or {})
        diagnosis = self._diagnose(stack, peers, suspects)
        parts = [headline(suspects)]
        if diagnosis.kind is PeerVerdict.FINE:
            parts.append("No rank is missing, and none has failed")
        elif diagnosis.reasons:
            reasons = "; ".join(diagnosis.reasons)
            parts.append(reasons[0].upper() + reasons[1:])
        library = library_of(error)
        parts += [
            text for text in (diagnosis.positions, f"{library}: {shorten(str(error))}" if library else "") if text
        ]
        # With every rank present and none failed, it is a problem of the network or the library, not of a rank.
        kind = ProcessGroupError if diagnosis.kind is PeerVerdict.FINE else CollectiveTimeoutError
        explanation = (PeerLostError if diagnosis.kind in LOST else kind)(". ".join(parts))
        self._publish_failure(phase, explanation)
        return explanation

    def _poll_peers(self) -> dict[int, PeerStatus | None] | None:
        """Return the peers' current statuses; None if nothing is published or the store does not answer."""
        if self._heartbeat is None:
            return None
        self._explaining = True
        try:
            return self._heartbeat.poll_until_certain()
        finally:
            self._explaining = False

    def _diagnose(
        self, stack: PhaseStack[Phase], peers: Mapping[int, PeerStatus | None] | None, suspects: Sequence[int]
    ) -> Diagnosis:
        blamed = tuple(suspects)
        if self._heartbeat is None:
            return Diagnosis(PeerVerdict.LATE if blamed else PeerVerdict.FINE, blamed, (), "")
        if peers is None:
            return store_lost(self._heartbeat.store_address, blamed)
        local = self._describe(stack, 0, waiting=self._waits_on_host)
        return diagnose(self._rank, local, peers, blamed or None)

    def collective_counts(self, ranks: Sequence[int]) -> dict[int, CollectiveCounts]:
        """Return the collectives that ``ranks`` have entered, from their latest published records."""
        heartbeat = self._heartbeat
        # This rank's own counts come from memory: the published record may be a tick behind.
        peers = [rank for rank in ranks if rank != self._rank]
        records = heartbeat.read(peers) if heartbeat is not None and peers else None
        counts = {rank: record.collectives for rank, record in (records or {}).items() if record is not None}
        return {rank: counts.get(rank, CollectiveCounts()) for rank in peers} | (
            {self._rank: self.sequence.counts} if self._rank in ranks else {}
        )

    def departed(self, channel: str, number: int, ranks: Sequence[int]) -> list[int]:
        """Return the ``ranks`` that left their process groups without entering collective ``number`` of ``channel``."""
        heartbeat = self._heartbeat
        peers = [rank for rank in ranks if rank != self._rank]
        records = heartbeat.read(peers) if heartbeat is not None else None
        return [
            rank
            for rank, record in (records or {}).items()
            if record is not None and record.ended and record.collectives.of(channel) < number
        ]

    def _publish_failure(
        self, phase: Phase, error: BaseException, *, mark: bool = True, secondary: bool = False
    ) -> None:
        stack = self._stack()
        self._failure = PhaseFailure(
            phase_text(phase.label, self.step),
            stack.phases[0].name,
            _summarize(error),
            secondary or is_secondary(error),
        )
        self._published = Publication(stack, stack.generation, self._failure)
        if mark:  # not by setattr: the exception's class may have a __setattr__ that refuses
            BaseException.__setattr__(error, PUBLICATION, self._published)
        self._publish()

    def _publish(self) -> None:
        if self._heartbeat is not None and os.getpid() == self._process.pid:
            self._heartbeat.flush(PUBLISH_S)

    def _store_lock(self) -> AbstractContextManager[object]:
        """Return a lock that keeps this monitor's threads out of the store."""
        return contextlib.nullcontext() if self._heartbeat is None else self._heartbeat.store_lock

    # --- records that the thread publishes ---

    def _moved(self) -> object:
        return self._main.generation, len(self._background), self._failure, self.step, self.sequence.counts

    def _describe(self, stack: PhaseStack[Phase], heartbeat: int, waiting: bool | None = None) -> RankRecord:
        # A copy: the main thread may enter or leave a phase while the heartbeat's thread is here.
        phases = list(stack.phases)
        opened = [other.phases[0].name for other in (self._main, *list(self._background.values())) if other.phases]
        seconds = time.monotonic() - stack.since
        frame, waits = "", False
        if phases and seconds >= min(2.0, self._watchdog.check_after_s / 2):
            # Not in short phases, which are most of them: reading another thread's frames costs time.
            frame, waits = stack.line()
        return RankRecord(
            heartbeat=heartbeat,
            step=self.step,
            label=phases[-1].label if phases else stack.last,
            inside=bool(phases),
            seconds=round(seconds, 1),
            outer=phases[0].name if phases else "",
            counts=dict(self._counts),
            collectives=self.sequence.counts,
            open=opened,
            frame=frame,
            waiting=waits if waiting is None else waiting,
            clock=round(time.time(), 1),
            failure=self._failure,
            ended=self._ended,
            process=self._process,
        )

    def _check_heartbeat(self, heartbeat: HeartbeatThread) -> None:
        """Check the main thread, at every tick of the heartbeat's thread."""
        if not self._explaining:
            self._watchdog.check(heartbeat)

    def _report_fatal(self, error: BaseException) -> None:
        if self.on_fatal is not None:
            self.on_fatal(error)

    def _at_exit(self) -> None:
        """Publish an exception raised outside of every phase that ends the interpreter."""
        # Set by the interpreter when it prints an uncaught exception, which it does before the exit handlers run.
        error = getattr(sys, "last_value", None)
        if error is not None and self._failure is None and os.getpid() == self._process.pid:
            last = phase_text(self._main.last, self.step)
            self._failure = PhaseFailure(f"the code after {last}", "", _summarize(error), False)
        self.close()


def _is_inside(publication: Publication, phase: Phase, stack: PhaseStack[Phase]) -> bool:
    """Check whether the thread of ``stack`` published it after it had entered ``phase``."""
    return publication.stack is stack and phase.entered <= publication.generation


def _summarize(error: BaseException) -> str:
    """Return an exception's class and text in one line; for an exception group, also those of its members."""
    text = f"{type(error).__name__}: {shorten(str(error))}"
    members = members_of(error)
    return shorten(f"{text}: {'; '.join(map(_summarize, members))}") if members else text


def _armed_faults(rank: int, attempt: int) -> ArmedFaults | None:
    """Return the faults to inject, for tests; no other code reads them from the environment."""
    text = os.environ.get("MEGASCEND_FAULTS")
    if not text:
        return None
    from megascend.runtime.diagnostics import faults

    armed = faults.ArmedFaults.from_text(text, rank, attempt)
    if armed is not None:
        logger.warning("rank %d: FAULTS ARE ARMED (MEGASCEND_FAULTS): %s", rank, armed)
    return armed
