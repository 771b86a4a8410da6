"""Wrapper of every handler: authentication, error responses and the audit log."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megascend.apps.rl.rollout.connections import OWNER
from megascend.apps.serve.api.keys import Keys
from megascend.apps.serve.api.reading import Bodies
from megascend.apps.serve.errors import RequestRefusedError
from megascend.apps.serve.figures import Problem
from megascend.apps.serve.service import Service
from megascend.errors import MegascendError
from megascend.runtime.io.paths import make_directory


class Json(Response):
    """JSON response in ASCII.

    Answers may echo client input, so lone surrogates, which JSON can hold and UTF-8 cannot, stay escaped. NaN and infinities are
    written as Python's json module reads them.
    """

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


QUIET = frozenset(f"/api/v1/{path}" for path in ("session_heartbeat", "retrieve_future", "telemetry", "client/config"))
"""Paths polled by clients, which are not logged."""
log = logging.getLogger("megascend.apps.serve")


class Audit:
    """Audit log in a file that only its owner can read.

    Requests without a valid key are not logged, only counted: anyone could fill the disk with them. While the file cannot be
    written (a full disk), requests are answered without an entry.

    Args:
        file: created if missing; None: no log.
    """

    def __init__(self, file: Path | None) -> None:
        self._stream = None
        self._missing = 0  # entries since the file could not be written
        self._partial = False
        if file is not None:
            make_directory(file.parent)
            file.touch(mode=0o600)
            self._stream = file.open("ab", buffering=0)  # so that a kill leaves whole lines

    def write(self, tenant: str, method: str, path: str, status: int, address: str) -> None:
        """Append a request and the HTTP status of its answer."""
        if self._stream is None or path in QUIET:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        entry = {"time": now, "tenant": tenant, "from": address, "method": method, "path": path[:300], "status": status}
        line = f"{json.dumps(entry)}\n".encode("ascii")
        if self._partial:  # the disk had room for a part of an entry
            line = b"\n" + line
        try:
            count = self._stream.write(line)
            problem = None if count == len(line) else "no space left"
            self._partial = problem is not None
        except OSError as error:  # the request has had its effect: its client must get the answer
            problem = error.strerror
        if problem is not None and not self._missing:
            log.error(
                "the audit log %s cannot be written: %s; requests are answered without", self._stream.name, problem
            )
        elif problem is None and self._missing:
            log.warning("the audit log can be written again; entries of %d requests are missing", self._missing)
        self._missing = 0 if problem is None else self._missing + 1

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


Handler = Callable[[Request, str], Awaitable[Response]]
"""Handles a tenant's request: (request, tenant) to a response."""


class RequestGuard:
    """Authenticates requests and passes them to their handlers.

    Args:
        service: service whose metrics count refusals.
        keys: accepted keys.
        audit: log of requests.
    """

    def __init__(self, service: Service, keys: Keys, audit: Audit) -> None:
        self._service, self._keys, self._audit = service, keys, audit
        self._max_body_bytes = service.settings.limits.body_bytes
        self._bodies = Bodies(self._max_body_bytes)
        self._open: Counter[str] = Counter()  # requests in progress by tenant

    def before(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler: require a valid key, and turn exceptions into responses."""

        async def answer(request: Request) -> Response:
            try:
                tenant = self.tenant(request)
            except RequestRefusedError as error:
                return self.refusal(error)
            request.scope[OWNER] = tenant  # tells the connection limits whose connection this is
            self._open[tenant] += 1
            # After authentication, so that strangers can neither fill the quota nor hold memory.
            try:
                with self._bodies.reserve(tenant) as charge:
                    request.state.charge, request.state.max_body_bytes = charge, self._max_body_bytes
                    request.state.in_thread = partial(self._service.in_thread, tenant)
                    response = await self._respond(handler, request, tenant)
            finally:
                self._open[tenant] -= 1
                if not self._open[tenant]:
                    del self._open[tenant]
            address = request.client.host if request.client is not None else ""
            # not request.url, which includes the client's Host header
            self._audit.write(tenant, request.method, request.scope["path"], response.status_code, address)
            return response

        return answer

    async def _respond(self, handler: Handler, request: Request, tenant: str) -> Response:
        durability = self._service.durability
        try:
            self._check_open(tenant)
            if request.method != "POST":  # changes no durable state
                return await handler(request, tenant)
            await durability.writable()  # before the handler, which would already have had its effect
            response = await handler(request, tenant)
            await durability.durable()  # the response is a promise: sent only when a restart would keep it
            return response
        except MegascendError as error:
            refused = error if isinstance(error, RequestRefusedError) else RequestRefusedError(str(error), 400)
        except Exception as error:  # the class only: a message may hold paths, or another tenant's data
            log.exception("%s %r failed", request.method, request.scope["path"])
            refused = RequestRefusedError(f"internal error ({type(error).__name__})", 500)
        self._note(request, tenant, refused)
        return self.refusal(refused)

    def _check_open(self, tenant: str) -> None:
        limit = self._service.settings.limits.requests
        if self._open[tenant] > limit:
            raise RequestRefusedError(
                f"{limit} requests of yours are in progress (limits.requests); wait for some first", 429
            )

    def tenant(self, request: Request) -> str:
        # Exactly one: a proxy in front may have checked another one of several.
        keys = request.headers.getlist("x-api-key")
        tenant = self._keys.tenant(keys[0].encode("latin-1")) if len(keys) == 1 else None
        if tenant is None:
            raise RequestRefusedError("a valid API key is needed (TINKER_API_KEY)", 401)
        return tenant

    def refusal(self, error: RequestRefusedError) -> Response:
        self._service.figures.refuse(error.status)
        # Back-pressure: clients wait that long and send the request again, whatever limit they are at.
        headers = {"retry-after": "1"} if error.status == 429 else {}
        category = "user" if error.status < 500 else "server"
        return Json({"detail": str(error), "category": category}, error.status, headers)

    def _note(self, request: Request, tenant: str, error: RequestRefusedError) -> None:
        """Show a refusal among the tenant's errors if the request was invalid; other refusals are temporary or expected."""
        if error.status in (400, 413, 415, 422):
            kind = request.scope["path"].rsplit("/", 1)[-1][:80]
            self._service.figures.note(tenant, Problem(self._service.clock(), kind, "", "user", str(error)))
