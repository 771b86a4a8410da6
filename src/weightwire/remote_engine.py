"""JSON calls for the contract of an engine: the client that sends them, and the parser for a server.

A client subclasses :class:`RemoteEngine` and implements its transport; a server passes each request to :func:`read_call`, which
treats it as untrusted. A call is the name of a method; arguments and result are JSON objects.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from weightwire.engine import Completion, InferenceEngine, Sampling, TopLogprobs, response_fields
from weightwire.errors import WireError
from weightwire.fp8 import BlockFormat, formats_from_json, formats_to_json
from weightwire.manifest import Manifest, TensorSpec
from weightwire.offer import Offer, Seal
from weightwire.plan import Region, needs_from_json, needs_to_json
from weightwire.transports.choice import Location

# Limits of one call: requests are untrusted.
MAX_RESPONSES = 1024
MAX_STOP_TOKENS = 64
MAX_TOKENS = 2**22
MAX_TOP_LOGPROBS = 1024
MAX_SECONDS = 1e6
AUDIENCE = "inference engine"
"""What requests to an engine's server are signed for."""
_REQUIRED = object()
"""Default of arguments that have none: None is a valid default."""


class RemoteEngine(InferenceEngine):
    """Client of an engine in another process or on another machine.

    Attributes:
        answer_s: deadline of a request for responses or log-probabilities, including time in the engine's queue.
        control_s: deadline of calls that return at once.
        commit_s: deadline of a commit and of loading an adapter: longer than the server's own, so that its error arrives.
        unreadable: class of the error raised for a malformed answer.
    """

    answer_s: float = 600.0
    control_s: float = 60.0
    commit_s: float = 660.0
    unreadable: type[Exception] = WireError

    @abstractmethod
    async def ask(self, call: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        """Send a call to the engine and return its result, or raise its error."""

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, n: int = 1, adapter: str | None = None
    ) -> list[Completion]:
        arguments = {"prompt": list(prompt), "n": n, "adapter": adapter, **asdict(sampling)}
        # The parser expects a list, and a transport that does not encode JSON would hand it the tuple.
        arguments["stop_token_ids"] = list(sampling.stop_token_ids)
        # Unknown to servers of an earlier version.
        if not sampling.routed_experts:
            del arguments["routed_experts"]
        if not sampling.truncates:
            del arguments["top_p"], arguments["top_k"]
        answer = await self.ask("generate", arguments, self.answer_s)
        try:
            return [Completion(**response_fields(fields)) for fields in answer["completions"]]
        except (KeyError, TypeError, WireError) as error:
            raise self.unreadable(f"{self.name}: generate: the answer cannot be read ({error!r})") from error

    async def logprobs(self, tokens: Sequence[int], adapter: str | None = None) -> list[float]:
        arguments = {"tokens": list(tokens), "adapter": adapter}
        return self._field(await self.ask("logprobs", arguments, self.answer_s), "logprobs")

    async def top_logprobs(self, tokens: Sequence[int], count: int, adapter: str | None = None) -> TopLogprobs:
        arguments = {"tokens": list(tokens), "count": count, "adapter": adapter}
        answer = self._field(await self.ask("top_logprobs", arguments, self.answer_s), "top_logprobs")
        try:
            return TopLogprobs.from_json(answer)
        except WireError as error:
            raise self.unreadable(f"{self.name}: top_logprobs: {error}") from error

    async def receivers(self) -> int:
        return self._field(await self.ask("receivers", {}, self.control_s), "receivers")

    async def locations(self) -> list[Location | None]:
        locations = self._field(await self.ask("locations", {}, self.control_s), "locations")
        return [None if data is None else Location.from_json(data) for data in locations]

    async def needs(self, tensors: Sequence[TensorSpec]) -> list[tuple[Region, ...]] | None:
        arguments = {"tensors": [[spec.name, spec.dtype, list(spec.shape)] for spec in tensors]}
        answer = self._field(await self.ask("needs", arguments, self.commit_s), "needs")
        return None if answer is None else [needs_from_json(rows, tensors) for rows in answer]

    async def quantised(self) -> Mapping[str, BlockFormat]:
        return formats_from_json(self._field(await self.ask("quantised", {}, self.control_s), "quantised"))

    async def begin_update(self, offer: Offer) -> None:
        await self.ask("begin_update", {"offer": offer.to_json()}, self.control_s)

    async def verify(self, seal: Seal, timeout_s: float) -> None:
        # Longer than the engine's own deadline, so that the engine's error arrives instead of a timeout of this call.
        await self.ask("verify", {"seal": seal.to_json(), "timeout_s": timeout_s}, timeout_s + self.control_s)

    async def commit(self, update: str) -> Mapping[str, float] | None:
        answer = await self.ask("commit", {"update": update}, self.commit_s)
        # Engines that measure nothing, and those of an earlier version, answer without a result.
        seconds = answer.get("commit") if isinstance(answer, dict) else None
        if seconds is not None and not (
            isinstance(seconds, dict) and all(type(value) in (int, float) for value in seconds.values())
        ):
            raise self.unreadable(f"{self.name}: commit: the answer cannot be read ({seconds!r:.80})")
        return seconds

    async def drop(self, update: str) -> None:
        await self.ask("drop", {"update": update}, self.control_s)

    async def version(self, target: str = "model") -> int:
        return self._field(await self.ask("version", {"target": target}, self.control_s), "version")

    async def load_adapter(self, name: str, directory: str, version: int | None = None) -> None:
        arguments = {"name": name, "directory": str(directory), "version": version}
        await self.ask("load_adapter", arguments, self.commit_s)

    async def pause(self, lease_s: float) -> None:
        await self.ask("pause", {"lease_s": lease_s}, self.control_s)

    async def sleep(self, lease_s: float) -> None:
        await self.ask("sleep", {"lease_s": lease_s}, self.commit_s)

    async def resume(self) -> None:
        # As long as a commit: an engine that has slept copies its weights back.
        await self.ask("resume", {}, self.commit_s)

    def _field(self, answer: Any, name: str) -> Any:
        try:
            return answer[name]
        except (KeyError, TypeError) as error:
            raise self.unreadable(f"{self.name}: {name}: the answer cannot be read ({error!r})") from error


EngineCall = Callable[[InferenceEngine], Awaitable[dict[str, Any]]]
"""Calls one method of an engine and returns its result as JSON."""


def read_call(call: str, arguments: Mapping[str, Any]) -> EngineCall:
    """Parse an untrusted call; return a function that runs it on an engine.

    Raises:
        WireError: the call is unknown, or an argument is missing, unknown or out of bounds.
    """
    if call not in CALLS:
        raise WireError(f"unknown call {call!r:.80}; known: {', '.join(CALLS)}")
    fields = Arguments(call, arguments)
    run = CALLS[call](fields)
    fields.check_empty()
    return run


class Arguments:
    """Arguments of a call, which are checked and removed one by one."""

    def __init__(self, call: str, values: Mapping[str, Any]) -> None:
        self._call, self._values = call, dict(values)

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a value of any type; ``default`` if it is missing."""
        if name not in self._values and default is _REQUIRED:
            raise WireError(f"{self._call}: {name} is missing")
        return self._values.pop(name, default)

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a text of 1 to 4096 characters."""
        value = self.take(name, default)
        if value is not default and (not isinstance(value, str) or not 0 < len(value) <= 4096):
            raise WireError(f"{self._call}: {name} is {value!r:.80}; a text was expected")
        return value

    def integer(self, name: str, minimum: int, maximum: int, default: Any = _REQUIRED) -> Any:
        """Return an integer within bounds."""
        value = self.take(name, default)
        # type() instead of isinstance: True is an int.
        if value is not default and (type(value) is not int or not minimum <= value <= maximum):
            raise WireError(f"{self._call}: {name} is {value!r:.40}, not an integer from {minimum} to {maximum}")
        return value

    def flag(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a boolean."""
        value = self.take(name, default)
        if type(value) is not bool:
            raise WireError(f"{self._call}: {name} is {value!r:.40}; true or false was expected")
        return value

    def number(self, name: str, maximum: float, default: Any = _REQUIRED) -> Any:
        """Return a number from 0 to ``maximum``."""
        value = self.take(name, default)
        # NaN, which Python's JSON accepts, fails the comparison.
        if value is not default and (type(value) not in (int, float) or not 0 <= value <= maximum):
            raise WireError(f"{self._call}: {name} is {value!r:.40}, not a number from 0 to {maximum:g}")
        return value if value is default else float(value)

    def tokens(self, name: str, minimum: int, maximum: int, default: Any = _REQUIRED) -> Any:
        """Return a list of token ids."""
        value = self.take(name, default)
        if value is default:
            return value
        if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 2**31 for token in value):
            raise WireError(f"{self._call}: {name} is not a list of token ids")
        if not minimum <= len(value) <= maximum:
            raise WireError(f"{self._call}: {name} has {len(value)} token ids, not {minimum} to {maximum}")
        return value

    def check_empty(self) -> None:
        """Raise WireError if arguments are left, which no parser knows."""
        if self._values:
            raise WireError(f"{self._call}: unknown fields {', '.join(sorted(map(str, self._values)))[:200]}")


def _generate(arguments: Arguments) -> EngineCall:
    prompt = arguments.tokens("prompt", 1, MAX_TOKENS)
    n = arguments.integer("n", 1, MAX_RESPONSES, 1)
    adapter = arguments.text("adapter", None)
    sampling = Sampling(
        max_tokens=arguments.integer("max_tokens", 1, 2**24),
        temperature=arguments.number("temperature", 100.0, 1.0),
        stop_token_ids=tuple(arguments.tokens("stop_token_ids", 0, MAX_STOP_TOKENS, ())),
        seed=arguments.integer("seed", -(2**63), 2**64, None),
        routed_experts=arguments.flag("routed_experts", False),
        top_p=arguments.number("top_p", 1.0, 1.0),
        top_k=arguments.integer("top_k", 0, 2**31 - 1, 0),
    )

    async def run(engine: InferenceEngine) -> dict[str, Any]:
        completions = await engine.generate(prompt, sampling, n, adapter)
        return {"completions": [_completion_json(completion) for completion in completions]}

    return run


def _completion_json(completion: Completion) -> dict[str, Any]:
    fields, experts = {**vars(completion)}, completion.routed_experts
    # Only sent if requested: a client of an earlier version could not construct its Completion with an unknown field.
    del fields["routed_experts"]
    if completion.allowed is None:
        del fields["allowed"]
    return fields if experts is None else {**fields, "routed_experts": experts.to_json()}


def _locations(arguments: Arguments) -> EngineCall:
    async def run(engine: InferenceEngine) -> dict[str, Any]:
        locations = await engine.locations()
        return {"locations": [None if location is None else location.to_json() for location in locations]}

    return run


def _needs(arguments: Arguments) -> EngineCall:
    # Parsed as part of a manifest, whose constructor checks names, dtypes, shapes and bounds.
    rows = arguments.take("tensors")
    tensors = Manifest.from_json({**Manifest(0, (TensorSpec("any", "uint8", ()),)).to_json(), "tensors": rows}).tensors

    async def run(engine: InferenceEngine) -> dict[str, Any]:
        needs = await engine.needs(tensors)
        return {"needs": None if needs is None else [needs_to_json(pieces) for pieces in needs]}

    return run


def _quantised(arguments: Arguments) -> EngineCall:
    async def run(engine: InferenceEngine) -> dict[str, Any]:
        return {"quantised": formats_to_json(await engine.quantised())}

    return run


def _top_logprobs(arguments: Arguments) -> EngineCall:
    tokens, count = arguments.tokens("tokens", 1, MAX_TOKENS), arguments.integer("count", 1, MAX_TOP_LOGPROBS)
    adapter = arguments.text("adapter", None)

    async def run(engine: InferenceEngine) -> dict[str, Any]:
        return {"top_logprobs": asdict(await engine.top_logprobs(tokens, count, adapter))}

    return run


def _plain_call(name: str, take: Callable[[Arguments], tuple[Any, ...]]) -> Callable[[Arguments], EngineCall]:
    """Return the parser of a call whose result, if any, is a field named like the call."""

    def read(arguments: Arguments) -> EngineCall:
        values = take(arguments)

        async def run(engine: InferenceEngine) -> dict[str, Any]:
            result = await getattr(engine, name)(*values)
            return {} if result is None else {name: result}

        return run

    return read


CALLS: dict[str, Callable[[Arguments], EngineCall]] = {
    "generate": _generate,
    "logprobs": _plain_call("logprobs", lambda a: (a.tokens("tokens", 1, MAX_TOKENS), a.text("adapter", None))),
    "top_logprobs": _top_logprobs,
    "receivers": _plain_call("receivers", lambda a: ()),
    "locations": _locations,
    "needs": _needs,
    "quantised": _quantised,
    "begin_update": _plain_call("begin_update", lambda a: (Offer.from_json(a.take("offer")),)),
    "verify": _plain_call("verify", lambda a: (Seal.from_json(a.take("seal")), a.number("timeout_s", MAX_SECONDS))),
    "commit": _plain_call("commit", lambda a: (a.text("update"),)),
    "drop": _plain_call("drop", lambda a: (a.text("update"),)),
    "version": _plain_call("version", lambda a: (a.text("target", "model"),)),
    "load_adapter": _plain_call(
        "load_adapter", lambda a: (a.text("name"), a.text("directory"), a.integer("version", 0, 2**62, None))
    ),
    "pause": _plain_call("pause", lambda a: (a.number("lease_s", MAX_SECONDS),)),
    "sleep": _plain_call("sleep", lambda a: (a.number("lease_s", MAX_SECONDS),)),
    "resume": _plain_call("resume", lambda a: ()),
}
"""Parsers of the arguments of each remote method, by name."""
