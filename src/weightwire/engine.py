"""The contract of an inference engine: what samplers, weight updates and pauses ask of one, whatever it is and wherever.

An update is offered by the trainer, received by the engine while it generates, and takes effect in one moment::

    begin_update(offer)   the engine joins the offer's group and receives on a thread; returns at once
    verify(seal)          returns when everything has arrived and its digests are those of the seal
    commit(update)        pause, load, version, resume: one call that the engine finishes even if its caller is gone
    drop(update)          gives up what was received; the old weights stay in force

Until ``commit`` the old weights and their version are in force. After an error of any of the four the engine generates with the
old weights or, where these could not be restored, refuses to generate; it is never left paused, and never serves a mixture.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightwire.errors import UnsupportedCallError

if TYPE_CHECKING:
    from weightwire.offer import Offer, Seal
    from weightwire.transports.choice import Location


@dataclass(frozen=True)
class Sampling:
    """Settings of a request for responses.

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
        finish_reason: ``stop`` if the response is complete, ``length`` if it was cut off at ``max_tokens``.
        first_version, last_version: weights that its first and its last token were sampled with. They differ where an update was
            committed in between.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    first_version: int
    last_version: int


class InferenceEngine(ABC):
    """One inference engine, of any number of devices.

    Every method has a deadline of its own, and none blocks the event loop. Those that change nothing, or nothing more when
    repeated, are retried when a connection breaks; others are not. A subclass takes updates; what else it does not have raises.

    Attributes:
        name: for messages: what and where it is.

    Raises, in any method:
        weightwire.errors.WireError: what is wrong with an update, an owner or a version; or a call that it does not have.
        Exception: the engine refused, cannot be reached or did not answer in time (:class:`megascend.errors.EngineError` and its
            subclasses in megascend's engines).
    """

    name: str

    # --- sampling ---

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, n: int = 1, adapter: str | None = None
    ) -> list[Completion]:
        """Sample ``n`` responses to a prompt of token ids, with the model or with an adapter that was loaded before."""
        raise UnsupportedCallError(f"{self.name} does not sample responses")

    async def logprobs(self, tokens: Sequence[int], adapter: str | None = None) -> list[float]:
        """Return log p(token | those before it) of all tokens but the first, at temperature 1."""
        raise UnsupportedCallError(f"{self.name} does not compute log-probabilities")

    # --- updates ---

    @abstractmethod
    async def receivers(self) -> int:
        """Return the number of members of an update's group that this engine is."""

    async def locations(self) -> list[Location | None]:
        """Return where each member keeps received weights, which decides how they travel; None: on the CPU of any host."""
        return [None] * await self.receivers()

    @abstractmethod
    async def begin_update(self, offer: Offer) -> None:
        """Start to receive what the trainer offers; returns at once. The offer's owner claims the engine by it."""

    @abstractmethod
    async def verify(self, seal: Seal, timeout_s: float) -> None:
        """Wait until everything has arrived, and compare it with what was sent. An update that fails is dropped."""

    @abstractmethod
    async def commit(self, update: str) -> None:
        """Put verified weights in force; responses that are being generated resume with them."""

    @abstractmethod
    async def drop(self, update: str) -> None:
        """Give up an update (``update`` of its offer) in whatever state; a no-op if there is none or it is in force."""

    async def version(self, target: str = "model") -> int:
        """Return the version in force of the model, or of ``adapter NAME``; 0 before the first update."""
        raise UnsupportedCallError(f"{self.name} does not report its versions")

    async def load_adapter(self, name: str, directory: str, version: int | None = None) -> None:
        """Load a LoRA adapter, or replace the one of that name, from a directory in peft's format that the engine can read."""
        raise UnsupportedCallError(f"{self.name} does not load adapters")

    # --- pauses ---

    async def pause(self, lease_s: float) -> None:
        """Stop sampling; requests wait. The engine resumes after ``lease_s`` unless another call renews the pause."""
        raise UnsupportedCallError(f"{self.name} cannot be paused")

    async def resume(self) -> None:
        """End a pause; a no-op if there is none."""
        raise UnsupportedCallError(f"{self.name} cannot be paused")

    @contextlib.asynccontextmanager
    async def paused(self, lease_s: float) -> AsyncIterator[None]:
        """Pause within the context, which has ``lease_s`` for what it does."""
        await self.pause(lease_s)
        try:
            yield
        finally:
            await self.resume()

    async def close(self) -> None:  # noqa: B027  most engines hold nothing
        """Give up ownership and connections. The engine itself stays, unless this object started it."""
