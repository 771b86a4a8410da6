"""HTTP server of the controller, an ASGI application: authenticates callers, executes each call once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
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
from weightwire.asgi import LargeBodyError, Receive, Scope, Send, check_head, read_body, target_of, unless_gone
from weightwire.auth import Grant, Verifier, sign_answer
from weightwire.errors import AuthBusyError, AuthError, UnsupportedCallError, WireError
from weightwire.keys import Key

log = logging.getLogger(__name__)
CLOSE_S = 1
"""Seconds that running requests have when the server closes."""
DISCARD_S = 1.0
"""Seconds for reading the rest of a refused request: a connection closed before that may lose the answer."""


@dataclass(frozen=True)
class HttpLimits:
    """Bounds of the server.

    Attributes:
        max_connections: limit for all callers, including unauthenticated ones. Beyond it, a connection of the host with the
            most is closed, idle ones first.
        max_requests: concurrent requests of callers with the key, including those that wait for their answer.
        max_head_bytes: first line and headers.
        max_body_bytes: limit for one request.
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
        keep_s: time for which a call may be repeated, in seconds.
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
        self._host, self._port = host, port
        self._publish = publish
        self._advertise = advertise
        self._published: PublishedAddress | None = None
        self._verifier = verifier or Verifier(
            key,
            audience=AUDIENCE,
            bound=False,  # a call's body names the instance
            bearer=BEARER if bearer else None,
            max_nonces=max(2**16, 2 * max_replies),  # a repeated call has the same id and a new nonce
        )
        self._replies = Replies(keep_s=keep_s, max_replies=max_replies)
        self._limits = limits or HttpLimits()
        self._requests = self._buffered = 0
        self._server: BoundedServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._stopping: str | None = None
        self._areal = ArealCallbacks(controller)
        areal = Route(CALLBACKS + "{name}", self._respond_to_areal, methods=["POST"])
        calls = Route("/{path:path}", self._respond, methods=["POST"])
        self.application = Starlette(routes=[areal, calls] if bearer else [calls])
        # A malformed path is refused, not sent elsewhere: no caller follows redirects.
        self.application.router.redirect_slashes = False
        self.address = Address(host, port)
        """Address at which it listens, complete after :meth:`start`."""

    async def start(self) -> Address:
        """Listen, and publish the address."""
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
            self.application,
            self._limits.max_connections,
            lifespan="off",
            log_config=None,
            log_level="critical",
            proxy_headers=False,
            date_header=False,
            timeout_graceful_shutdown=CLOSE_S,
            # One request a connection, also for answers of the router (404, 405), which do not say `Connection: close`.
            timeout_keep_alive=0,
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
        received: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
        with _handlers(received):
            number = await received
            log.warning("%s: the controller closes; paused engines are resumed", number.name)
            await self.close(f"the controller got {number.name}")
        return number

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    # --- internals ---

    async def _respond(self, request: Request) -> Response:
        """Answer a request, whose caller is authenticated by the head before the body is read."""
        grant = None
        try:
            grant = self._admit(request.scope)
            with self._room(request):
                body = await read_body(request.receive, self._limits.max_body_bytes, self._limits.body_timeout_s)
                answer = await self._answer(grant, target_of(request.scope), body, request.receive)
        except Refusal as refusal:
            kind = ControllerBusyError if refusal.status == 503 else MessageError
            return self._signed(Answer(refusal.status, self._error(kind(str(refusal))).body), grant, RefusedResponse)
        except WireError as error:  # the body did not arrive
            status = _status_of(error)
            answer = Answer(status, self._error(MessageError(str(error))).body)
            # A late body is refused without a signature: clients treat that as a broken connection, and retry.
            return self._signed(answer, grant if status == 413 else None, RefusedResponse)
        return self._signed(answer, grant)

    async def _respond_to_areal(self, request: Request) -> Response:
        request.scope["headers"] = [
            (name, (bearer_of(value.decode("latin-1")) or "").encode("latin-1") if name == b"authorization" else value)
            for name, value in request.scope["headers"]
        ]
        try:
            if self._admit(request.scope).nonce:  # the body of a callback names no instance
                raise Refusal(401, "a callback is not signed: it needs the bearer token")
            with self._room(request):
                body = await read_body(request.receive, self._limits.max_body_bytes, self._limits.body_timeout_s)
                # Shielded: a call that has begun on the engines ends, even if its caller disconnects.
                status, answer = await asyncio.shield(self._areal.answer(request.path_params["name"], body))
        except (Refusal, WireError) as error:
            status = error.status if isinstance(error, Refusal) else _status_of(error)
            return RefusedResponse(json.dumps({"error": str(error)}), status, media_type="application/json")
        return Response(json.dumps(answer), status, {"Connection": "close"}, "application/json")

    def _signed(self, answer: Answer, grant: Grant | None, kind: type[Response] = Response) -> Response:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if grant is not None and grant.nonce:
            headers |= sign_answer(self._key, grant.nonce, answer.status, answer.body)
        return kind(answer.body, answer.status, headers)

    def _admit(self, scope: Scope) -> Grant:
        try:
            grant = check_head(self._verifier, scope)
        except AuthError as error:
            raise Refusal(503 if isinstance(error, AuthBusyError) else 401, str(error)) from None
        # Authenticated connections each have their own owner, so that the limit of connections closes those of strangers first.
        scope[OWNER] = f"caller {grant.nonce or id(scope)}"
        return grant

    @contextmanager
    def _room(self, request: Request) -> Iterator[None]:
        """Reserve a slot for a request and memory for its body within the context; raise Refusal if none is free."""
        limits = self._limits
        size = int(request.headers.get("content-length", limits.max_body_bytes))
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
            work = asyncio.ensure_future(self._execute(route, call))
            return await unless_gone(work, receive) or Answer(499, b"")
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


class RefusedResponse(Response):
    """Answer to a request that was not read completely: discards the rest before the connection is closed.

    Closing a connection with unread bytes resets it, and the caller may never see the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(asyncio.TimeoutError, WireError):
            # Bounded: the caller may send slowly, or for ever.
            await asyncio.wait_for(_discard(receive), DISCARD_S)
        await send({"type": "http.response.body", "body": b""})


def _status_of(error: WireError) -> int:
    """Return the status for a body that could not be read, or is not the one that was signed."""
    if isinstance(error, AuthError):
        return 400
    return 413 if isinstance(error, LargeBodyError) else 408


async def _discard(receive: Receive) -> None:
    while (message := await receive())["type"] != "http.disconnect" and message.get("more_body", False):
        pass


@contextmanager
def _handlers(received: asyncio.Future[signal.Signals]) -> Iterator[None]:
    """Set the future to the first SIGTERM or SIGINT. Later ones are ignored: closing has its own deadlines."""
    loop = asyncio.get_running_loop()

    def handle(number: signal.Signals) -> None:
        if not received.done():
            received.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
