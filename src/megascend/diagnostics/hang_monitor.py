"""What this rank does now, told to the others, so that an error can name who kept a collective from ending.

Tensor collectives fail with an error of gloo, NCCL or HCCL that names nobody. Every rank therefore marks what it does
(:meth:`HangMonitor.phase`) and publishes it from a thread (:mod:`megascend.diagnostics.heartbeat`); when a collective fails, the
ranks' records tell who is gone, has failed, is late or has gone ahead (:mod:`megascend.diagnostics.diagnosis`).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import linecache
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from megascend.diagnostics.diagnosis import (
    LOST,
    SILENT_S,
    Diagnosis,
    Failure,
    Kind,
    Record,
    diagnose,
    of_step,
    shorten,
)
from megascend.diagnostics.heartbeat import Heartbeat
from megascend.diagnostics.processes import Process
from megascend.distributed.upstream_errors import is_secondary, library_of
from megascend.errors import CollectiveTimeoutError, PeerLostError, ProcessGroupError

if TYPE_CHECKING:
    from torch.distributed import Store

    from megascend.testing.faults import Armed

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
    """One stay in a phase: a context manager that :meth:`HangMonitor.phase` makes."""

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
class _Stay:
    """Where one thread is. ``visits`` counts entries and exits: it differs whenever the thread has moved on."""

    thread: int
    stack: list[Phase] = field(default_factory=list)
    visits: int = 0
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
        self.last_words: Callable[[BaseException], None] | None = None
        self._rank, self._timeout_s, self._waits_on_host = rank, timeout_s, waits_on_host
        self._look_after = min(5.0, 0.5 * timeout_s)
        self._process = Process.own()
        self._counts: dict[str, int] = {}
        self._front = _Stay(threading.get_ident(), since=time.monotonic())
        self._behind: dict[int, _Stay] = {}
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
        stack = self._stay().stack
        return stack[0].label if stack else ""

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
        stay = self._stay()
        if not stay.stack:
            self._counts[phase.name] = self._counts.get(phase.name, 0) + 1
            if stay is self._front:
                self._failure = None  # whatever it was, this rank has gone on
        phase.since = stay.since = time.monotonic()
        stay.stack.append(phase)
        stay.visits += 1
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
        stay = self._stay()
        try:
            if error is not None and error is not self._told:
                self._failed(phase, stay, error)
        finally:
            stay.stack.pop()
            stay.last, stay.since = phase.label, time.monotonic()
            stay.visits += 1
            if stay is not self._front and not stay.stack:
                del self._behind[stay.thread]

    def _stay(self) -> _Stay:
        thread = threading.get_ident()
        if thread == self._front.thread:
            return self._front
        return self._behind.setdefault(thread, _Stay(thread))

    # --- errors ---

    def _failed(self, phase: Phase, stay: _Stay, error: BaseException) -> None:
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
        stay = self._stay()
        phase = stay.stack[-1]
        self._publish_failure(phase, error)
        found = self._diagnose(stay, suspects)
        parts = [headline]
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

    def _diagnose(self, stay: _Stay, suspects: Iterable[int] | None) -> Diagnosis:
        blamed = tuple(suspects or ())
        if self._heartbeat is None:
            return Diagnosis(Kind.LATE if blamed else Kind.FINE, blamed, (), "")
        mine = self._describe(stay, 0, waiting=self._waits_on_host)
        self._explaining = True
        try:
            seen = self._heartbeat.look_around(ANSWER_S)
        finally:
            self._explaining = False
        if seen is None:
            reason = "the store in which ranks tell what they do does not answer; whoever serves it is gone"
            return Diagnosis(Kind.GONE, blamed, (reason,), "What the ranks do is unknown")
        return diagnose(self._rank, mine, seen, blamed or None)

    def _publish_failure(self, phase: Phase, error: BaseException) -> None:
        text = f"{type(error).__name__}: {shorten(str(error))}"
        outer = self._stay().stack[0].name
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
        return self._front.visits, len(self._behind), self._failure, self.step

    def _record(self, beat: int) -> Record:
        return self._describe(self._front, beat)

    def _describe(self, stay: _Stay, beat: int, waiting: bool | None = None) -> Record:
        stack = list(stay.stack)
        opened = [other.stack[0].name for other in (self._front, *list(self._behind.values())) if other.stack]
        seconds = time.monotonic() - stay.since
        frame, waits = "", False
        if stack and seconds >= min(2.0, self._look_after / 2):
            frame, waits = _where(sys._current_frames().get(stay.thread))
        return Record(
            beat=beat,
            step=self.step,
            label=stack[-1].label if stack else stay.last,
            inside=bool(stack),
            seconds=round(seconds, 1),
            outer=stack[0].name if stack else "",
            counts=dict(self._counts),
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
        stay, visits, now = self._front, self._front.visits, time.monotonic()
        seconds = now - stay.since
        if not stay.stack or self._explaining or seconds < self._look_after or now - self._attended < heartbeat.look_s:
            return
        self._attended = now
        found = diagnose(self._rank, self._describe(stay, 0), heartbeat.poll())
        if found.kind not in LOST:
            self._noticed_in = -1
        elif self._noticed_in != visits:
            self._noticed_in, self._noticed_at = visits, now
        if visits != stay.visits:
            return
        if seconds > self._timeout_s + GRACE_S and self._spoken != visits:
            self._spoken = visits
            _say(self._stuck(found, seconds))
        if self._noticed_in == visits and now - self._noticed_at > self._timeout_s + GRACE_S:
            self._give_up(found, seconds, heartbeat)

    def _stuck(self, found: Diagnosis, seconds: float) -> str:
        place = of_step(self._front.stack[-1].label, self.step) if self._front.stack else "?"
        reasons = "; ".join(found.reasons) or "no rank is gone, has failed or is in another phase"
        taken = f"has taken {seconds:.0f} s (timeout_s is {self._timeout_s:g})"
        return f"rank {self._rank}: {place} {taken}: {reasons}. {found.positions}"

    def _give_up(self, found: Diagnosis, seconds: float, heartbeat: Heartbeat) -> None:
        message = self._stuck(found, seconds)
        _say(f"{message}. Nothing will come of waiting: ending this process with code {EXIT_PEER_LOST}")
        frame = sys._current_frames().get(self._front.thread)
        error = PeerLostError(message)
        if self.last_words is not None:
            self.last_words(error)
        _write_error_file(error, "".join(traceback.format_stack(frame)) if frame else "")
        os._exit(EXIT_PEER_LOST)

    def _at_exit(self) -> None:
        """The interpreter is going, perhaps because of an exception outside of every phase."""
        error = getattr(sys, "last_value", None)
        if error is not None and self._failure is None and os.getpid() == self._process.number:
            place = of_step(self._front.last, self.step)
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
    """Leave the error where torchrun looks for it, in the format of ``torch.distributed.elastic``'s ``ErrorHandler``."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    content = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file)
    except OSError as problem:
        _say(f"torchrun's error file cannot be written: {problem}")


def _armed_faults(rank: int, attempt: int) -> Armed | None:
    """Faults to inject, for tests: the one place that looks for them."""
    text = os.environ.get("MEGASCEND_FAULTS")
    if not text:
        return None
    from megascend.testing import faults

    armed = faults.Armed.from_text(text, rank, attempt)
    if armed is not None:
        _say(f"rank {rank}: FAULTS ARE ARMED (MEGASCEND_FAULTS): {armed}")
    return armed
