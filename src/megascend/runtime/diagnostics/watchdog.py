"""Watchdog of a stuck rank: log past the deadline, and end the process if another rank is gone or has failed.

It represents a thread by its stack of phases and its current line of Python.
"""

from __future__ import annotations

import linecache
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from megascend.errors import PeerLostError
from megascend.runtime.diagnostics.diagnosis import LOST, Diagnosis, RankRecord, diagnose, phase_text, store_lost
from megascend.runtime.diagnostics.heartbeat import StoreLostError

if TYPE_CHECKING:
    from types import FrameType

    from megascend.runtime.diagnostics.heartbeat import HeartbeatThread

P = TypeVar("P")

logger = logging.getLogger(__name__)

EXIT_PEER_LOST = 76
"""Exit code of a rank that was stuck in a phase because another rank is gone or has failed."""
GRACE_S = 3.0
"""Seconds beyond its timeout that a phase may take before the watchdog logs: Gloo's own errors come first."""


@dataclass
class PhaseStack(Generic[P]):
    """The phases that one thread is in.

    Attributes:
        thread: identifier of the thread.
        phases: the phases entered and not left, the outermost first.
        generation: counter of entries and exits; it changes whenever the thread makes progress.
        since: time of the last entry or exit (``time.monotonic``).
        last: label of the phase that was left last.
    """

    thread: int
    phases: list[P] = field(default_factory=list)
    generation: int = 0
    since: float = 0.0
    last: str = "start-up"

    def line(self) -> tuple[str, bool]:
        """Return the thread's innermost Python frame and whether it waits for other ranks there."""
        # The only way to another thread's frames. They may be stale by the time they are read, which is fine for a message.
        frame = sys._current_frames().get(self.thread)
        if frame is None:
            return "", False
        code = frame.f_code
        number = _line_number(frame)
        text = f"{code.co_name} ({os.path.basename(code.co_filename)}:{number})"
        outer: FrameType | None = frame
        # torch.distributed wraps a collective in a few frames (logging, timing); deeper callers are not the wait itself.
        for _ in range(6):
            if outer is None:
                break
            if "/torch/distributed/" in outer.f_code.co_filename:
                return text, True
            outer = outer.f_back
        # Megatron itself waits on the handles of asynchronous collectives, outside torch.distributed's files.
        return text, ".wait(" in linecache.getline(code.co_filename, number)


def _line_number(frame: FrameType) -> int:
    # None where the instruction has no line of its own, as a jump back to a loop's head before Python 3.12: the line before it.
    if frame.f_lineno is not None:
        return frame.f_lineno
    code = frame.f_code
    before = [line for start, _, line in code.co_lines() if line is not None and start <= frame.f_lasti]
    return before[-1] if before else code.co_firstlineno


class Watchdog:
    """Observer of the main thread's phase, called on the heartbeat's thread.

    Attributes:
        check_after_s: seconds that a phase may take before the peers' records are read.
    """

    def __init__(
        self,
        rank: int,
        stack: PhaseStack[Any],
        record: Callable[[], RankRecord],
        on_fatal: Callable[[BaseException], None],
        timeout_s: float,
    ) -> None:
        self.check_after_s = min(5.0, 0.5 * timeout_s)
        self._rank, self._stack, self._timeout_s = rank, stack, timeout_s
        self._record, self._on_fatal = record, on_fatal
        # Generations of the stack in which a warning was logged and in which a lost peer was first seen.
        self._logged_generation = self._lost_generation = -1
        self._lost_since = self._checked_at = 0.0

    def check(self, heartbeat: HeartbeatThread) -> None:
        """Log a warning, and finally end the process, if the main thread is stuck because of another rank."""
        stack, generation, now = self._stack, self._stack.generation, time.monotonic()
        since = stack.since
        seconds = now - since
        # The thread ticks more often than records change.
        if not stack.phases or seconds < self.check_after_s or now - self._checked_at < heartbeat.pace.poll_s:
            return
        self._checked_at = now
        record = self._record()
        try:
            diagnosis = diagnose(self._rank, record, heartbeat.poll())
            certain = heartbeat.certain(since + self._timeout_s + GRACE_S)
        except StoreLostError:
            diagnosis, certain = store_lost(heartbeat.store_address), True
        if diagnosis.kind not in LOST:
            self._lost_generation = -1
        elif self._lost_generation != generation:
            # The wait restarts with every phase, so that a rank that still makes progress is not ended.
            self._lost_generation, self._lost_since = generation, now
        if generation != stack.generation:
            return  # the main thread made progress while the peers' records were read
        # Not before the records show who is alive: a rank that was killed a moment ago still looks late.
        if certain and seconds > self._timeout_s + GRACE_S and self._logged_generation != generation:
            self._logged_generation = generation
            logger.warning("%s", self._message(record, diagnosis, seconds))
        if self._lost_generation == generation and now - self._lost_since > self._timeout_s + GRACE_S:
            self._give_up(self._message(record, diagnosis, seconds))

    def _message(self, record: RankRecord, diagnosis: Diagnosis, seconds: float) -> str:
        reasons = "; ".join(diagnosis.reasons) or "no rank is gone, has failed or is in another phase"
        duration = f"has taken {seconds:.0f} s (timeout_s is {self._timeout_s:g})"
        return (
            f"rank {self._rank}: {phase_text(record.label, record.step)} {duration}: {reasons}. {diagnosis.positions}"
        )

    def _give_up(self, message: str) -> None:
        logger.error("%s. The peer will not recover: exiting with code %d", message, EXIT_PEER_LOST)
        # The main thread's stack, for the error file: the thread itself will never print a traceback.
        frame = sys._current_frames().get(self._stack.thread)
        error = PeerLostError(message)
        try:
            self._on_fatal(error)
            _write_error_file(error, "".join(traceback.format_stack(frame)) if frame else "")
        except Exception:
            logger.exception("the reports of a lost peer are incomplete")
        finally:
            # sys.exit would only end this thread; the main thread is stuck in a collective that cannot be interrupted.
            os._exit(EXIT_PEER_LOST)


def _write_error_file(error: BaseException, stack: str) -> None:
    """Write the error to torchrun's error file (``TORCHELASTIC_ERROR_FILE``), with the stack of the stuck thread."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    # torchrun's handler formats the exception that is being handled, so it has to be raised first.
    try:
        raise error from RuntimeError(f"the main thread was here:\n{stack}")
    except type(error):
        try:
            get_error_handler().record_exception(error)
        except OSError as problem:
            logger.warning("torchrun's error file cannot be written: %s", problem)
