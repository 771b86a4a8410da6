"""HTTP server of the controller, an ASGI application: authenticates callers, executes each call once."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from typing_extensions import Self

from megascend.apps.rl.rollout.connections import OWNER, BoundedServer, listen
from megascend.apps.rl.rollout.controller.address import Address, PublishedAddress
from megascend.apps.rl.rollout.controller.areal import CALLBACKS, ArealCallbacks, bearer_of
from megascend.apps.rl.rollout.controller.controller import ClosedOnce, Controller
from megascend.apps.rl.rollout.controller.messages import AUDIENCE, BEARER, Call, read_call, write_error, write_result
from megascend.apps.rl.rollout.controller.replies import Replies
from megascend.apps.rl.rollout.controller.routes import PREFIX, ReadCall, read_route
from megascend.apps.rl.rollout.http_client import Answer
from megascend.errors import (
    ConfigError,
    ControllerBusyError,
    ControllerLostError,
    ControllerRestartedError,
    MegascendError,
    MessageError,
)
from weightwire.asgi import (
    LargeBodyError,
    Receive,
    Scope,
    Send,
    check_head,
    finish,
    read_body,
    send_json,
    target_of,
)
from weightwire.auth import Grant, Verifier
from weightwire.errors import AuthBusyError, AuthError, UnsupportedCallError, WireError
from weightwire.keys import Key

log = logging.getLogger(__name__)
KEEP_S, MAX_REPLIES = 120.0, 2**16
"""Seconds for which a call may be repeated, and the number of calls whose answers are kept at most."""
CLOSE_S = 1
"""Seconds that running requests have when the server closes."""


@dataclass(frozen=True)
class HttpLimits:
    """Bounds of the server.

    Attributes:
        max_connections: limit for all callers, including unauthenticated ones. Beyond it, a connection of the host with the
            most is closed, idle ones first.
        max_requests: concurrent requests of callers with the key, including those that wait for their answer.
        max_head_bytes: first line and headers.
        max_buffered_bytes: bodies of all requests together.
        body_timeout_s: deadline for a request's body, in seconds.
    """

    max_connections: int = 640
    max_requests: int = 512
    max_head_bytes: int = 16 * 2**10
    max_body_bytes: int = 32 * 2**20
    max_buffered_bytes: int = 256 * 2**20
    body_timeout_s: float = 60.0


class Refusal(Exception):
    """Refusal of a request before its call is parsed, with a status and a reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class ControllerServer(ClosedOnce):
    """HTTP server of a controller, for callers with the job's key.

        async with ControllerServer(Controller(engines), key, publish="run/controller.json") as server:
            await server.until_signal()

    Args:
        controller: closed with the server.
        publish: a file for the address. A second controller with the same file is refused.
        advertise: host name to publish instead of ``host``, by which others reach this machine.
        bearer: accept bearer tokens as well (:data:`BEARER`), and with them AReaL's callbacks (:mod:`.areal`). Answers are not
            signed then, and a token is not bound to a request.
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
    ) -> None:
        self.controller = controller
        self._key = key
        self._host, self._port = host, port
        self._publish = publish
        self._advertise = advertise
        self._published: PublishedAddress | None = None
        self._verifier = Verifier(
            key,
            audience=AUDIENCE,
            bound=False,  # a call's body names the instance
            bearer=BEARER if bearer else None,
            max_nonces=2 * MAX_REPLIES,  # a repeated call has the same id and a new nonce
        )
        self._replies = Replies(keep_s=KEEP_S, max_replies=MAX_REPLIES)
        self._limits = limits or HttpLimits()
        self._requests = self._buffered = 0
        self._server: BoundedServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._stopping: str | None = None
        self._bearer, self._areal = bearer, ArealCallbacks(controller)
        self.address = Address(host, port)
        """Address at which it listens, complete after :meth:`start`."""

    async def start(self) -> Address:
        # The file would contain an address that leads other machines to themselves.
        if self._publish is not None and self._advertise is None and self._host in ("", "0.0.0.0", "::"):
            raise ConfigError(
                f"host={self._host!r} listens on all addresses; set advertise= to the one that others connect to"
            )
        if self._publish is not None:
            self._published = PublishedAddress(self._publish)
        try:
            listening = listen(self._host, self._port)
        except OSError as error:
            self._withdraw()
            raise ConfigError(
                f"the controller cannot listen on {self._host}:{self._port}: {error.strerror or error}; port 0 takes one that "
                "is free"
            ) from error
        host, port = listening.getsockname()[:2]
        self._server = BoundedServer(
            self._serve_request,
            self._limits.max_connections,
            lifespan="off",
            log_config=None,
            log_level="critical",
            proxy_headers=False,
            date_header=False,
            timeout_graceful_shutdown=CLOSE_S,
            timeout_keep_alive=0,  # one request a connection
            h11_max_incomplete_event_size=self._limits.max_head_bytes,
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        # uvicorn has no event for it.
        while not self._server.started:
            if self._serving.done():
                self._withdraw()
                raise ConfigError(f"the controller's HTTP server did not start: {self._serving.exception()}")
            await asyncio.sleep(0.005)
        # After it listens: a reader of the file may connect at once.
        self.address = Address(self._advertise or host, port, self.controller.instance)
        if self._published is not None:
            self._published.publish(self.address)
        if not ip_address(host).is_loopback:
            log.warning(
                "the controller listens on %s: calls are signed, but not encrypted; keep that network private", host
            )
        log.info("rollout controller %s listens on %s", self.controller.instance, self.address)
        return self.address

    async def until_signal(self) -> signal.Signals:
        """Serve until SIGTERM or SIGINT arrives, then close. Only in the main thread.

        Returns:
            The signal. A program exits with ``128 + signal``.
        """
        loop = asyncio.get_running_loop()
        received: asyncio.Future[signal.Signals] = loop.create_future()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            # Later ones are ignored: closing has its own deadlines.
            loop.add_signal_handler(number, lambda number=number: received.done() or received.set_result(number))
        try:
            number = await received
            log.warning("%s: the controller closes; paused engines are resumed", number.name)
            await self.close(f"the controller got {number.name}")
        finally:
            for each in numbers:
                loop.remove_signal_handler(each)
        return number

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    # --- internals ---

    async def _serve_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whose caller is authenticated by the head before the body is read."""
        callback = (
            scope["path"].removeprefix(CALLBACKS) if self._bearer and scope["path"].startswith(CALLBACKS) else None
        )
        nonce, rest = "", receive
        try:
            grant = self._admit(scope, is_callback=callback is not None)
            nonce = grant.nonce
            if scope["method"] != "POST":
                raise Refusal(405, "only POST requests are answered")
            with self._room(scope):
                body = await read_body(receive, self._limits.max_body_bytes, self._limits.body_timeout_s)
                rest = None
                if callback is None:
                    answer = await self._answer(grant, target_of(scope), body, receive)
                else:
                    answer = _json(*await finish(self._areal.answer(callback, body), receive, with_caller=False))
        except (Refusal, WireError) as error:  # a WireError: the body did not arrive
            status = error.status if isinstance(error, Refusal) else 413 if isinstance(error, LargeBodyError) else 408
            if status == 408:
                nonce = ""  # a late body is refused without a signature: clients treat that as a broken connection, and retry
            kind = ControllerBusyError if status == 503 else MessageError
            refusal = Answer(status, self._error(kind(str(error))).body)
            answer = refusal if callback is None else _json(status, {"error": str(error)})
        await send_json(send, answer.status, answer.body, self._key, nonce, close=True, rest=rest)

    def _admit(self, scope: Scope, *, is_callback: bool) -> Grant:
        if is_callback:
            scope["headers"] = [
                (name, bearer_of(value) if name == b"authorization" else value) for name, value in scope["headers"]
            ]
        try:
            grant = check_head(self._verifier, scope)
        except AuthError as error:
            raise Refusal(503 if isinstance(error, AuthBusyError) else 401, str(error)) from None
        if is_callback and grant.nonce:  # the body of a callback names no instance
            raise Refusal(401, "a callback is not signed: it needs the bearer token")
        # Authenticated connections each have their own owner, so that the limit of connections closes those of strangers first.
        scope[OWNER] = f"caller {grant.nonce or id(scope)}"
        return grant

    @contextmanager
    def _room(self, scope: Scope) -> Iterator[None]:
        """Reserve a slot for a request and memory for its body within the context; raise Refusal if none is free."""
        limits = self._limits
        size = int(dict(scope["headers"]).get(b"content-length", limits.max_body_bytes))
        if size > limits.max_body_bytes:
            raise Refusal(413, f"a body of {size} bytes; at most {limits.max_body_bytes} are accepted")
        if self._requests >= limits.max_requests:
            raise Refusal(503, f"{limits.max_requests} requests are being answered; retry later")
        if self._buffered + size > limits.max_buffered_bytes:
            raise Refusal(503, "too many large requests at once; retry later")
        self._requests += 1
        self._buffered += size
        try:
            yield
        finally:
            self._requests -= 1
            self._buffered -= size

    async def _answer(self, grant: Grant, target: str, body: bytes, receive: Receive) -> Answer:
        """Execute a call, or describe the refusal. The body is parsed only after its signature was verified."""
        try:
            grant.check_body(body)
            call = read_call(body)
            if call.instance != self.controller.instance and not (call.instance == "" and target == f"{PREFIX}hello"):
                raise ControllerRestartedError(
                    f"this is controller {self.controller.instance}, not {call.instance or 'unnamed'}: it was restarted, and "
                    "has lost its claims and rollouts"
                )
            route = read_route(target, call.arguments, len(body))
            if route.once:
                return await self._replies.once(call, target, body, lambda: self._execute(route, call))
            # Calls without effect end with their caller; the others are completed.
            return await finish(self._execute(route, call), receive, with_caller=True) or Answer(499, b"")
        except (MegascendError, AuthError) as error:
            return self._error(MessageError(str(error)) if isinstance(error, AuthError) else error)

    async def _execute(self, route: ReadCall, call: Call) -> Answer:
        """Execute a call and return its answer or error. Refusals without effect, which may be retried, are raised."""
        if self._stopping is not None:
            raise ControllerLostError(self._stopping)
        try:
            return write_result(self.controller.instance, await route.run(self.controller))
        # Raised, not answered: replies must not keep them, since the caller retries.
        except (ControllerBusyError, ControllerLostError):
            raise
        except (MegascendError, UnsupportedCallError) as error:
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

    async def _close(self, reason: str) -> None:
        """Refuse new calls, close the controller (which resumes paused engines), answer running calls."""
        self._stopping = reason
        if self._server is not None:
            # No new connections, while running calls are still answered.
            for listener in self._server.servers:
                listener.close()
        try:
            await self.controller.close(reason)
        finally:
            # uvicorn cancels running requests CLOSE_S after this, so it must follow the controller's answers to waiting callers.
            if self._server is not None:
                self._server.should_exit = True
            if self._serving is not None:
                await self._serving
            self._withdraw()


def _json(status: int, fields: Mapping[str, Any]) -> Answer:
    return Answer(status, json.dumps(fields).encode())
