"""The contract of an engine as JSON calls: the client that sends them, and the parser for a server.

A call is the name of a method of :class:`weightwire.engine.InferenceEngine`, whose signature has its parameters and defaults;
arguments and result are JSON objects. :data:`CALLS` declares everything else, once for every client and server. A client
subclasses :class:`RemoteEngine` and implements its transport; a server passes each request to :func:`read_call`, which treats it
as untrusted.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from weightwire.engine import Completion, InferenceEngine, Sampling, TopLogprobs, response_fields
from weightwire.errors import WireError
from weightwire.fp8 import formats_from_json, formats_to_json
from weightwire.manifest import Manifest, TensorSpec
from weightwire.offer import Offer, Seal
from weightwire.plan import needs_from_json, needs_to_json
from weightwire.transports.choice import Location

# Limits of one call: requests are untrusted.
MAX_RESPONSES = 1024
MAX_STOP_TOKENS = 64
MAX_TOKENS = 2**22
MAX_TOP_LOGPROBS = 1024
MAX_SECONDS = 1e6
AUDIENCE = "inference engine"
"""What requests to an engine's server are signed for."""
_REQUIRED = inspect.Parameter.empty
"""Default of arguments that have none: None is a valid default."""
Method = TypeVar("Method", bound=Callable[..., Any])
EngineCall = Callable[[InferenceEngine], Awaitable[dict[str, Any]]]
"""Calls one method of an engine and returns its result as JSON."""


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
        value = self.take(name, default)
        if value is not default and (not isinstance(value, str) or not 0 < len(value) <= 4096):
            raise WireError(f"{self._call}: {name} is {value!r:.80}; a text was expected")
        return value

    def integer(self, name: str, minimum: int, maximum: int, default: Any = _REQUIRED) -> Any:
        value = self.take(name, default)
        # type() instead of isinstance: True is an int.
        if value is not default and (type(value) is not int or not minimum <= value <= maximum):
            raise WireError(f"{self._call}: {name} is {value!r:.40}, not an integer from {minimum} to {maximum}")
        return value

    def flag(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self.take(name, default)
        if type(value) is not bool:
            raise WireError(f"{self._call}: {name} is {value!r:.40}; true or false was expected")
        return value

    def number(self, name: str, maximum: float, default: Any = _REQUIRED) -> Any:
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


def _read_sampling(arguments: Arguments) -> Sampling:
    return Sampling(
        max_tokens=arguments.integer("max_tokens", 1, 2**24),
        temperature=arguments.number("temperature", 100.0, 1.0),
        stop_token_ids=tuple(arguments.tokens("stop_token_ids", 0, MAX_STOP_TOKENS, ())),
        seed=arguments.integer("seed", -(2**63), 2**64, None),
        routed_experts=arguments.flag("routed_experts", False),
        top_p=arguments.number("top_p", 1.0, 1.0),
        top_k=arguments.integer("top_k", 0, 2**31 - 1, 0),
    )


def _read_specs(arguments: Arguments) -> tuple[TensorSpec, ...]:
    # Parsed as part of a manifest, whose constructor checks names, dtypes, shapes and bounds.
    rows = {"tensors": arguments.take("tensors")}
    return Manifest.from_json({**Manifest(0, (TensorSpec("any", "uint8", ()),)).to_json(), **rows}).tensors


PARAMETERS: dict[str, Callable[[Arguments, Any], Any]] = {
    "prompt": lambda fields, _: fields.tokens("prompt", 1, MAX_TOKENS),
    "tokens": lambda fields, _: fields.tokens("tokens", 1, MAX_TOKENS),
    "sampling": lambda fields, _: _read_sampling(fields),
    "n": lambda fields, default: fields.integer("n", 1, MAX_RESPONSES, default),
    "count": lambda fields, _: fields.integer("count", 1, MAX_TOP_LOGPROBS),
    "adapter": lambda fields, default: fields.text("adapter", default),
    "tensors": lambda fields, _: _read_specs(fields),
    "offer": lambda fields, _: Offer.from_json(fields.take("offer")),
    "seal": lambda fields, _: Seal.from_json(fields.take("seal")),
    "timeout_s": lambda fields, _: fields.number("timeout_s", MAX_SECONDS),
    "lease_s": lambda fields, _: fields.number("lease_s", MAX_SECONDS),
    "update": lambda fields, _: fields.text("update"),
    "target": lambda fields, default: fields.text("target", default),
    "name": lambda fields, _: fields.text("name"),
    "directory": lambda fields, _: fields.text("directory"),
    "version": lambda fields, default: fields.integer("version", 0, 2**62, default),
}
"""Readers of untrusted arguments, by the name of the contract's parameter, which is also that of the field."""


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    fields = {**asdict(sampling), "stop_token_ids": list(sampling.stop_token_ids)}
    # Only sent if used: these are unknown to servers of an earlier version.
    unused = set() if sampling.routed_experts else {"routed_experts"}
    unused |= set() if sampling.truncates else {"top_p", "top_k"}
    return {field: content for field, content in fields.items() if field not in unused}


WRITERS: dict[str, Callable[[Any], Any]] = {
    "prompt": list,
    "tokens": list,
    "tensors": lambda specs: [[spec.name, spec.dtype, list(spec.shape)] for spec in specs],
    "offer": Offer.to_json,
    "seal": Seal.to_json,
    "directory": str,
}
"""Writers of arguments that are not JSON as they are, by the same names; the fields of a Sampling are those of the call."""


def _completion_json(completion: Completion) -> dict[str, Any]:
    fields, experts = {**vars(completion)}, completion.routed_experts
    # Only sent if requested: a client of an earlier version could not construct its Completion with an unknown field.
    del fields["routed_experts"]
    if completion.allowed is None:
        del fields["allowed"]
    return fields if experts is None else {**fields, "routed_experts": experts.to_json()}


def _read_seconds(seconds: Any) -> dict[str, float] | None:
    if seconds is not None and not all(type(value) in (int, float) for value in seconds.values()):
        raise WireError(f"{seconds!r:.80} are not seconds by name")
    return seconds


def _unchanged(result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Call:
    """What clients and servers have to know of a call.

    Attributes:
        deadline: the client's, an attribute of :class:`RemoteEngine`; ``timeout_s`` of the arguments is added.
        reads: it changes nothing: it needs no owner, and each attempt is executed.
        repeatable: it may be sent again when the connection breaks: it has no effect, or the same one as once.
        result: field of the result in the answer; None without a result.
        optional: the result may be None, and its field is then missing.
        write: turns the result into JSON.
        read: rebuilds the result from untrusted JSON and the call's arguments.
    """

    deadline: str = "control_s"
    result: str | None = None
    reads: bool = False
    repeatable: bool = True
    optional: bool = False
    write: Callable[[Any], Any] = _unchanged
    read: Callable[[Any, Mapping[str, Any]], Any] = lambda result, arguments: result

    @property
    def samples(self) -> bool:
        """Check whether the engine computes an answer, for nothing once its caller is gone."""
        return self.deadline == "answer_s"


CALLS = {
    "generate": Call(
        "answer_s",
        "completions",
        reads=True,
        repeatable=False,  # responses may have been sampled
        write=lambda completions: [_completion_json(completion) for completion in completions],
        read=lambda rows, _: [Completion(**response_fields(fields)) for fields in rows],
    ),
    "logprobs": Call("answer_s", "logprobs", reads=True),
    "top_logprobs": Call(
        "answer_s", "top_logprobs", reads=True, write=asdict, read=lambda fields, _: TopLogprobs.from_json(fields)
    ),
    "receivers": Call(result="receivers", reads=True),
    "locations": Call(
        result="locations",
        reads=True,
        write=lambda places: [None if place is None else place.to_json() for place in places],
        read=lambda rows, _: [None if fields is None else Location.from_json(fields) for fields in rows],
    ),
    "needs": Call(
        "commit_s",
        "needs",
        write=lambda needs: None if needs is None else [needs_to_json(pieces) for pieces in needs],
        read=lambda rows, sent: None if rows is None else [needs_from_json(row, sent["tensors"]) for row in rows],
    ),
    "quantised": Call(
        result="quantised", reads=True, write=formats_to_json, read=lambda fields, _: formats_from_json(fields)
    ),
    "begin_update": Call(),
    "verify": Call(),
    "commit": Call("commit_s", "commit", optional=True, read=lambda seconds, _: _read_seconds(seconds)),
    "drop": Call(),
    "version": Call(result="version", reads=True),
    "load_adapter": Call("commit_s", repeatable=False),  # its version may have been incremented
    "pause": Call(),
    "sleep": Call("commit_s"),
    # As long as a commit: an engine that has slept copies its weights back.
    "resume": Call("commit_s"),
}
"""All calls, by the method's name."""
_SIGNATURES = {name: inspect.signature(getattr(InferenceEngine, name)) for name in CALLS}


def _remote(contract: Method) -> Method:
    """Return the method of a client for a method of the contract: it sends the call, and reads the answer."""
    name = contract.__name__
    call, signature = CALLS[name], _SIGNATURES[name]

    async def send(self: RemoteEngine, *values: Any, **named: Any) -> Any:
        bound = signature.bind(self, *values, **named)
        bound.apply_defaults()
        sent = {parameter: value for parameter, value in bound.arguments.items() if parameter != "self"}
        fields = {parameter: WRITERS.get(parameter, _unchanged)(value) for parameter, value in sent.items()}
        if (sampling := fields.pop("sampling", None)) is not None:
            fields |= _sampling_fields(sampling)
        # Longer than the engine's own deadline, so that the engine's error arrives instead of a timeout of this call.
        answer = await self.ask(name, fields, getattr(self, call.deadline) + sent.get("timeout_s", 0.0))
        if call.result is None:
            return None
        try:
            return call.read(answer.get(call.result) if call.optional else answer[call.result], sent)
        except (KeyError, TypeError, ValueError, AttributeError, WireError) as error:
            raise self.unreadable(f"{self.name}: {name}: the answer cannot be read ({error!r:.200})") from error

    send.__name__, send.__doc__ = name, contract.__doc__
    return send  # type: ignore[return-value]


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

    generate = _remote(InferenceEngine.generate)
    logprobs = _remote(InferenceEngine.logprobs)
    top_logprobs = _remote(InferenceEngine.top_logprobs)
    receivers = _remote(InferenceEngine.receivers)
    locations = _remote(InferenceEngine.locations)
    needs = _remote(InferenceEngine.needs)
    quantised = _remote(InferenceEngine.quantised)
    begin_update = _remote(InferenceEngine.begin_update)
    verify = _remote(InferenceEngine.verify)
    commit = _remote(InferenceEngine.commit)
    drop = _remote(InferenceEngine.drop)
    version = _remote(InferenceEngine.version)
    load_adapter = _remote(InferenceEngine.load_adapter)
    pause = _remote(InferenceEngine.pause)
    sleep = _remote(InferenceEngine.sleep)
    resume = _remote(InferenceEngine.resume)


def read_call(name: str, arguments: Mapping[str, Any]) -> EngineCall:
    """Parse an untrusted call; return a function that runs it on an engine.

    Raises:
        WireError: the call is unknown, or an argument is missing, unknown or out of bounds.
    """
    if name not in CALLS:
        raise WireError(f"unknown call {name!r:.80}; known: {', '.join(CALLS)}")
    fields, call = Arguments(name, arguments), CALLS[name]
    parameters = list(_SIGNATURES[name].parameters.values())[1:]  # without self
    values = [PARAMETERS[parameter.name](fields, parameter.default) for parameter in parameters]
    fields.check_empty()

    async def run(engine: InferenceEngine) -> dict[str, Any]:
        result = await getattr(engine, name)(*values)
        return {} if call.result is None or (call.optional and result is None) else {call.result: call.write(result)}

    return run
