"""Calls that a controller answers over HTTP: validation of their arguments, and execution."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megascend.apps.rl.rollout.controller.controller import Claim, Controller
from megascend.apps.rl.rollout.controller.messages import problems
from megascend.errors import MessageError
from weightwire.errors import WireError
from weightwire.remote_engine import CALLS, read_call

PREFIX = "/v1/"
MAX_NAMES = 8192
MAX_RESULTS_BYTES = 32 * 2**20
"""Maximum bytes of results in one answer, unless a single result is larger."""

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[!-~]([ -~]*[!-~])?$")]
Names = Annotated[list[Name], Field(max_length=MAX_NAMES)]
SomeNames = Annotated[list[Name], Field(min_length=1, max_length=MAX_NAMES)]
Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]


class ControllerCall(BaseModel):
    """A call of the controller, with its arguments.

    Attributes:
        once: it has side effects, so a repeated call gets the first answer.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    once: ClassVar[bool] = True

    async def run(self, controller: Controller, size: int) -> dict[str, Any]:
        """Execute the call, whose body has ``size`` bytes, and return its result."""
        raise NotImplementedError


class Hello(ControllerCall):
    once = False

    async def run(self, controller: Controller, size: int) -> dict[str, Any]:
        return {}


class Status(ControllerCall):
    once = False

    async def run(self, controller: Controller, size: int) -> dict[str, Any]:
        return controller.status()


class ClaimEngines(ControllerCall):
    owner: Name
    engines: Names | None = None
    lease_s: Seconds
    wait_s: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)] = 0.0

    async def run(self, controller: Controller, size: int) -> dict[str, Any]:
        return _claimed(await controller.claim(self.owner, self.engines, lease_s=self.lease_s, wait_s=self.wait_s))


class ClaimedCall(ControllerCall):
    """A call that needs a claim."""

    claim: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Renew(ClaimedCall):
    lease_s: Seconds
    once = False

    async def run(self, controller: Controller, size: int) -> dict[str, Any]:
        return _claimed(controller.renew(self.claim, self.lease_s))


class Release(ClaimedCall):
    async def run(self, controller: Controller, size: int) -> dict[str, Any]:
        await controller.release(self.claim)
        return {}


class Expect(ControllerCall):
    rollouts: SomeNames
    deadline_s: Seconds

    async def run(self, controller: Controller, size: int) -> dict[str, Any]:
        controller.tasks.expect_all(self.rollouts, self.deadline_s)
        return {}


class Complete(ControllerCall):
    rollout: Name
    result: dict[str, Any]

    async def run(self, controller: Controller, size: int) -> dict[str, Any]:
        controller.tasks.complete(self.rollout, self.result, size=size)
        return {}


class Fail(ControllerCall):
    rollout: Name
    reason: Annotated[str, Field(max_length=4000)]

    async def run(self, controller: Controller, size: int) -> dict[str, Any]:
        controller.tasks.fail(self.rollout, self.reason)
        return {}


class Wait(ControllerCall):
    rollouts: SomeNames
    timeout_s: Seconds
    once = False

    async def run(self, controller: Controller, size: int) -> dict[str, Any]:
        outcomes = await controller.tasks.wait(self.rollouts, self.timeout_s, MAX_RESULTS_BYTES)
        results = {name: result for name, result in outcomes.items() if not isinstance(result, Exception)}
        failures = {name: str(error) for name, error in outcomes.items() if isinstance(error, Exception)}
        return {"results": results, "failures": failures}


class Forget(ControllerCall):
    rollouts: Names
    once = False

    async def run(self, controller: Controller, size: int) -> dict[str, Any]:
        controller.tasks.forget(self.rollouts)
        return {}


def _claimed(claim: Claim) -> dict[str, Any]:
    return {"claim": claim.id, "engines": list(claim.engines), "lease_s": claim.lease_s}


CONTROLLER_CALLS: dict[str, type[ControllerCall]] = {
    "hello": Hello,
    "status": Status,
    "claim": ClaimEngines,
    "renew": Renew,
    "release": Release,
    "rollouts/expect": Expect,
    "rollouts/complete": Complete,
    "rollouts/fail": Fail,
    "rollouts/wait": Wait,
    "rollouts/forget": Forget,
}
"""Calls of the controller, in addition to those of an engine (:data:`weightwire.remote_engine.CALLS`), which need a claim."""
NOT_SERVED = {"sleep"}
"""Calls of an engine that a controller does not offer: its engines share no GPU with a trainer."""
ROUTES = tuple(PREFIX + name for name in (*CONTROLLER_CALLS, *(call for call in CALLS if call not in NOT_SERVED)))


@dataclass(frozen=True)
class ReadCall:
    """A call with validated arguments.

    Attributes:
        once: as of :class:`ControllerCall`.
    """

    run: Callable[[Controller], Awaitable[dict[str, Any]]]
    once: bool


def read_route(target: str, values: dict[str, Any], size: int) -> ReadCall:
    """Parse a call, whose body has ``size`` bytes."""
    name = target.removeprefix(PREFIX)
    if target not in ROUTES:
        raise MessageError(f"unknown route POST {target[:200]}; known: POST {', '.join(ROUTES)}")
    try:
        if name in CONTROLLER_CALLS:
            service = CONTROLLER_CALLS[name].model_validate(values)
            return ReadCall(lambda controller: service.run(controller, size), service.once)
        # An engine's calls are parsed by weightwire; the claim is this controller's own.
        claim = ClaimedCall.model_validate({"claim": values.get("claim")}).claim
        run = read_call(name, {key: value for key, value in values.items() if key != "claim"})
    except ValidationError as error:
        raise MessageError(f"arguments: {problems(error)}") from None
    except WireError as error:
        raise MessageError(f"arguments: {error}") from None
    return ReadCall(lambda controller: run(controller.engine(claim)), not CALLS[name].reads)
