"""Recorded responses, which training requests reference instead of sending their log-probabilities."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megascend.apps.sampling.request import SampleResult
from megascend.apps.serve.samplers.messages import SampleAnswer
from megascend.apps.serve.scheduler.futures import Future
from megascend.apps.serve.tenancy import Session
from megascend.errors import DataError

KEEP_S = 24 * 3600.0
"""Retention of a response after its last use."""
MAX_SEQUENCES = 2**18
"""Most responses of one tenant: one of no token takes memory, too."""


@dataclass
class RecordedSequence:
    """A sampled response.

    Attributes:
        session: session that sampled it; only this session may train on it.
        prompt, tokens: int64.
        logprobs: float32, log-probabilities of ``tokens`` under the sampling model at temperature 1.
        used: clock time of its last use.
    """

    session: str
    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    used: float


class Sequences:
    """Responses of all tenants, least recently used ones dropped beyond a limit per tenant.

    Args:
        clock: monotonic seconds.
        max_tokens: tokens per tenant, prompts included.

    Attributes:
        on_keep, on_drop: callbacks for a recorded and for a dropped response, called with its name.
    """

    def __init__(self, clock: Callable[[], float], max_tokens: int) -> None:
        self._clock, self._max_tokens = clock, max_tokens
        self._sequences: dict[str, OrderedDict[str, RecordedSequence]] = {}
        self._tokens: dict[str, int] = {}
        self._lock = threading.RLock()  # find() is called from threads that check training requests
        self.on_keep: Callable[[str, RecordedSequence], None] = lambda name, sequence: None
        self.on_drop: Callable[[str], None] = lambda name: None

    def record(self, session: Session, prompt: np.ndarray, names: list[str], result: SampleResult) -> None:
        """Record the responses of a request under ``names``."""
        for name, sample in zip(names, result.samples, strict=True):
            tokens, logprobs = np.asarray(sample.tokens, np.int64), np.asarray(sample.logprobs, np.float32)
            sequence = RecordedSequence(session.name, prompt, tokens, logprobs, self._clock())
            # In this order: keep() may drop it at once if it is too large, which has to be recorded after the insertion.
            self.on_keep(name, sequence)
            self.keep(session.tenant, name, sequence)

    def keep(self, tenant: str, name: str, sequence: RecordedSequence) -> None:
        """Add a tenant's response; drop older ones beyond the limit."""
        sequence.used = self._clock()
        with self._lock:
            self._sequences.setdefault(tenant, OrderedDict())[name] = sequence
            self._tokens[tenant] = self._tokens.get(tenant, 0) + len(sequence.prompt) + len(sequence.tokens)
            while (
                self._tokens.get(tenant, 0) > self._max_tokens or len(self._sequences.get(tenant, ())) > MAX_SEQUENCES
            ):
                self._drop(tenant, next(iter(self._sequences[tenant])))

    def watch(self, future: Future, session: Session, prompt: np.ndarray) -> None:
        """Record the responses of a pending sampling request when it completes, under the names that its client has."""
        answer_of = future.answer_of

        def answer(value: object) -> SampleAnswer:
            sample = answer_of(value)
            self.record(session, prompt, [f"{future.name}:{part}" for part in range(future.parts)], sample.result)
            return sample

        future.answer_of = answer

    def find(self, tenant: str, session: str, name: str) -> RecordedSequence:
        """Return a session's response and restart its retention."""
        with self._lock:
            sequence = self._sequences.get(tenant, {}).get(name)
            # The same error for another session's as for none, so that names cannot be probed.
            if sequence is None or sequence.session != session:
                raise DataError(
                    f"no sequence {name[:160]!r} was recorded in this session (record_stability_info), or it was dropped since"
                )
            sequence.used = self._clock()
            self._sequences[tenant].move_to_end(name)
            return sequence

    def forget(self, session: Session) -> None:
        with self._lock:
            sequences = self._sequences.get(session.tenant, {})
            for name in [name for name, sequence in sequences.items() if sequence.session == session.name]:
                self._drop(session.tenant, name)

    def expire(self) -> None:
        """Drop responses past their retention."""
        with self._lock:
            for tenant, sequences in list(self._sequences.items()):
                # Ordered by last use: the first one is the oldest.
                while sequences and self._clock() - next(iter(sequences.values())).used > KEEP_S:
                    self._drop(tenant, next(iter(sequences)))

    def _drop(self, tenant: str, name: str) -> None:
        sequence = self._sequences[tenant].pop(name)
        self.on_drop(name)
        self._tokens[tenant] -= len(sequence.prompt) + len(sequence.tokens)
        if not self._sequences[tenant]:
            del self._sequences[tenant], self._tokens[tenant]
