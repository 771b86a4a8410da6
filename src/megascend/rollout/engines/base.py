"""What a loop and a weight update know of an inference engine.

An update is offered by the trainer, received by the engine while it generates, and takes effect in one moment::

    begin_update(offer)   the engine joins the offer's group and receives on a thread; returns at once
    verify(seal)          returns when everything has arrived and its digests are those of the seal
    commit(update)        pause, load, version, resume: one call that the engine finishes by itself
    drop(update)          gives up what was received; the old weights stay in force

Until ``commit`` the old weights and their version are in force. After an error of any of the four the engine generates with the
old weights or, where these could not be restored, refuses to generate; it is never left paused, and never serves a mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weightwire.offer import Offer, Seal


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled.

    Attributes:
        max_tokens: longest response in tokens.
        temperature: 0 takes the likeliest token. Log-probabilities are those of the distribution at this temperature.
        stop_token_ids: a response ends with the first of them, which is part of it.
        seed: of one request's samples; None: the engine's own.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Completion:
    """One sampled response.

    Attributes:
        tokens: token ids, the closing one included if there is one.
        logprobs: natural logarithm of the probability with which each token was sampled, by the engine's own weights.
        finish_reason: ``stop`` if the response ended by itself, ``length`` if it was cut off at ``max_tokens``.
        first_version, last_version: weights that its first and its last token were sampled with. They differ where an update was
            committed in between.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    first_version: int
    last_version: int


class InferenceEngine(Protocol):
    """One inference engine, of any number of devices.

    Every method has a deadline of its own. Those that change nothing, or that may be repeated without effect, are retried when
    the connection breaks; others are not. No method blocks the event loop.

    Raises, in any method:
        EngineError: the engine refused; the message has its name and what it answered.
        EngineLostError: it cannot be reached, or was gone before it had answered.
        EngineTimeoutError: it did not answer within the deadline.
        weightwire.errors.WireError: what it has found wrong with an update, an owner or a version.
    """

    name: str
    """For messages: where it is."""

    stages: bool
    """Whether it keeps received weights beside those in force. If not, a commit has to load them from somewhere else."""

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, n: int = 1, adapter: str | None = None
    ) -> list[Completion]:
        """Sample ``n`` responses to a prompt of token ids; with an adapter that was loaded before, if one is named."""
        ...

    async def logprobs(self, tokens: Sequence[int], adapter: str | None = None) -> list[float]:
        """log p(token | those before it) of all tokens but the first, at temperature 1: they tell which weights are in force."""
        ...

    async def receivers(self) -> int:
        """How many members of an update's group this engine is."""
        ...

    async def begin_update(self, offer: Offer) -> None:
        """Start to receive what the trainer offers; returns without waiting for it. The offer's owner claims the engine by it."""
        ...

    async def verify(self, seal: Seal, timeout_s: float) -> None:
        """Wait until everything has arrived, and hold it against what was sent. An update that fails is dropped."""
        ...

    async def commit(self, update: str) -> None:
        """Put verified weights in force; responses that are being generated go on with them."""
        ...

    async def drop(self, update: str) -> None:
        """Give up an update (``update`` of its offer), in whatever state; nothing happens if there is none, or it is in force."""
        ...

    async def pause(self, lease_s: float) -> None:
        """Stop sampling; requests wait. The engine resumes by itself after ``lease_s`` unless another call renews the pause."""
        ...

    async def resume(self) -> None:
        """End a pause; nothing happens if there is none."""
        ...

    async def load_adapter(self, name: str, directory: str, version: int | None = None) -> None:
        """Load a LoRA adapter from a directory in peft's format that the engine can read, or replace the one of that name."""
        ...

    async def version(self, target: str = "model") -> int:
        """Of the weights in force: the model's, or those of ``adapter NAME``; 0 before the first update."""
        ...

    async def close(self) -> None:
        """Give up ownership and connections. The engine itself stays, unless this object started it."""
        ...
