"""Calls to a rollout controller, for programs with an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h11

from megascend.errors import (
    ControllerBusyError,
    ControllerError,
    ControllerLostError,
    ControllerRestartedError,
    LeaseLapsedError,
    MegascendError,
    MessageError,
    RolloutTaskError,
)
from megascend.rollout.controller.address import Address, read_address
from megascend.rollout.controller.messages import AUDIENCE, new_id, read_answer, write_call
from megascend.rollout.http_client import Answer, exchange
from weightwire.auth import ANSWER_HEADER, check_answer, sign
from weightwire.errors import AuthError
from weightwire.keys import Key
from weightwire.offer import Offer, Seal

log = logging.getLogger(__name__)
FIRST_DELAY_S, LONGEST_DELAY_S = 0.05, 2.0
MAX_ANSWER_BYTES = 64 * 2**20
RELEASE_S = 10.0
"""How long the end of a claim's block tries to release it; after that its lease does."""


class AsyncControllerClient:
    """Calls a controller; what breaks on the way is said again, under the same id, until the deadline.

    Args:
        where: the file that the controller publishes its address in, or ``HOST:PORT``. A file is read again when the controller
            cannot be reached, so that one that was restarted on another port is found.
        caller: who calls; for the controller's log.
        timeout_s: of a call, all attempts together, in seconds; for calls that may take long, beyond the time they are given.
    """

    def __init__(self, where: str | Path, key: Key, *, caller: str, timeout_s: float = 60.0) -> None:
        self._where = where
        self._key = key
        self._caller = caller
        self._timeout_s = timeout_s
        self._instance = ""
        self._hello = asyncio.Lock()

    @property
    def instance(self) -> str:
        """Of the controller that answered last; empty before the first answer."""
        return self._instance

    async def status(self) -> dict[str, Any]:
        """Engines with their owners, counts of rollouts."""
        return await self.call("/v1/status")

    @contextlib.asynccontextmanager
    async def claim(
        self, owner: str, engines: Sequence[str] | None = None, *, lease_s: float = 60.0, wait_s: float = 0.0
    ) -> AsyncIterator[AsyncClaim]:
        """Own engines (None: all) for a block. The lease is renewed while it runs; at its end they are released.

        Args:
            wait_s: how long to wait for another owner to give them up.

        Raises:
            EngineOwnedError: another owner has one of them; the message names it.
        """
        arguments = {
            "owner": owner,
            "engines": None if engines is None else list(engines),
            "lease_s": lease_s,
            "wait_s": wait_s,
        }
        answer = await self.call("/v1/claim", arguments, takes_s=wait_s)
        claim = AsyncClaim(self, answer["claim"], tuple(answer["engines"]))
        renewing = asyncio.ensure_future(claim._renew(lease_s))
        try:
            yield claim
        finally:
            renewing.cancel()
            await claim._release()

    async def expect(self, rollouts: Sequence[str], deadline_s: float) -> None:
        """Announce rollouts, by names of their own, before they are asked for."""
        await self.call("/v1/rollouts/expect", {"rollouts": list(rollouts), "deadline_s": deadline_s})

    async def complete(self, rollout: str, result: Mapping[str, Any]) -> None:
        """Give a rollout its result.

        Raises:
            RolloutTaskError: nobody waits for it (any more).
        """
        await self.call("/v1/rollouts/complete", {"rollout": rollout, "result": dict(result)})

    async def fail(self, rollout: str, reason: str) -> None:
        """Tell that a rollout has failed."""
        await self.call("/v1/rollouts/fail", {"rollout": rollout, "reason": reason[:4000]})

    async def results(
        self, rollouts: Iterable[str], hold_s: float = 60.0
    ) -> AsyncIterator[tuple[str, dict[str, Any] | RolloutTaskError]]:
        """Each announced rollout with its result or error, as they are completed.

        One request waits at the controller; it is answered when something is there, and said again after ``hold_s``.
        """
        left = dict.fromkeys(rollouts)
        while left:
            answer = await self.call("/v1/rollouts/wait", {"rollouts": list(left), "timeout_s": hold_s}, takes_s=hold_s)
            found = {**answer["results"], **{name: RolloutTaskError(why) for name, why in answer["failures"].items()}}
            if found:
                await self.call("/v1/rollouts/forget", {"rollouts": list(found)})
            for name, result in found.items():
                del left[name]
                yield name, result

    async def call(
        self, route: str, arguments: Mapping[str, Any] | None = None, *, takes_s: float = 0.0
    ) -> dict[str, Any]:
        """Ask for one thing; returns its result.

        Args:
            takes_s: how long the controller itself may take.

        Raises:
            ControllerRestartedError: the controller is another one than in the call before. What was asked of the former is not
                asked of this one; the next call is.
            ControllerLostError: it could not be reached, or did not answer, within the time.
            ControllerBusyError: it was busy all the time.
            AuthError: it refuses our signature, or what answers does not have the key.
            MegascendError: it refused, or an engine did; the class is that of the error there.
        """
        if not self._instance and route != "/v1/hello":
            async with self._hello:
                if not self._instance:
                    await self._deliver("/v1/hello", write_call("", new_id(), self._caller, {}))
        return await self._deliver(route, write_call(self._instance, new_id(), self._caller, arguments or {}), takes_s)

    async def _deliver(self, route: str, body: bytes, takes_s: float = 0.0) -> dict[str, Any]:
        """Say one call until it is answered.

        An attempt has ``takes_s`` more than the client's time; once one has failed, the others together have the client's time.
        """
        loop = asyncio.get_running_loop()
        delay, deadline = FIRST_DELAY_S, loop.time() + self._timeout_s + takes_s
        failed, problem = False, None
        while True:
            try:
                attempt = self._attempt(read_address(self._where), route, body)
                result = await asyncio.wait_for(attempt, deadline - loop.time())
            except AuthError:
                raise
            except (OSError, EOFError, h11.RemoteProtocolError, asyncio.TimeoutError) as error:
                if problem is None or not isinstance(error, asyncio.TimeoutError):
                    problem = error  # the last attempt, cut short, tells nothing new
            else:
                if not isinstance(result, MegascendError):
                    return result
                if not isinstance(result, ControllerBusyError):
                    raise result
                problem = result
            if not failed:
                failed, deadline = True, min(deadline, loop.time() + self._timeout_s)
            pause = delay * random.uniform(0.5, 1.0)
            if loop.time() + pause >= deadline:
                kind = ControllerBusyError if isinstance(problem, ControllerBusyError) else ControllerLostError
                told = f"{type(problem).__name__}: {problem}"
                raise kind(f"no answer from the rollout controller ({self._where}) to {route} in time; at last: {told}")
            await asyncio.sleep(pause)
            delay = min(2 * delay, LONGEST_DELAY_S)

    async def _attempt(self, address: Address, route: str, body: bytes) -> dict[str, Any] | MegascendError:
        """Say one call once; each attempt is signed anew. What the controller answers is returned, errors too.

        Raises:
            AuthError: the controller refuses our signature.
            OSError: as :func:`exchange`; and something else answers than our controller, which may yet come.
        """
        signed = sign(self._key, "POST", route, body, audience=AUDIENCE)
        answer, headers = await exchange(
            address.host, address.port, route, signed.headers, body, max_answer_bytes=MAX_ANSWER_BYTES
        )
        signature = headers.get(ANSWER_HEADER.lower())
        if answer.status == 401 and signature is None:
            raise AuthError(f"{address} refuses our signature: {_told(answer)}")
        if answer.status == 503 and signature is None:  # whoever says so, another attempt does no harm
            return ControllerBusyError(_told(answer))
        try:
            check_answer(self._key, signed.nonce, answer.status, answer.body, signature)
        except AuthError as error:
            raise ConnectionError(f"{address} is not our rollout controller: {error}") from None
        self._instance, result = read_answer(answer)
        return result


def _told(answer: Answer) -> str:
    """What an answer says that nobody has signed: for people."""
    try:
        _, result = read_answer(answer)
    except MessageError:
        return f"status {answer.status}"
    return str(result)[:500]


class AsyncClaim:
    """Engines that are ours for a while.

    Attributes:
        engines: their names.
    """

    def __init__(self, client: AsyncControllerClient, claim_id: str, engines: tuple[str, ...]) -> None:
        self._client = client
        self._id = claim_id
        self.engines = engines
        self._lost: MegascendError | None = None

    async def init_group(self) -> dict[str, int]:
        """Engine -> how many members of an update's group it is; the trainer is member 0, they follow in this order."""
        answer = await self._call("/v1/init_group")
        return dict(answer["receivers"])

    async def begin_update(self, offer: Offer) -> None:
        """Have all engines receive what is offered, as if to one engine of all members: ``first`` 1, ``workers`` their sum."""
        await self._call("/v1/begin_update", offer=offer.to_json())

    async def verify(self, seal: Seal, timeout_s: float) -> None:
        """Wait until all engines have all of it."""
        await self._call("/v1/verify", timeout_s, seal=seal.to_json(), timeout_s=timeout_s)

    async def commit(self, update: str) -> None:
        """Put what all engines have verified in force."""
        await self._call("/v1/commit", update=update)

    async def finish_update(self, seal: Seal, timeout_s: float) -> None:
        """Verify on all engines, then commit on all."""
        await self._call("/v1/finish_update", timeout_s, seal=seal.to_json(), timeout_s=timeout_s)

    async def drop(self, update: str) -> None:
        """Give up an update."""
        await self._call("/v1/drop", update=update)

    async def pause(self, lease_s: float) -> None:
        """Stop sampling for at most ``lease_s``; called again, for that long from then on."""
        await self._call("/v1/pause", lease_s=lease_s)

    async def resume(self) -> None:
        """End the pause."""
        await self._call("/v1/continue")

    @contextlib.asynccontextmanager
    async def paused(self, lease_s: float) -> AsyncIterator[None]:
        """Pause for a block, which has ``lease_s`` for what it does."""
        await self.pause(lease_s)
        try:
            yield
        finally:
            await self.resume()

    async def _call(self, route: str, takes_s: float = 0.0, /, **arguments: Any) -> dict[str, Any]:
        if self._lost is not None:
            raise LeaseLapsedError(f"the engines {', '.join(self.engines)} are not ours any more: {self._lost}")
        return await self._client.call(route, {"claim": self._id, **arguments}, takes_s=takes_s)

    async def _renew(self, lease_s: float) -> None:
        """Renew the lease thrice in its time, until it is lost."""
        while True:
            await asyncio.sleep(lease_s / 3)
            try:
                await self._call("/v1/renew", lease_s=lease_s)
            except (LeaseLapsedError, ControllerRestartedError) as error:
                self._lost = error
                log.error("engines %s are not ours any more: %s", ", ".join(self.engines), error)
                return
            except (ControllerError, AuthError) as error:
                log.warning(
                    "the claim on %s could not be renewed, will be tried again: %s", ", ".join(self.engines), error
                )

    async def _release(self) -> None:
        try:
            await asyncio.wait_for(self._call("/v1/release"), RELEASE_S)
        except (ControllerError, AuthError, asyncio.TimeoutError) as error:  # its lease ends it
            log.warning("the claim on %s could not be released: %s", ", ".join(self.engines), error)
