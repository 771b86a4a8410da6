"""What this rank does now, told to the others, so that an error can name who kept a collective from ending.

Tensor collectives fail with an error of gloo, NCCL or HCCL that names nobody. Every rank therefore marks what it does
(:meth:`HangMonitor.phase`) and publishes it from a thread (:mod:`megascend.diagnostics.heartbeat`); when a collective fails, the
ranks' records tell who is gone, has failed, is late or has gone ahead (:mod:`megascend.diagnostics.diagnosis`).
"""

from __future__ import annotations

import atexit
import contextlib
import linecache
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from megascend.diagnostics.collective_sequence import CollectiveCounts, CollectiveSequence
from megascend.diagnostics.diagnosis import (
    LOST,
    SILENT_S,
    Diagnosis,
    Failure,
    Kind,
    PeerStatus,
    Record,
    diagnose,
    not_arrived,
    of_step,
    shorten,
)
from megascend.diagnostics.heartbeat import Heartbeat
from megascend.diagnostics.processes import Process
from megascend.diagnostics.upstream_errors import is_secondary, library_of
from megascend.errors import CollectiveTimeoutError, PeerLostError, ProcessGroupError

if TYPE_CHECKING:
    from torch.distributed import Store

    from megascend.diagnostics.faults import Armed

T = TypeVar("T")

EXIT_PEER_LOST = 76
"""Exit code of a rank that was stuck in a phase because another rank is gone or has failed."""
GRACE_S = 3.0
"""How much longer than its timeout a phase may take before the monitor speaks up: Gloo's own errors come first."""
ANSWER_S = 2.5 * SILENT_S
"""How long an error waits for the store, in seconds."""
PUBLISH_S = 1.0
"""How long a failure waits to be published, in seconds."""


class Phase:
    """What a thread does for a while: a context manager that :meth:`HangMonitor.phase` makes."""

    __slots__ = ("_monitor", "label", "name", "since")

    def __init__(self, monitor: HangMonitor, name: str, label: str) -> None:
        self._monitor, self.name, self.label = monitor, name, label
        self.since = 0.0

    def __enter__(self) -> None:
        self._monitor._enter(self, skippable=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._monitor._leave(self, error)


@dataclass
class _PhaseStack:
    """Where one thread is. ``generation`` counts entries and exits: it differs whenever the thread has moved on."""

    thread: int
    phases: list[Phase] = field(default_factory=list)
    generation: int = 0
    since: float = 0.0
    last: str = "start-up"


class HangMonitor:
    """The present phase and step of this rank, published for its peers, and errors that name the culprit.

    In a world of one, or after :meth:`close`, phases cost the same and nothing is published.

    The thread that made the monitor is the one whose phases are this rank's position; phases of other threads (a checkpoint
    written in the background) are told apart from it.

    Args:
        timeout_s: of collectives, in seconds.
        store: a connection to the store that nobody else uses; None: publish nothing.
        attempt: how often the launcher has restarted the run.
        waits_on_host: collectives make the calling thread wait (Gloo), rather than the device.

    Attributes:
        step: number of the optimizer step being worked on, from 1.
        sequence: the object collectives that this rank enters.
        last_words: called with the error, on the monitor's thread, before it ends the process.

    Raises:
        ConfigError: ``MEGASCEND_FAULTS`` is set and cannot be read.
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
        self.last_words: Callable[[BaseException], None] | None = None
        self._rank, self._timeout_s, self._waits_on_host = rank, timeout_s, waits_on_host
        self._attend_after = min(5.0, 0.5 * timeout_s)
        self._process = Process.own()
        self._counts: dict[str, int] = {}
        self._main = _PhaseStack(threading.get_ident(), since=time.monotonic())
        self._background: dict[int, _PhaseStack] = {}
        self._failure: Failure | None = None
        self._told: BaseException | None = None
        self._explaining = self._ended = False
        self._spoken = self._noticed_in = -1
        self._noticed_at = self._attended = 0.0
        self._faults = _armed_faults(rank, attempt)
        self._heartbeat: Heartbeat | None = None
        if store is not None and world_size > 1:
            self._heartbeat = Heartbeat(store, rank, world_size, self._record, self._moved, self._attend)
            # A daemon thread that is inside the store when the interpreter goes would take the process down with it.
            atexit.register(self._at_exit)

    # --- marking ---

    def phase(self, name: str, label: str = "") -> Phase:
        """Mark what this thread does until the ``with`` block ends; nestable, the innermost counts.

        On an error of a communication library that leaves the block, the error becomes one of ours, which names the
        culprit. Every other exception passes unchanged. Either is published for the other ranks.

        Args:
            label: what messages call it; default: its name.

        Raises:
            PeerLostError: from the block: a rank is gone or has failed.
            CollectiveTimeoutError: from the block: a rank has not come, or has gone ahead.
            ProcessGroupError: from the block: communication failed although every rank is there.
        """
        return Phase(self, name, label or name)

    @property
    def place(self) -> str:
        """The outermost phase that this thread is in; empty between phases."""
        phases = self._stack().phases
        return phases[0].label if phases else ""

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run ``function`` in a phase; for functions that return nothing, whose phase fault injection can skip."""
        phase = Phase(self, name, name)
        skip = self._enter(phase, skippable=True)
        try:
            if not skip:
                function(*args, **kwargs)
        except BaseException as error:
            self._leave(phase, error)
            raise
        self._leave(phase, None)

    def close(self) -> None:
        """Tell the others that this rank leaves, and publish nothing more. Harmless to repeat."""
        if self._faults is not None and self._faults.waiting:
            _say(f"rank {self._rank}: armed, but never fired: {self._faults}")
            self._faults = None
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None and os.getpid() == self._process.number:
            self._ended = True
            atexit.unregister(self._at_exit)
            heartbeat.close()

    def _enter(self, phase: Phase, skippable: bool) -> bool:
        """Enter ``phase``; True if fault injection skips its body."""
        stack = self._stack()
        if not stack.phases:
            self._counts[phase.name] = self._counts.get(phase.name, 0) + 1
            if stack is self._main:
                self._failure = None  # whatever it was, this rank has gone on
        phase.since = stack.since = time.monotonic()
        stack.phases.append(phase)
        stack.generation += 1
        if self._faults is None:
            return False
        try:
            return self._faults.fire(
                phase.name, self.step, skippable=skippable, publish=self._publish, quiet=self._store_lock
            )
        except BaseException as error:
            self._leave(phase, error)
            raise

    def _leave(self, phase: Phase, error: BaseException | None) -> None:
        stack = self._stack()
        try:
            if error is not None and error is not self._told:
                self._failed(phase, stack, error)
        finally:
            stack.phases.pop()
            stack.last, stack.since = phase.label, time.monotonic()
            stack.generation += 1
            if stack is not self._main and not stack.phases:
                del self._background[stack.thread]

    def _stack(self) -> _PhaseStack:
        thread = threading.get_ident()
        if thread == self._main.thread:
            return self._main
        return self._background.setdefault(thread, _PhaseStack(thread))

    # --- errors ---

    def _failed(self, phase: Phase, stack: _PhaseStack, error: BaseException) -> None:
        """Publish ``error``, which leaves ``phase``; raise in its place what names the culprit, if another rank is."""
        if self._heartbeat is None or os.getpid() != self._process.number:  # a forked child has no thread
            return
        if library_of(error) is None:
            self._publish_failure(phase, error)
            return
        raise self.explain(error, self._headline(phase)) from error

    def explain(
        self, error: BaseException, headline: str, suspects: Iterable[int] | None = None
    ) -> CollectiveTimeoutError | ProcessGroupError:
        """The error to raise in place of ``error``, which another rank has caused. Called inside the phase.

        Args:
            headline: the beginning of its message.
            suspects: ranks known not to have come; default: told from what the ranks have published.

        Returns:
            A PeerLostError, CollectiveTimeoutError or ProcessGroupError; see :meth:`phase`.
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
        """As :meth:`explain`, for an object collective that has failed on this rank.

        Args:
            channel, number: its place in the collective sequence.
            ranks: those that it is of.
            headline: makes the beginning of the message from the ranks that have not entered it; none if nothing is known.
        """
        others = set(ranks)
        return self._explain(
            error,
            headline,
            lambda peers: not_arrived(channel, number, {rank: seen for rank, seen in peers.items() if rank in others}),
        )

    def _explain(
        self,
        error: BaseException,
        headline: Callable[[list[int]], str],
        suspected: Callable[[Mapping[int, PeerStatus | None]], list[int]],
    ) -> CollectiveTimeoutError | ProcessGroupError:
        stack = self._stack()
        phase = stack.phases[-1]
        self._publish_failure(phase, error)
        peers = self._poll_peers()
        suspects = suspected(peers or {})
        found = self._diagnose(stack, peers, suspects)
        parts = [headline(suspects)]
        if found.kind is Kind.FINE:
            parts.append("No rank is missing, and none has failed")
        elif found.reasons:
            reasons = "; ".join(found.reasons)
            parts.append(reasons[0].upper() + reasons[1:])
        library = library_of(error)
        parts += [text for text in (found.positions, f"{library}: {shorten(str(error))}" if library else "") if text]
        kind = ProcessGroupError if found.kind is Kind.FINE else CollectiveTimeoutError
        explained = (PeerLostError if found.kind in LOST else kind)(". ".join(parts))
        self._publish_failure(phase, explained)
        return explained

    def _headline(self, phase: Phase) -> str:
        seconds = time.monotonic() - phase.since
        return f"rank {self._rank}: {of_step(phase.label, self.step)} failed after {seconds:.1f} s"

    def _poll_peers(self) -> dict[int, PeerStatus | None] | None:
        """The peers as they are now; None if nothing can be found out."""
        if self._heartbeat is None:
            return None
        self._explaining = True
        try:
            return self._heartbeat.poll_until_certain(ANSWER_S)
        finally:
            self._explaining = False

    def _diagnose(
        self, stack: _PhaseStack, peers: Mapping[int, PeerStatus | None] | None, suspects: Sequence[int]
    ) -> Diagnosis:
        blamed = tuple(suspects)
        if self._heartbeat is None:
            return Diagnosis(Kind.LATE if blamed else Kind.FINE, blamed, (), "")
        if peers is None:
            reason = "the store in which ranks tell what they do does not answer; whoever serves it is gone"
            return Diagnosis(Kind.GONE, blamed, (reason,), "What the ranks do is unknown")
        mine = self._describe(stack, 0, waiting=self._waits_on_host)
        return diagnose(self._rank, mine, peers, blamed or None)

    def collective_counts(self, ranks: Sequence[int]) -> dict[int, CollectiveCounts]:
        """Which collectives ``ranks`` have entered, as far as they have published it: within a moment."""
        heartbeat = self._heartbeat
        others = [rank for rank in ranks if rank != self._rank]
        records = heartbeat.read(others, ANSWER_S) if heartbeat is not None and others else None
        found = {rank: record.collectives for rank, record in (records or {}).items() if record is not None}
        return {rank: found.get(rank, CollectiveCounts()) for rank in others} | (
            {self._rank: self.sequence.counts} if self._rank in ranks else {}
        )

    def _publish_failure(self, phase: Phase, error: BaseException) -> None:
        text = f"{type(error).__name__}: {shorten(str(error))}"
        outer = self._stack().phases[0].name
        self._failure = Failure(of_step(phase.label, self.step), outer, text, is_secondary(error))
        self._told = error
        self._publish()

    def _publish(self) -> None:
        if self._heartbeat is not None and os.getpid() == self._process.number:
            self._heartbeat.flush(PUBLISH_S)

    def _store_lock(self) -> AbstractContextManager[object]:
        """Held, no thread of this monitor is inside the store."""
        return contextlib.nullcontext() if self._heartbeat is None else self._heartbeat.io

    # --- what the thread publishes ---

    def _moved(self) -> object:
        return self._main.generation, len(self._background), self._failure, self.step, self.sequence.counts

    def _record(self, heartbeat: int) -> Record:
        return self._describe(self._main, heartbeat)

    def _describe(self, stack: _PhaseStack, heartbeat: int, waiting: bool | None = None) -> Record:
        phases = list(stack.phases)
        opened = [other.phases[0].name for other in (self._main, *list(self._background.values())) if other.phases]
        seconds = time.monotonic() - stack.since
        frame, waits = "", False
        if phases and seconds >= min(2.0, self._attend_after / 2):
            frame, waits = _where(sys._current_frames().get(stack.thread))
        return Record(
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

    # --- deadlines ---

    def _attend(self, heartbeat: Heartbeat) -> None:
        """Speak up, and at last end the process, if the main thread is stuck because of another rank. On the thread."""
        stack, generation, now = self._main, self._main.generation, time.monotonic()
        seconds = now - stack.since
        if (
            not stack.phases
            or self._explaining
            or seconds < self._attend_after
            or now - self._attended < heartbeat.poll_s
        ):
            return
        self._attended = now
        found = diagnose(self._rank, self._describe(stack, 0), heartbeat.poll())
        if found.kind not in LOST:
            self._noticed_in = -1
        elif self._noticed_in != generation:
            self._noticed_in, self._noticed_at = generation, now
        if generation != stack.generation:
            return
        if seconds > self._timeout_s + GRACE_S and self._spoken != generation:
            self._spoken = generation
            _say(self._stuck(found, seconds))
        if self._noticed_in == generation and now - self._noticed_at > self._timeout_s + GRACE_S:
            self._give_up(found, seconds, heartbeat)

    def _stuck(self, found: Diagnosis, seconds: float) -> str:
        place = of_step(self._main.phases[-1].label, self.step) if self._main.phases else "?"
        reasons = "; ".join(found.reasons) or "no rank is gone, has failed or is in another phase"
        taken = f"has taken {seconds:.0f} s (timeout_s is {self._timeout_s:g})"
        return f"rank {self._rank}: {place} {taken}: {reasons}. {found.positions}"

    def _give_up(self, found: Diagnosis, seconds: float, heartbeat: Heartbeat) -> None:
        message = self._stuck(found, seconds)
        _say(f"{message}. Nothing will come of waiting: ending this process with code {EXIT_PEER_LOST}")
        frame = sys._current_frames().get(self._main.thread)
        error = PeerLostError(message)
        if self.last_words is not None:
            self.last_words(error)
        _write_error_file(error, "".join(traceback.format_stack(frame)) if frame else "")
        os._exit(EXIT_PEER_LOST)

    def _at_exit(self) -> None:
        """The interpreter is going, perhaps because of an exception outside of every phase."""
        error = getattr(sys, "last_value", None)
        if error is not None and self._failure is None and os.getpid() == self._process.number:
            place = of_step(self._main.last, self.step)
            self._failure = Failure(
                f"what follows {place}", "", f"{type(error).__name__}: {shorten(str(error))}", False
            )
        self.close()


def _where(frame: FrameType | None) -> tuple[str, bool]:
    """A thread's innermost Python frame, and whether it waits for other ranks there."""
    if frame is None:
        return "", False
    code = frame.f_code
    text = f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
    outer: FrameType | None = frame
    for _ in range(6):
        if outer is None:
            break
        if "/torch/distributed/" in outer.f_code.co_filename:
            return text, True
        outer = outer.f_back
    # Megatron waits for the handles of asynchronous collectives itself.
    return text, ".wait(" in linecache.getline(code.co_filename, frame.f_lineno)


def _say(line: str) -> None:
    print(f"megascend: {line}", file=sys.stderr, flush=True)


def _write_error_file(error: BaseException, stack: str) -> None:
    """Leave the error where torchrun looks for it (``TORCHELASTIC_ERROR_FILE``), with the stack of the thread that was stuck."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise error from RuntimeError(f"the main thread was here:\n{stack}")
    except type(error):
        try:
            get_error_handler().record_exception(error)
        except OSError as problem:
            _say(f"torchrun's error file cannot be written: {problem}")


def _armed_faults(rank: int, attempt: int) -> Armed | None:
    """Faults to inject, for tests: the one place that looks for them."""
    text = os.environ.get("MEGASCEND_FAULTS")
    if not text:
        return None
    from megascend.diagnostics import faults

    armed = faults.Armed.from_text(text, rank, attempt)
    if armed is not None:
        _say(f"rank {rank}: FAULTS ARE ARMED (MEGASCEND_FAULTS): {armed}")
    return armed
