"""What becomes of a rank that is stuck: it speaks up past its deadline, and ends if another rank is gone or has failed."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from megascend.diagnostics.diagnosis import LOST, Diagnosis, RankRecord, diagnose, of_step
from megascend.diagnostics.phase_stack import PhaseStack
from megascend.errors import PeerLostError

if TYPE_CHECKING:
    from megascend.diagnostics.heartbeat import Heartbeat

logger = logging.getLogger(__name__)

EXIT_PEER_LOST = 76
"""Exit code of a rank that was stuck in a phase because another rank is gone or has failed."""
GRACE_S = 3.0
"""How much longer than its timeout a phase may take before the watchdog speaks up: Gloo's own errors come first."""


class Watchdog:
    """Looks at the main thread's phase from the heartbeat's thread.

    Args:
        stack: the main thread's phases.
        record: this rank's record, as it would be published now.
        last_words: called with the error before the process is ended.
        timeout_s: of collectives, in seconds.

    Attributes:
        look_after_s: how long a phase may take before peers are looked at, in seconds.
    """

    def __init__(
        self,
        rank: int,
        stack: PhaseStack,
        record: Callable[[], RankRecord],
        last_words: Callable[[BaseException], None],
        timeout_s: float,
    ) -> None:
        self.look_after_s = min(5.0, 0.5 * timeout_s)
        self._rank, self._stack, self._timeout_s = rank, stack, timeout_s
        self._record, self._last_words = record, last_words
        self._spoken_in = self._noticed_in = -1  # generations of the stack
        self._noticed_at = self._looked_at = 0.0

    def look(self, heartbeat: Heartbeat) -> None:
        """Speak up, and at last end the process, if the main thread is stuck because of another rank."""
        stack, generation, now = self._stack, self._stack.generation, time.monotonic()
        seconds = now - stack.since
        if not stack.phases or seconds < self.look_after_s or now - self._looked_at < heartbeat.poll_s:
            return
        self._looked_at = now
        record = self._record()
        found = diagnose(self._rank, record, heartbeat.poll())
        if found.kind not in LOST:
            self._noticed_in = -1
        elif self._noticed_in != generation:
            self._noticed_in, self._noticed_at = generation, now
        if generation != stack.generation:
            return
        if seconds > self._timeout_s + GRACE_S and self._spoken_in != generation:
            self._spoken_in = generation
            logger.warning("%s", self._message(record, found, seconds))
        if self._noticed_in == generation and now - self._noticed_at > self._timeout_s + GRACE_S:
            self._give_up(self._message(record, found, seconds))

    def _message(self, record: RankRecord, found: Diagnosis, seconds: float) -> str:
        reasons = "; ".join(found.reasons) or "no rank is gone, has failed or is in another phase"
        taken = f"has taken {seconds:.0f} s (timeout_s is {self._timeout_s:g})"
        return f"rank {self._rank}: {of_step(record.label, record.step)} {taken}: {reasons}. {found.positions}"

    def _give_up(self, message: str) -> None:
        logger.error("%s. Nothing will come of waiting: ending this process with code %d", message, EXIT_PEER_LOST)
        frame = sys._current_frames().get(self._stack.thread)
        error = PeerLostError(message)
        self._last_words(error)
        _write_error_file(error, "".join(traceback.format_stack(frame)) if frame else "")
        os._exit(EXIT_PEER_LOST)


def _write_error_file(error: BaseException, stack: str) -> None:
    """Leave the error where torchrun looks for it (``TORCHELASTIC_ERROR_FILE``), with the stack of the thread that was stuck."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise error from RuntimeError(f"the main thread was here:\n{stack}")
    except type(error):
        try:
            get_error_handler().record_exception(error)
        except OSError as problem:
            logger.warning("torchrun's error file cannot be written: %s", problem)
