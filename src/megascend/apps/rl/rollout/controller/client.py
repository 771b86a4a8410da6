"""Client of a rollout controller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megascend.apps.rl.rollout.controller.address import Address, read_address
from megascend.apps.rl.rollout.controller.messages import AUDIENCE, new_id, read_answer, write_call
from megascend.apps.rl.rollout.http_client import Answer, UnreadableAnswerError, exchange
from megascend.errors import (
    ControllerBusyError,
    ControllerError,
    ControllerLostError,
    ControllerRestartedError,
    EngineError,
    EngineLostError,
    LeaseLapsedError,
    MessageError,
    RolloutTaskError,
)
from weightwire.auth import ANSWER_HEADER, check_answer, sign
from weightwire.engine_calls import LoopThread
from weightwire.errors import AuthError
from weightwire.keys import Key
from weightwire.remote_engine import RemoteEngine

log = logging.getLogger(__name__)
FIRST_DELAY_S, LONGEST_DELAY_S = 0.05, 2.0
MAX_ANSWER_BYTES = 64 * 2**20
COMMIT_S = 720.0
"""Deadline of a commit and of loading an adapter: longer than the controller's, so that its error arrives."""
RELEASE_S = 5.0
"""Deadline for releasing a claim, in seconds; after it the lease expires. Less than a collector's deadline to close."""


class ControllerClient:
    """Client of a controller that repeats a failed attempt, under the same call id, until the deadline.

    Args:
        source: the file in which the controller publishes its address, or ``HOST:PORT``. A file is read again when the controller
            cannot be reached, so that one restarted on another port is found.
        caller: name of this process, for the controller's log.
        timeout_s: deadline of a call with all its attempts, in seconds; added to the expected duration of long calls.

    Attributes:
        instance: of the controller that answered last; empty before the first answer.
    """

    def __init__(self, source: str | Path, key: Key, *, caller: str, timeout_s: float = 60.0) -> None:
        self._source = source
        self._key = key
        self._caller = caller
        self._timeout_s = timeout_s
        self.instance = ""
        self._hello = asyncio.Lock()

    async def status(self) -> dict[str, Any]:
        """Return engines with their owners, and counts of rollouts."""
        return await self.call("/v1/status")

    async def expect(self, rollouts: Sequence[str], deadline_s: float) -> None:
        """Announce rollouts, by unique names, before they are requested."""
        await self.call("/v1/rollouts/expect", {"rollouts": list(rollouts), "deadline_s": deadline_s})

    async def complete(self, rollout: str, result: Mapping[str, Any]) -> None:
        await self.call("/v1/rollouts/complete", {"rollout": rollout, "result": dict(result)})

    async def fail(self, rollout: str, reason: str) -> None:
        await self.call("/v1/rollouts/fail", {"rollout": rollout, "reason": reason[:4000]})

    async def results(
        self, rollouts: Iterable[str], hold_s: float = 60.0
    ) -> AsyncIterator[tuple[str, dict[str, Any] | RolloutTaskError]]:
        """Yield each announced rollout with its result or error, in the order of completion.

        A request is held at the controller until results are available, and repeated after ``hold_s`` (long polling).
        """
        pending = dict.fromkeys(rollouts)
        while pending:
            arguments = {"rollouts": list(pending), "timeout_s": hold_s}
            answer = await self.call("/v1/rollouts/wait", arguments, takes_s=hold_s)
            failures = {name: RolloutTaskError(reason) for name, reason in answer["failures"].items()}
            results = {**answer["results"], **failures}
            if results:
                # A controller that has closed keeps nothing, and these results are still valid.
                with contextlib.suppress(ControllerLostError):
                    await self.call("/v1/rollouts/forget", {"rollouts": list(results)})
            for name, result in results.items():
                # Before the yield: a consumer that stops here must not be given the result again.
                del pending[name]
                yield name, result

    async def call(
        self, route: str, arguments: Mapping[str, Any] | None = None, *, takes_s: float = 0.0
    ) -> dict[str, Any]:
        """Make a call and return its result.

        Args:
            takes_s: expected duration in the controller, in seconds.

        Raises:
            ControllerRestartedError: the controller was replaced since the last call. This call is not repeated on the new one;
                the next call goes there.
            ControllerLostError: it could not be reached, or did not answer before the deadline.
            ControllerBusyError: it was busy until the deadline.
            AuthError: it refuses our signature, or the answer is not from a holder of the key.
            MegascendError: it refused, or an engine did; the class is that of the error there.
        """
        # The first call learns the instance. Without it a controller that was restarted in between could not be told apart.
        if not self.instance and route != "/v1/hello":
            # One greeting for calls that start together.
            async with self._hello:
                if not self.instance:
                    await self._deliver("/v1/hello", write_call("", new_id(), self._caller, {}))
        return await self._deliver(route, write_call(self.instance, new_id(), self._caller, arguments or {}), takes_s)

    async def _deliver(self, route: str, body: bytes, takes_s: float = 0.0) -> dict[str, Any]:
        """Send a call until it is answered.

        The first attempt has ``takes_s`` more than the client's deadline; once one has failed, all others share the client's.
        """
        loop = asyncio.get_running_loop()
        delay, deadline = FIRST_DELAY_S, loop.time() + self._timeout_s + takes_s
        failed, problem = False, None
        while True:
            try:
                # Read for each attempt: a controller that was restarted has another port.
                attempt = self._attempt(read_address(self._source), route, body)
                # Each attempt has all that is left: a call that waits in the controller must not be cut short.
                result = await asyncio.wait_for(attempt, deadline - loop.time())
            # Not worth another attempt: the same key would be refused again.
            except AuthError:
                raise
            except (OSError, UnreadableAnswerError, asyncio.TimeoutError) as error:
                if problem is None or not isinstance(error, asyncio.TimeoutError):
                    problem = error  # the timeout of the last, shortened attempt must not hide an earlier reason
            else:
                if not isinstance(result, Exception):
                    return result
                if not isinstance(result, ControllerBusyError):
                    raise result
                problem = result
            if not failed:
                failed, deadline = True, min(deadline, loop.time() + self._timeout_s)
            # At random: all workers lose a controller at the same moment.
            pause = delay * random.uniform(0.5, 1.0)
            if loop.time() + pause >= deadline:
                kind = ControllerBusyError if isinstance(problem, ControllerBusyError) else ControllerLostError
                reason = f"{type(problem).__name__}: {problem}"
                raise kind(
                    f"no answer from the rollout controller ({self._source}) to {route} in time; at last: {reason}"
                )
            await asyncio.sleep(pause)
            delay = min(2 * delay, LONGEST_DELAY_S)

    async def _attempt(self, address: Address, route: str, body: bytes) -> dict[str, Any] | Exception:
        """Send a call once, with a new signature. Return the controller's answer, including errors."""
        signed = sign(self._key, "POST", route, body, audience=AUDIENCE)
        answer = await exchange("POST", f"http://{address}{route}", body, signed.headers, max_bytes=MAX_ANSWER_BYTES)
        signature = answer.headers.get(ANSWER_HEADER)
        if answer.status == 401 and signature is None:
            raise AuthError(f"{address} refuses our signature: {_unsigned_text(answer)}")
        if answer.status == 503 and signature is None:  # not authenticated, but another attempt does no harm
            return ControllerBusyError(_unsigned_text(answer))
        try:
            check_answer(self._key, signed.nonce, answer.status, answer.body, signature)
        except AuthError as error:
            # As a broken connection, which is tried again: another program may have got the port of a controller that
            # was restarted.
            raise ConnectionError(f"{address} is not our rollout controller: {error}") from None
        self.instance, result = read_answer(answer)
        return result


def _unsigned_text(answer: Answer) -> str:
    """Return the text of an answer without a signature, only for messages."""
    try:
        _, result = read_answer(answer)
    except MessageError:
        return f"status {answer.status}"
    return str(result)[:500]


class ControllerEngine(RemoteEngine):
    """Engines of a controller as one engine with all their members. A context manager; may be used from several event loops.

    The first call claims them, and so does the first one after the claim was lost; :meth:`close` releases them.

    Args:
        source: as of :class:`ControllerClient`.
        engines: names of the engines; default: all.
        lease_s: others may claim the engines when this process has been silent for so many seconds.
        wait_s: longest wait for another owner to release them, in seconds.

    Raises, in any method:
        EngineError, EngineLostError, EngineTimeoutError: the controller cannot be reached, refused, or its engines failed.
        UnsupportedCallError: the engines of a controller do not have this call.
    """

    unreadable = EngineError
    commit_s = COMMIT_S

    def __init__(
        self,
        source: str | Path,
        key: Key,
        *,
        owner: str,
        engines: Sequence[str] | None = None,
        lease_s: float = 60.0,
        wait_s: float = 0.0,
        generate_timeout_s: float = 600.0,
        timeout_s: float = 60.0,
    ) -> None:
        names = "engines" if engines is None else ", ".join(engines)
        self.name = f"{names} of the controller {source}"
        self.answer_s = generate_timeout_s
        self._lease_s, self._wait_s = lease_s, wait_s
        self._claim_arguments = {
            "owner": owner,
            "engines": None if engines is None else list(engines),
            "lease_s": lease_s,
            "wait_s": wait_s,
        }
        self._client = ControllerClient(source, key, caller=owner, timeout_s=timeout_s)
        # A loop of its own, so that the lease is renewed while the program computes a step.
        self._thread = LoopThread("controller engine")
        self._claiming = asyncio.Lock()
        self._claim = ""  # its secret; empty before the first call, and once it is lost
        self._renewing: asyncio.Task[None] | None = None

    async def ask(self, call: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        return await asyncio.wrap_future(self._thread.submit(self._ask(call, arguments, timeout_s)))

    async def _ask(self, call: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        try:
            async with self._claiming:
                if not self._claim:
                    answer = await self._client.call("/v1/claim", self._claim_arguments, takes_s=self._wait_s)
                    self._claim = answer["claim"]
                    self._renewing = asyncio.ensure_future(self._renew(self._claim))
            return await self._call(call, self._claim, arguments, max(0.0, timeout_s - self.control_s))
        except (ControllerLostError, LeaseLapsedError) as error:
            raise EngineLostError(f"{self.name}: {call}: {error}") from error
        except (ControllerError, AuthError) as error:
            raise EngineError(f"{self.name}: {call}: {error}") from error

    async def _call(self, call: str, claim: str, arguments: Mapping[str, Any], takes_s: float = 0.0) -> dict[str, Any]:
        try:
            return await self._client.call(f"/v1/{call}", {"claim": claim, **arguments}, takes_s=takes_s)
        except (LeaseLapsedError, ControllerRestartedError):
            if self._claim == claim:
                self._claim = ""
            raise

    async def _renew(self, claim: str) -> None:
        """Renew the lease at intervals of a third of its length, until it is lost."""
        while True:
            # Two renewals may be lost before the lease ends.
            await asyncio.sleep(self._lease_s / 3)
            if self._claim != claim:
                return
            try:
                await self._call("renew", claim, {"lease_s": self._lease_s})
            except (ControllerError, AuthError) as error:
                state = "could not be renewed, will retry" if self._claim == claim else "is lost"
                log.warning("the claim on %s %s: %s", self.name, state, error)

    async def _release(self) -> None:
        claim, self._claim = self._claim, ""
        if self._renewing is not None:
            # Before the release: a renewal after it would report a lost claim.
            self._renewing.cancel()
        if claim:
            try:
                await asyncio.wait_for(self._call("release", claim, {}), RELEASE_S)
            except (ControllerError, AuthError, asyncio.TimeoutError) as error:  # the lease will expire
                log.warning("the claim on %s could not be released: %s", self.name, error)

    async def close(self) -> None:
        """Release the engines. May be called twice."""
        with contextlib.suppress(RuntimeError):  # closed before
            await asyncio.wrap_future(self._thread.submit(self._release()))
        await asyncio.to_thread(self._thread.close)

    async def __aenter__(self) -> ControllerEngine:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
