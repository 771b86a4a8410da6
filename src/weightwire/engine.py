"""Contract of an inference engine: sampling, weight updates and pauses, for any engine, local or remote.

The trainer offers an update, the engine receives it while it generates, and it takes effect atomically::

    begin_update(offer)   the engine joins the offer's group and receives on a thread; returns at once
    verify(seal)          returns when everything has arrived and the digests match the seal
    commit(update)        pause, load, version, resume: one call that the engine finishes even if its caller disconnects
    drop(update)          discards the received weights; the old weights stay active

Until ``commit`` the old weights and their version are active. After an error of any of the four the engine generates with the
old weights or, if they could not be restored, refuses to generate; it is never left paused, and never serves a mixture.
"""

from __future__ import annotations

import base64
import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightwire.errors import UnsupportedCallError, WireError

if TYPE_CHECKING:
    from weightwire.fp8 import BlockFormat
    from weightwire.manifest import TensorSpec
    from weightwire.offer import Offer, Seal
    from weightwire.plan import Region
    from weightwire.transports.choice import Location


@dataclass(frozen=True)
class Sampling:
    """Settings of a request for responses.

    Attributes:
        max_tokens: longest response in tokens.
        temperature: 0 is greedy. Log-probabilities are those of the distribution at this temperature.
        stop_token_ids: a response ends with the first of them, which is included.
        seed: seed of the request's first response; None: chosen by the engine. Response i may have the seed + i, as in vLLM:
            seeds of requests for n responses should be n or more apart.
        routed_experts: also return the experts to which a mixture of experts has sent each token.
        top_p, top_k: sample from the fewest likeliest tokens of the ``top_k`` likeliest (0: of all) that together have the
            probability ``top_p``. The response then says for each token from which it was drawn.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    routed_experts: bool = False
    top_p: float = 1.0
    top_k: int = 0

    @property
    def truncates(self) -> bool:
        """Check whether some tokens cannot be drawn."""
        return self.top_p < 1 or self.top_k > 0


EXPERT_WIDTHS = {"uint8": 1, "uint16": 2}
"""Bytes of an expert's index, by the name of its dtype."""


@dataclass(frozen=True)
class RoutedExperts:
    """Experts that an engine chose for each token of a prompt and its response, except for the last one, which it never computed.

    Attributes:
        shape: (tokens of prompt and response - 1, layers, experts of a token). vLLM has rows for all layers; those of layers
            without experts hold zeros.
        dtype: ``uint8`` or ``uint16``, little-endian.
        data: the indices, C order, in base64.
    """

    shape: tuple[int, int, int]
    dtype: str
    data: str

    @classmethod
    def of(cls, indices: Any) -> RoutedExperts:
        """Encode an array of unsigned integers [tokens, layers, k]."""
        dtype = str(indices.dtype)
        if indices.ndim != 3 or dtype not in EXPERT_WIDTHS:
            raise WireError(
                f"routed experts have shape {list(indices.shape)} and dtype {dtype}; [tokens, layers, k] of uint8 or uint16 "
                "were expected"
            )
        little = indices.astype(indices.dtype.newbyteorder("<"), copy=False)
        data = base64.b64encode(little.tobytes()).decode("ascii")
        return cls(tuple(int(size) for size in indices.shape), dtype, data)  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, fields: Any) -> RoutedExperts:
        """Rebuild from untrusted JSON.

        Raises:
            WireError: a field is missing or wrong, or the data has another length than the shape.
        """
        values: Mapping[str, Any] = fields if isinstance(fields, Mapping) else {}
        shape, dtype, data = values.get("shape"), values.get("dtype"), values.get("data")
        sizes = tuple(shape) if isinstance(shape, list | tuple) else ()
        width = EXPERT_WIDTHS.get(dtype) if isinstance(dtype, str) else None
        if len(sizes) != 3 or not all(type(size) is int and size > 0 for size in sizes) or width is None:
            raise WireError(f"routed experts cannot be read: shape {shape!r:.60}, dtype {dtype!r:.20}")
        try:
            length = len(base64.b64decode(data, validate=True))  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:  # binascii.Error is a ValueError
            raise WireError(f"routed experts cannot be read: {error}") from error
        if length != math.prod(sizes) * width:
            raise WireError(f"routed experts of shape {list(sizes)} and dtype {dtype} have {length} bytes")
        return cls(sizes, str(dtype), str(data))  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": self.dtype, "data": self.data}

    def numbers(self) -> Any:
        """Return the indices, a read-only numpy array [tokens, layers, k]."""
        import numpy as np

        dtype = np.dtype(self.dtype).newbyteorder("<")
        return np.frombuffer(base64.b64decode(self.data), dtype).reshape(self.shape)


@dataclass(frozen=True)
class Completion:
    """One sampled response.

    Attributes:
        tokens: token ids, with the stop token if there is one.
        logprobs: natural logarithm of the probability with which the engine sampled each token.
        finish_reason: ``stop`` if the response is complete, ``length`` if it was cut off at ``max_tokens``.
        first_version, last_version: versions of the weights that sampled the first and the last token. They differ if an
            update was committed in between.
        routed_experts: experts of each token, where :class:`Sampling` asks for them.
        allowed: the token ids from which each token was drawn, if ``top_p`` or ``top_k`` exclude some.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    first_version: int
    last_version: int
    routed_experts: RoutedExperts | None = None
    allowed: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class TopLogprobs:
    """Likeliest tokens at each position of a sequence but the first, given the tokens before it, at temperature 1.

    Attributes:
        logprobs: log-probability of the sequence's own token.
        ids, top_logprobs: the likeliest tokens, likeliest first, and their log-probabilities, as many at each position.
    """

    logprobs: tuple[float, ...]
    ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]

    @classmethod
    def from_json(cls, fields: Any) -> TopLogprobs:
        """Rebuild from untrusted JSON.

        Raises:
            WireError: a field is missing, or rows differ in number or length.
        """
        try:
            ids, rows = (tuple(tuple(row) for row in fields[name]) for name in ("ids", "top_logprobs"))
            logprobs = tuple(float(value) for value in fields["logprobs"])
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"top log-probabilities cannot be read ({error!r})") from error
        if not len(logprobs) == len(ids) == len(rows) or [*map(len, ids)] != [*map(len, rows)]:
            raise WireError(
                f"top log-probabilities of {len(logprobs)} tokens have {len(ids)} rows of ids and {len(rows)} of values, or "
                "rows of different lengths"
            )
        return cls(logprobs, ids, rows)


def response_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a response from JSON: tuples for lists, and :class:`RoutedExperts` for its JSON."""
    tuples = {name: tuple(fields[name]) for name in ("tokens", "logprobs")}
    experts, allowed = fields.get("routed_experts"), fields.get("allowed")
    return {
        **fields,
        **tuples,
        "routed_experts": None if experts is None else RoutedExperts.from_json(experts),
        "allowed": None if allowed is None else tuple(tuple(row) for row in allowed),
    }


class InferenceEngine(ABC):
    """An inference engine on any number of devices.

    Every method has its own deadline, and none blocks the event loop. Idempotent methods are retried when a connection breaks,
    others are not. A subclass must implement updates; other calls raise UnsupportedCallError unless it implements them.

    Attributes:
        name: kind and address, for messages.

    Raises, in any method:
        weightwire.errors.WireError: an update, an owner or a version is wrong, or the call is not supported.
        Exception: the engine refused, cannot be reached or did not answer in time (:class:`megascend.errors.EngineError` and its
            subclasses in megascend's engines).
    """

    name: str

    # --- sampling ---

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, n: int = 1, adapter: str | None = None
    ) -> list[Completion]:
        """Sample ``n`` responses to a prompt of token ids, with the model or with a loaded adapter."""
        raise UnsupportedCallError(f"{self.name} does not sample responses")

    async def logprobs(self, tokens: Sequence[int], adapter: str | None = None) -> list[float]:
        """Return log p(token | preceding tokens) of all tokens but the first, at temperature 1."""
        raise UnsupportedCallError(f"{self.name} does not compute log-probabilities")

    async def top_logprobs(self, tokens: Sequence[int], count: int, adapter: str | None = None) -> TopLogprobs:
        """Return log p(token | preceding tokens) of all tokens but the first, and the ``count`` likeliest tokens at each."""
        raise UnsupportedCallError(f"{self.name} does not return its likeliest tokens")

    # --- updates ---

    @abstractmethod
    async def receivers(self) -> int:
        """Return the number of members that this engine adds to an update's group, one per worker."""

    async def locations(self) -> list[Location | None]:
        """Return the memory in which each member receives weights, which decides the transport; None: CPU of an unknown host."""
        return [None] * await self.receivers()

    async def needs(self, tensors: Sequence[TensorSpec]) -> list[tuple[Region, ...]] | None:
        """Return the slices of a model's tensors that each worker loads; None if the engine cannot describe them.

        Called seldom: the answer holds until the engine is restarted. Its workers refuse a plan that brings anything else.
        """
        return None

    async def quantised(self) -> Mapping[str, BlockFormat]:
        """Return the weights that the engine stores in fp8 blocks, by name, which are to be sent so (:mod:`weightwire.fp8`).

        Called for every update: an engine may have been restarted with another checkpoint.
        """
        return {}

    @abstractmethod
    async def begin_update(self, offer: Offer) -> None:
        """Start to receive the offered weights; return at once. This claims the engine for the offer's owner."""

    @abstractmethod
    async def verify(self, seal: Seal, timeout_s: float) -> None:
        """Wait until everything has arrived, and compare its digests with the seal. An update that fails is dropped."""

    @abstractmethod
    async def commit(self, update: str) -> Mapping[str, float] | None:
        """Activate verified weights; running responses continue with them.

        Returns:
            Seconds of its parts, if the engine measures them: ``paused``, for which it sampled nothing, and those of the load.
        """

    @abstractmethod
    async def drop(self, update: str) -> None:
        """Drop an update (``update`` of its offer) in any state; a no-op if it is unknown or active."""

    async def version(self, target: str = "model") -> int:
        """Return the active version of the model, or of ``adapter NAME``; 0 before the first update."""
        raise UnsupportedCallError(f"{self.name} does not report its versions")

    async def load_adapter(self, name: str, directory: str, version: int | None = None) -> None:
        """Load or replace a LoRA adapter from a directory in peft's format that the engine can read."""
        raise UnsupportedCallError(f"{self.name} does not load adapters")

    # --- pauses ---

    async def pause(self, lease_s: float) -> None:
        """Stop sampling; requests wait. The engine resumes after ``lease_s`` unless another call renews the pause."""
        raise UnsupportedCallError(f"{self.name} cannot be paused")

    async def sleep(self, lease_s: float) -> None:
        """Pause, and free the device memory of weights and KV cache for others, such as a trainer on the same GPU.

        The engine wakes up as it resumes from a pause, with the weights that it had. Another call renews the pause.
        """
        raise UnsupportedCallError(f"{self.name} cannot free its memory")

    async def resume(self) -> None:
        """End a pause or a sleep; a no-op if the engine is neither paused nor asleep."""
        raise UnsupportedCallError(f"{self.name} cannot be paused")

    @contextlib.asynccontextmanager
    async def paused(self, lease_s: float) -> AsyncIterator[None]:
        """Pause within the context, for ``lease_s`` seconds at most."""
        await self.pause(lease_s)
        try:
            yield
        finally:
            await self.resume()

    async def revive(self) -> bool:
        """Start the engine again if this object has started it and it has ended; return whether it was started.

        It then has its first weights.
        """
        return False

    async def close(self) -> None:  # noqa: B027  most engines hold nothing
        """Release ownership and connections. The engine keeps running, unless this object started it."""


@dataclass(kw_only=True)
class Lease:
    """An owner's right to change an engine, or to continue an update.

    Attributes:
        owner: name of the owner.
        lease_s: seconds after the owner's last call when the lease ends.
        until: end of the lease, on the grantor's clock.
    """

    owner: str
    lease_s: float
    until: float

    @classmethod
    def begin(cls, owner: str, lease_s: float, now: float) -> Lease:
        return cls(owner=owner, lease_s=lease_s, until=now + lease_s)

    def renew(self, now: float, lease_s: float | None = None) -> None:
        """Extend the lease to ``lease_s`` (default: its own length) from now; it never becomes shorter."""
        self.lease_s = self.lease_s if lease_s is None else lease_s
        # A late or reordered call with a short lease must not end a longer one.
        self.until = max(self.until, now + self.lease_s)

    def left_s(self, now: float) -> float:
        """Return the seconds until it ends; 0 if it has ended."""
        return max(0.0, self.until - now)
