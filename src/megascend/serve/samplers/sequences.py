"""Responses that the server remembers, so that training requests can name them instead of sending their log-probabilities."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megascend.errors import DataError
from megascend.sampling.request import SampleResult
from megascend.serve.samplers.messages import SampleAnswer
from megascend.serve.scheduler.futures import Future
from megascend.serve.tenancy import Session

KEEP_S = 24 * 3600.0
"""How long a response is kept after it was last used."""


@dataclass
class RecordedSequence:
    """A response.

    Attributes:
        session: that sampled it, and that alone may train on it.
        prompt, tokens: int64.
        logprobs: float32, of ``tokens`` in the model that sampled them, temperature 1.
        used: when it was last asked for.
    """

    session: str
    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    used: float


class Sequences:
    """Responses of all tenants, each tenant's within a bound: the one that was used longest ago makes room.

    Args:
        clock: seconds, monotonic.
        most_tokens: of one tenant, prompts included.

    Attributes:
        kept, dropped: called with the name of a response that is remembered, or not any more.
    """

    def __init__(self, clock: Callable[[], float], most_tokens: int) -> None:
        self._clock, self._most = clock, most_tokens
        self._kept: dict[str, OrderedDict[str, RecordedSequence]] = {}
        self._tokens: dict[str, int] = {}
        self.kept: Callable[[str, RecordedSequence], None] = lambda name, sequence: None
        self.dropped: Callable[[str], None] = lambda name: None

    def record(self, session: Session, prompt: np.ndarray, names: list[str], result: SampleResult) -> None:
        """Keep the responses of a request under their ``names``."""
        for name, sample in zip(names, result.samples, strict=True):
            tokens, logprobs = np.asarray(sample.tokens, np.int64), np.asarray(sample.logprobs, np.float32)
            sequence = RecordedSequence(session.name, prompt, tokens, logprobs, self._clock())
            self.kept(name, sequence)
            self.keep(session.tenant, name, sequence)

    def keep(self, tenant: str, name: str, sequence: RecordedSequence) -> None:
        """Keep a response of a tenant from now on; older ones make room."""
        sequence.used = self._clock()
        self._kept.setdefault(tenant, OrderedDict())[name] = sequence
        self._tokens[tenant] = self._tokens.get(tenant, 0) + len(sequence.prompt) + len(sequence.tokens)
        while self._tokens.get(tenant, 0) > self._most:
            self._drop(tenant, next(iter(self._kept[tenant])))

    def watch(self, future: Future, session: Session, prompt: np.ndarray) -> None:
        """Keep what a request to sample will give, under the names that its client was told."""
        answer_of = future.answer_of

        def answer(value: object) -> SampleAnswer:
            sample = answer_of(value)
            self.record(session, prompt, [f"{future.name}:{part}" for part in range(future.parts)], sample.result)
            return sample

        future.answer_of = answer

    def find(self, tenant: str, session: str, name: str) -> RecordedSequence:
        """Return a response of a session, which is kept for another day.

        Raises:
            DataError: none of that name was recorded there, or it is not kept any more.
        """
        sequence = self._kept.get(tenant, {}).get(name)
        if sequence is None or sequence.session != session:
            raise DataError(
                f"no sequence {name[:160]!r} was recorded in this session (record_stability_info), or it is not kept any more"
            )
        sequence.used = self._clock()
        self._kept[tenant].move_to_end(name)
        return sequence

    def forget(self, session: Session) -> None:
        """Drop what a session sampled."""
        sequences = self._kept.get(session.tenant, {})
        for name in [name for name, sequence in sequences.items() if sequence.session == session.name]:
            self._drop(session.tenant, name)

    def expire(self) -> None:
        """Drop what nobody has used for a day."""
        for tenant, sequences in list(self._kept.items()):
            while sequences and self._clock() - next(iter(sequences.values())).used > KEEP_S:
                self._drop(tenant, next(iter(sequences)))

    def _drop(self, tenant: str, name: str) -> None:
        gone = self._kept[tenant].pop(name)
        self.dropped(name)
        self._tokens[tenant] -= len(gone.prompt) + len(gone.tokens)
        if not self._kept[tenant]:
            del self._kept[tenant], self._tokens[tenant]
