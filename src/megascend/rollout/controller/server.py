"""The controller on the network: callers are authenticated, each call is carried out once, the address is published."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

from megascend.errors import (
    ConfigError,
    ControllerBusyError,
    ControllerLostError,
    ControllerRestartedError,
    MegascendError,
    MessageError,
)
from megascend.rollout.controller.address import Address, PublishedAddress
from megascend.rollout.controller.controller import Controller
from megascend.rollout.controller.http_server import HttpLimits, HttpServer, Refusal
from megascend.rollout.controller.messages import AUDIENCE, BEARER, Call, read_call, write_error, write_result
from megascend.rollout.controller.replies import Replies
from megascend.rollout.controller.routes import ROUTES, Route
from megascend.rollout.http_client import Answer
from weightwire.auth import Grant, Verifier, sign_answer
from weightwire.errors import AuthBusyError, AuthError
from weightwire.keys import Key

log = logging.getLogger(__name__)


class ControllerServer:
    """Serves a controller over HTTP, to callers that have the job's key.

        async with ControllerServer(Controller(engines), key, publish="run/controller.json") as server:
            await server.until_signal()

    Args:
        controller: closed with the server.
        publish: a file that the address is written to. A second controller for the same file is refused.
        advertise: the host that is published, where it is not ``host``: by which name others reach this machine.
        bearer: take bearer tokens as well (:data:`BEARER`); their answers are not signed, and nothing ties a token to a request.
        keep_s: how long a call may be said again, in seconds.
    """

    def __init__(
        self,
        controller: Controller,
        key: Key,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        publish: str | Path | None = None,
        advertise: str | None = None,
        limits: HttpLimits | None = None,
        bearer: bool = False,
        keep_s: float = 120.0,
        max_replies: int = 2**16,
        verifier: Verifier | None = None,
    ) -> None:
        self.controller = controller
        self._key = key
        self._where = (host, port)
        self._publish = publish
        self._advertise = advertise
        self._published: PublishedAddress | None = None
        self._verifier = verifier or Verifier(
            key, audience=AUDIENCE, bearer=BEARER if bearer else None, max_nonces=max(2**16, 2 * max_replies)
        )
        self._replies = Replies(keep_s=keep_s, max_replies=max_replies)
        self._http: HttpServer[Grant] = HttpServer(self, limits)
        self._stopping: str | None = None
        self._closed: asyncio.Future[None] | None = None
        self.address = Address(host, port)
        """Where it listens, once it does."""

    async def start(self) -> Address:
        """Listen, and publish the address.

        Raises:
            ConfigError: the port is taken, the host is not of this machine, or is all of its addresses and none is advertised.
            ControllerError: another controller holds the file.
        """
        if self._publish is not None and self._advertise is None and self._where[0] in ("", "0.0.0.0", "::"):
            raise ConfigError(
                f"host={self._where[0]!r} listens on all addresses; advertise= must tell which of them others connect to"
            )
        if self._publish is not None:
            self._published = PublishedAddress(self._publish)
        try:
            host, port = await self._http.start(*self._where)
        except OSError as error:
            self._withdraw()
            wanted, port = self._where
            raise ConfigError(
                f"the controller cannot listen on {wanted}:{port}: {error.strerror or error}; port 0 takes one that is free"
            ) from error
        self.address = Address(self._advertise or host, port, self.controller.instance)
        if self._published is not None:
            self._published.publish(self.address)
        if not ip_address(host).is_loopback:
            log.warning(
                "the controller listens on %s: calls are signed, but not encrypted; keep that network private", host
            )
        log.info("rollout controller %s listens on %s", self.controller.instance, self.address)
        return self.address

    async def close(self, why: str = "the controller is closing") -> None:
        """Take no more calls, close the controller (which continues what is paused), answer what is under way.

        Raises:
            EngineError: engines that could not be continued; everything else is done.
        """
        if self._closed is None:
            self._closed = asyncio.ensure_future(self._close(why))
        await asyncio.shield(self._closed)

    async def until_signal(self) -> signal.Signals:
        """Serve until SIGTERM or SIGINT comes, then close. In the main thread.

        Returns:
            The signal. A program ends with ``128 + signal``.
        """
        came: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
        with _handlers(came):
            which = await came
            log.warning("%s: the controller closes; what it has paused is continued", which.name)
            await self.close(f"the controller got {which.name}")
        return which

    async def __aenter__(self) -> ControllerServer:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # --- what the HTTP server asks ---

    def admit(self, method: str, target: str, authorization: str | None) -> Grant:
        """Verify a request's head."""
        try:
            return self._verifier.check_head(method, target, authorization)
        except AuthError as error:
            raise Refusal(503 if isinstance(error, AuthBusyError) else 401, str(error)) from None

    async def answer(self, caller: Grant, method: str, target: str, body: bytes) -> Answer:
        """Carry out a call, or say why not. Bodies are looked at when they are what was signed, and not before."""
        try:
            caller.check_body(body)
            route = ROUTES.get(target)
            if route is None or method != "POST":
                raise MessageError(f"there is no {method} {target}; there is POST {', '.join(ROUTES)}")
            call = read_call(body)
            if call.instance != self.controller.instance and not (call.instance == "" and target == "/v1/hello"):
                raise ControllerRestartedError(
                    f"this is controller {self.controller.instance}, not {call.instance or 'unnamed'}: it was restarted, and "
                    "knows no claims and rollouts of before"
                )
            arguments = route.read(call.arguments)
            if not route.once:
                return await self._carry_out(route, arguments, call, len(body))
            return await self._replies.once(
                call, target, body, lambda: self._carry_out(route, arguments, call, len(body))
            )
        except (MegascendError, AuthError) as error:
            return self._error(MessageError(str(error)) if isinstance(error, AuthError) else error)

    def refuse(self, caller: Grant | None, refusal: Refusal) -> Answer:
        """The answer to what the HTTP server refuses."""
        kind = ControllerBusyError if refusal.status == 503 else MessageError
        return Answer(refusal.status, self._error(kind(str(refusal))).body)

    def sign(self, caller: Grant, answer: Answer) -> dict[str, str]:
        """The answer's signature."""
        return sign_answer(self._key, caller.nonce, answer.status, answer.body) if caller.nonce else {}

    # --- below ---

    async def _carry_out(self, route: Route, arguments: object, call: Call, size: int) -> Answer:
        """The answer, an error included. What was refused without effect, and may be asked again, is raised."""
        if self._stopping is not None:
            raise ControllerLostError(self._stopping)
        try:
            return write_result(self.controller.instance, await route.run(self.controller, arguments, size))
        except (ControllerBusyError, ControllerLostError):
            raise
        except MegascendError as error:
            log.info("refused %r %s: %s", call.caller, type(error).__name__, error)
            return self._error(error)
        except Exception as error:
            log.exception("a call of %r failed", call.caller)
            return self._error(error)

    def _error(self, error: Exception) -> Answer:
        return write_error(self.controller.instance, error)

    def _withdraw(self) -> None:
        if self._published is not None:
            self._published.withdraw()

    async def _close(self, why: str) -> None:
        self._stopping = why
        await self._http.stop_listening()
        try:
            await self.controller.close(why)
        finally:
            await self._http.close()
            self._withdraw()


@contextmanager
def _handlers(came: asyncio.Future[signal.Signals]) -> Iterator[None]:
    """The first of SIGTERM and SIGINT is the future's result; later ones do nothing: closing has its deadlines."""
    loop = asyncio.get_running_loop()

    def take(which: signal.Signals) -> None:
        if not came.done():
            came.set_result(which)

    for which in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(which, take, which)
    try:
        yield
    finally:
        for which in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(which)
