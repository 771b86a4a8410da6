"""What can be asked of a controller over HTTP: each route's arguments, checked, and what it does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megascend.errors import MessageError
from megascend.rollout.controller.controller import Controller
from megascend.rollout.controller.ownership import Claim
from weightwire.errors import WireError
from weightwire.offer import Offer, Seal

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[!-~]([ -~]*[!-~])?$")]
Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
ClaimId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
MAX_NAMES = 8192
MAX_RESULTS_BYTES = 32 * 2**20
"""Of results in one answer, unless a single one is larger."""


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Nothing(_Arguments):
    pass


class ClaimEngines(_Arguments):
    owner: Name
    engines: Annotated[list[Name], Field(max_length=MAX_NAMES)] | None = None
    lease_s: Seconds
    wait_s: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)] = 0.0


class Owned(_Arguments):
    claim: ClaimId


class Leased(Owned):
    lease_s: Seconds


class Offered(Owned):
    offer: dict[str, Any]


class Sealed(Owned):
    seal: dict[str, Any]
    timeout_s: Seconds


class Named(Owned):
    update: Annotated[str, Field(min_length=1, max_length=256)]


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


F = TypeVar("F", Offer, Seal)
Run = Callable[[Controller, Any, int], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Route:
    """One thing to ask for.

    Attributes:
        run: called with the controller, the arguments and the size of the body.
        once: it has an effect, so a repeated call gets the first answer.
    """

    arguments: type[_Arguments]
    run: Run
    once: bool = True

    def read(self, arguments: dict[str, Any]) -> Any:
        """The arguments, checked.

        Raises:
            MessageError: what is wrong with each.
        """
        try:
            return self.arguments.model_validate(arguments)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False, include_context=False)[:5]
            told = "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in problems)
            raise MessageError(f"arguments: {told}") from None


async def _hello(controller: Controller, arguments: Nothing, size: int) -> dict[str, Any]:
    return {}


async def _status(controller: Controller, arguments: Nothing, size: int) -> dict[str, Any]:
    return controller.status()


async def _claim(controller: Controller, arguments: ClaimEngines, size: int) -> dict[str, Any]:
    return _claimed(
        await controller.claim(arguments.owner, arguments.engines, lease_s=arguments.lease_s, wait_s=arguments.wait_s)
    )


async def _renew(controller: Controller, arguments: Leased, size: int) -> dict[str, Any]:
    return _claimed(controller.renew(arguments.claim, arguments.lease_s))


def _claimed(claim: Claim) -> dict[str, Any]:
    return {"claim": claim.id, "engines": list(claim.engines), "lease_s": claim.lease_s}


async def _release(controller: Controller, arguments: Owned, size: int) -> dict[str, Any]:
    await controller.release(arguments.claim)
    return {}


async def _init_group(controller: Controller, arguments: Owned, size: int) -> dict[str, Any]:
    receivers = await controller.init_group(arguments.claim)
    return {"receivers": [[name, count] for name, count in receivers.items()]}


async def _begin(controller: Controller, arguments: Offered, size: int) -> dict[str, Any]:
    await controller.begin_update(arguments.claim, _read(Offer, arguments.offer))
    return {}


async def _verify(controller: Controller, arguments: Sealed, size: int) -> dict[str, Any]:
    await controller.verify(arguments.claim, _read(Seal, arguments.seal), arguments.timeout_s)
    return {}


async def _finish(controller: Controller, arguments: Sealed, size: int) -> dict[str, Any]:
    await controller.finish_update(arguments.claim, _read(Seal, arguments.seal), arguments.timeout_s)
    return {}


async def _commit(controller: Controller, arguments: Named, size: int) -> dict[str, Any]:
    await controller.commit(arguments.claim, arguments.update)
    return {}


async def _drop(controller: Controller, arguments: Named, size: int) -> dict[str, Any]:
    await controller.drop(arguments.claim, arguments.update)
    return {}


def _read(kind: type[F], data: dict[str, Any]) -> F:
    try:
        return kind.from_json(data)
    except WireError as error:
        raise MessageError(str(error)) from None


async def _pause(controller: Controller, arguments: Leased, size: int) -> dict[str, Any]:
    await controller.pause(arguments.claim, arguments.lease_s)
    return {}


async def _continue(controller: Controller, arguments: Owned, size: int) -> dict[str, Any]:
    await controller.resume(arguments.claim)
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


ROUTES = {
    "/v1/hello": Route(Nothing, _hello, once=False),
    "/v1/status": Route(Nothing, _status, once=False),
    "/v1/claim": Route(ClaimEngines, _claim),
    "/v1/renew": Route(Leased, _renew, once=False),
    "/v1/release": Route(Owned, _release),
    "/v1/init_group": Route(Owned, _init_group),
    "/v1/begin_update": Route(Offered, _begin),
    "/v1/verify": Route(Sealed, _verify),
    "/v1/commit": Route(Named, _commit),
    "/v1/finish_update": Route(Sealed, _finish),
    "/v1/drop": Route(Named, _drop),
    "/v1/pause": Route(Leased, _pause),
    "/v1/continue": Route(Owned, _continue),
    "/v1/rollouts/expect": Route(Expected, _expect),
    "/v1/rollouts/complete": Route(Completed, _complete),
    "/v1/rollouts/fail": Route(Failed, _fail),
    "/v1/rollouts/wait": Route(Awaited, _wait, once=False),
    "/v1/rollouts/forget": Route(Fetched, _forget, once=False),
}
"""Path -> route. All are POST."""
