"""Messages between callers and the controller: JSON, with a version. Pure.

A call has the fields ``version`` (1), ``instance`` (of the controller that the caller knows), ``id`` (the same in every
attempt), ``caller`` and ``arguments``; an answer has ``version``, ``instance`` and either ``result`` or ``error``, which has
``kind`` and ``message``.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megascend.apps.rl.rollout.http_client import Answer
from megascend.errors import (
    ControllerBusyError,
    ControllerError,
    ControllerLostError,
    ControllerRestartedError,
    EngineError,
    EngineLostError,
    EngineOwnedError,
    EngineTimeoutError,
    LeaseLapsedError,
    MegascendError,
    MessageError,
    RolloutTaskError,
)
from weightwire.errors import UnsupportedCallError

VERSION = 1
AUDIENCE = "megascend rollout controller"
"""Audience that callers sign."""
BEARER = "rollout controller"
"""Purpose of bearer tokens, which the server accepts if configured to: ``key.bearer_token(BEARER)``."""
_KINDS: dict[str, tuple[int, type[Exception]]] = {
    "malformed": (400, MessageError),
    "not_expected": (404, RolloutTaskError),
    "owned": (409, EngineOwnedError),
    "lapsed": (409, LeaseLapsedError),
    "restarted": (409, ControllerRestartedError),
    "busy": (503, ControllerBusyError),
    "closing": (503, ControllerLostError),
    "refused": (409, ControllerError),
    "engine_lost": (502, EngineLostError),
    "engine_timeout": (504, EngineTimeoutError),
    "engine": (502, EngineError),
    "unsupported": (501, UnsupportedCallError),
    "internal": (500, ControllerError),
}
"""Kind -> HTTP status and class, subclasses before their bases."""


class Call(BaseModel):
    """A call, with the fields that all routes share."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    version: Literal[1]
    instance: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")]
    id: Annotated[str, Field(pattern=r"^[0-9]{13}-[0-9a-f]{16,64}$")]
    caller: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
    arguments: dict[str, Any]

    @property
    def created(self) -> float:
        """Time of the first attempt, in seconds since 1970 by the caller's clock."""
        return int(self.id[:13]) / 1000


def new_id(clock: Callable[[], float] = time.time) -> str:
    return f"{int(clock() * 1000):013d}-{secrets.token_hex(16)}"


def write_call(instance: str, call_id: str, caller: str, arguments: Mapping[str, Any]) -> bytes:
    """Encode a call. ``instance`` is empty in the first call, which requests it."""
    return _dump(
        {"version": VERSION, "instance": instance, "id": call_id, "caller": caller, "arguments": dict(arguments)}
    )


def read_call(body: bytes) -> Call:
    data = read_object(body)
    _check_version(data)
    try:
        return Call.model_validate(data)
    except ValidationError as error:
        raise MessageError(f"call: {problems(error)}") from None


def problems(error: ValidationError) -> str:
    """Describe what is wrong with a message without its content, which may hold prompts: the text goes to a log."""
    entries = error.errors(include_url=False, include_input=False, include_context=False)[:5]
    return "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in entries)


def write_result(instance: str, result: Mapping[str, Any]) -> Answer:
    return Answer(200, _dump({"version": VERSION, "instance": instance, "result": dict(result)}))


def write_error(instance: str, error: Exception) -> Answer:
    # Errors cross as kinds: another version may not have the class.
    kind = next((kind for kind, (_, error_type) in _KINDS.items() if isinstance(error, error_type)), "internal")
    status, _ = _KINDS[kind]
    message = (
        str(error) if kind != "internal" or isinstance(error, MegascendError) else f"{type(error).__name__}: {error}"
    )
    fields = {"kind": kind, "message": message[:4000]}
    return Answer(status, _dump({"version": VERSION, "instance": instance, "error": fields}))


def read_answer(answer: Answer) -> tuple[str, dict[str, Any] | Exception]:
    """Parse an answer; return the instance that sent it, and its result or error."""
    data = read_object(answer.body)
    _check_version(data)
    instance = data.get("instance")
    if not isinstance(instance, str):
        raise MessageError("the answer names no instance")
    result, error = data.get("result"), data.get("error")
    if answer.status == 200 and isinstance(result, dict) and error is None:
        return instance, result
    if answer.status == 200 or not isinstance(error, dict) or not isinstance(error.get("message"), str):
        raise MessageError(f"an answer (status {answer.status}) with neither result nor error")
    _, kind = _KINDS.get(str(error.get("kind")), (500, ControllerError))
    return instance, kind(error["message"])


def _check_version(data: Mapping[str, Any]) -> None:
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise MessageError(f"version {data.get('version')!r} of the messages; this side speaks version {VERSION}")


def _dump(data: Mapping[str, Any]) -> bytes:
    try:
        # NaN is not JSON; Python would write it, and other parsers refuse it.
        return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageError(f"cannot be encoded as JSON: {error}") from error


def read_object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        if isinstance(error, MessageError):
            raise
        raise MessageError(f"not JSON: {type(error).__name__}: {str(error)[:200]}") from None
    if not isinstance(data, dict):
        raise MessageError("not a JSON object")
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json.loads would keep the last of two equal fields; another parser on the way may keep the first.
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise MessageError("a JSON object has a field twice")
    return fields


def _constant(name: str) -> NoReturn:
    raise MessageError(f"{name} is not JSON")


def _finite(text: str) -> float:
    # 1e999 is JSON, and would be an infinity that cannot be sent on: a rollout's result, for one, could never be fetched.
    number = float(text)
    if not math.isfinite(number):
        raise MessageError(f"{text[:40]} is too large")
    return number
