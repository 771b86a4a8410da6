"""Calls that a controller answers over HTTP: their arguments, checked, and what carries them out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megascend.errors import MessageError
from megascend.rollout.controller.controller import Controller
from megascend.rollout.controller.ownership import Claim
from weightwire.errors import WireError
from weightwire.remote_engine import CALLS, read_call

PREFIX = "/v1/"
MAX_NAMES = 8192
MAX_RESULTS_BYTES = 32 * 2**20
"""Bytes of results in one answer, unless a single one is larger."""
WITHOUT_EFFECT = {"generate", "logprobs", "receivers", "locations", "version"}
"""Calls of an engine that are carried out each time they are made."""

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[!-~]([ -~]*[!-~])?$")]
Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
ClaimId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ClaimEngines(_Arguments):
    owner: Name
    engines: Annotated[list[Name], Field(max_length=MAX_NAMES)] | None = None
    lease_s: Seconds
    wait_s: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)] = 0.0


class Owned(_Arguments):
    claim: ClaimId


class Renewed(Owned):
    lease_s: Seconds


class Expected(_Arguments):
    rollouts: Annotated[list[Name], Field(min_length=1, max_length=MAX_NAMES)]
    deadline_s: Seconds


class Completed(_Arguments):
    rollout: Name
    result: dict[str, Any]


class Failed(_Arguments):
    rollout: Name
    reason: Annotated[str, Field(max_length=4000)]


class Awaited(_Arguments):
    rollouts: Annotated[list[Name], Field(min_length=1, max_length=MAX_NAMES)]
    timeout_s: Seconds


class Fetched(_Arguments):
    rollouts: Annotated[list[Name], Field(max_length=MAX_NAMES)]


Run = Callable[[Controller, Any, int], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Service:
    """A call of the controller.

    Attributes:
        run: called with the controller, the arguments and the size of the body.
        once: it has an effect, so a repeated call gets the first answer.
    """

    arguments: type[_Arguments]
    run: Run
    once: bool = True


async def _hello(controller: Controller, arguments: _Arguments, size: int) -> dict[str, Any]:
    return {}


async def _status(controller: Controller, arguments: _Arguments, size: int) -> dict[str, Any]:
    return controller.status()


async def _claim(controller: Controller, arguments: ClaimEngines, size: int) -> dict[str, Any]:
    return _claimed(
        await controller.claim(arguments.owner, arguments.engines, lease_s=arguments.lease_s, wait_s=arguments.wait_s)
    )


async def _renew(controller: Controller, arguments: Renewed, size: int) -> dict[str, Any]:
    return _claimed(controller.renew(arguments.claim, arguments.lease_s))


def _claimed(claim: Claim) -> dict[str, Any]:
    return {"claim": claim.id, "engines": list(claim.engines), "lease_s": claim.lease_s}


async def _release(controller: Controller, arguments: Owned, size: int) -> dict[str, Any]:
    await controller.release(arguments.claim)
    return {}


async def _expect(controller: Controller, arguments: Expected, size: int) -> dict[str, Any]:
    controller.tasks.expect_all(arguments.rollouts, arguments.deadline_s)
    return {}


async def _complete(controller: Controller, arguments: Completed, size: int) -> dict[str, Any]:
    controller.tasks.complete(arguments.rollout, arguments.result, size=size)
    return {}


async def _fail(controller: Controller, arguments: Failed, size: int) -> dict[str, Any]:
    controller.tasks.fail(arguments.rollout, arguments.reason)
    return {}


async def _wait(controller: Controller, arguments: Awaited, size: int) -> dict[str, Any]:
    done = await controller.tasks.wait(arguments.rollouts, arguments.timeout_s, MAX_RESULTS_BYTES)
    results = {name: result for name, result in done.items() if not isinstance(result, Exception)}
    failures = {name: str(error) for name, error in done.items() if isinstance(error, Exception)}
    return {"results": results, "failures": failures}


async def _forget(controller: Controller, arguments: Fetched, size: int) -> dict[str, Any]:
    controller.tasks.forget(arguments.rollouts)
    return {}


SERVICES = {
    "hello": Service(_Arguments, _hello, once=False),
    "status": Service(_Arguments, _status, once=False),
    "claim": Service(ClaimEngines, _claim),
    "renew": Service(Renewed, _renew, once=False),
    "release": Service(Owned, _release),
    "rollouts/expect": Service(Expected, _expect),
    "rollouts/complete": Service(Completed, _complete),
    "rollouts/fail": Service(Failed, _fail),
    "rollouts/wait": Service(Awaited, _wait, once=False),
    "rollouts/forget": Service(Fetched, _forget, once=False),
}
"""Calls of the controller; beside them it has those of an engine (:data:`weightwire.remote_engine.CALLS`), with a claim."""
ROUTES = tuple(PREFIX + name for name in (*SERVICES, *CALLS))


@dataclass(frozen=True)
class ReadCall:
    """A call whose arguments were checked.

    Attributes:
        once: it has an effect, so a repeated call gets the first answer.
    """

    run: Callable[[Controller], Awaitable[dict[str, Any]]]
    once: bool


def read_route(target: str, values: dict[str, Any], size: int) -> ReadCall:
    """Check a call.

    Args:
        size: of its body, in bytes.

    Raises:
        MessageError: there is no such call, or what is wrong with each argument.
    """
    name = target.removeprefix(PREFIX)
    if target not in ROUTES:
        raise MessageError(f"there is no POST {target[:200]}; there is POST {', '.join(ROUTES)}")
    try:
        if name in SERVICES:
            service = SERVICES[name]
            arguments: Any = service.arguments.model_validate(values)
            return ReadCall(lambda controller: service.run(controller, arguments, size), service.once)
        claim = Owned.model_validate({"claim": values.get("claim")}).claim
        run = read_call(name, {key: value for key, value in values.items() if key != "claim"})
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)[:5]
        text = "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in problems)
        raise MessageError(f"arguments: {text}") from None
    except WireError as error:
        raise MessageError(f"arguments: {error}") from None
    return ReadCall(lambda controller: run(controller.engine(claim)), name not in WITHOUT_EFFECT)
