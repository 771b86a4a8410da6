"""What runs before every handler: the request's tenant, answers to what is raised, and the audit log."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megascend.errors import MegascendError
from megascend.io.paths import make_directory
from megascend.rollout.connections import OWNER
from megascend.serve.api.keys import Keys
from megascend.serve.api.reading import Bodies
from megascend.serve.errors import RequestRefusedError
from megascend.serve.figures import Problem
from megascend.serve.service import Service


class Json(Response):
    """A JSON answer in ASCII.

    What clients sent may come back in it: halves of surrogate pairs, which JSON can hold and UTF-8 cannot, stay escaped. Numbers
    that are not finite are written as Python's clients read them.
    """

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return ``content`` as text."""
        return json.dumps(content, separators=(",", ":")).encode("ascii")


QUIET = frozenset(f"/api/v1/{path}" for path in ("session_heartbeat", "retrieve_future", "telemetry", "client/config"))
"""Paths that clients ask for all the time."""


class Audit:
    """Appends to a file that only its owner can read.

    Requests without a valid key are only counted in the figures: whoever sends them could fill the disk.

    Args:
        file: made if it is not there; None: nothing is written.
    """

    def __init__(self, file: Path | None) -> None:
        self._stream = None
        if file is not None:
            make_directory(file.parent)
            file.touch(mode=0o600)
            self._stream = file.open("a", encoding="utf-8", buffering=1)

    def write(self, tenant: str, method: str, path: str, status: int, address: str) -> None:
        """Note a request and the HTTP status of its answer."""
        if self._stream is None or path in QUIET:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        entry = {"time": now, "tenant": tenant, "from": address, "method": method, "path": path[:300], "status": status}
        self._stream.write(json.dumps(entry) + "\n")

    def close(self) -> None:
        """Close the file; nothing is written any more."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


Handler = Callable[[Request, str], Awaitable[Response]]
"""Answers a request of a tenant."""

log = logging.getLogger("megascend.serve")


class Guard:
    """Lets tenants' requests through to their handlers.

    Args:
        service: in whose figures refusals are counted.
        keys: who may ask.
        audit: where requests are noted.
    """

    def __init__(self, service: Service, keys: Keys, audit: Audit) -> None:
        self._service, self._keys, self._audit = service, keys, audit
        self._bodies = Bodies(service.settings.limits.body_bytes)
        self._open: Counter[str] = Counter()  # requests of each tenant that are being answered

    def before(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """``handler`` for callers with a key; whatever it raises becomes an answer."""

        async def answer(request: Request) -> Response:
            try:
                tenant = self.tenant(request)
            except RequestRefusedError as error:
                return self.refusal(error)
            request.scope[OWNER] = tenant
            self._open[tenant] += 1
            try:
                with self._bodies.of(tenant) as body:
                    request.state.body = body
                    response = await self._answered(handler, request, tenant)
            finally:
                self._open[tenant] -= 1
                if not self._open[tenant]:
                    del self._open[tenant]
            address = request.client.host if request.client is not None else ""
            # not request.url, which is put together with what the client says in Host
            self._audit.write(tenant, request.method, request.scope["path"], response.status_code, address)
            return response

        return answer

    async def _answered(self, handler: Handler, request: Request, tenant: str) -> Response:
        durability = self._service.durability
        try:
            self._check_open(tenant)
            if request.method != "POST":  # nothing is promised
                return await handler(request, tenant)
            await durability.writable()
            response = await handler(request, tenant)
            await durability.durable()
            return response
        except MegascendError as error:
            refused = error if isinstance(error, RequestRefusedError) else RequestRefusedError(str(error), 400)
        except Exception as error:
            log.exception("%s %r failed", request.method, request.scope["path"])
            refused = RequestRefusedError(f"internal error ({type(error).__name__})", 500)
        self._note(request, tenant, refused)
        return self.refusal(refused)

    def _check_open(self, tenant: str) -> None:
        most = self._service.settings.limits.requests
        if self._open[tenant] > most:
            raise RequestRefusedError(
                f"{most} requests of yours are under way (limits.requests); wait for some first", 429
            )

    def tenant(self, request: Request) -> str:
        """Whose key a request has.

        Raises:
            RequestRefusedError: 401; nobody's, or it has several, of which a proxy may have seen another one.
        """
        keys = request.headers.getlist("x-api-key")
        tenant = self._keys.tenant(keys[0].encode("latin-1")) if len(keys) == 1 else None
        if tenant is None:
            raise RequestRefusedError("a valid API key is needed (TINKER_API_KEY)", 401)
        return tenant

    def refusal(self, error: RequestRefusedError) -> Response:
        """Build the answer to a request that is refused."""
        self._service.figures.refuse(error.status)
        headers = {"retry-after": "1"} if error.status == 429 else {}
        category = "user" if error.status < 500 else "server"
        return Json({"detail": str(error), "category": category}, error.status, headers)

    def _note(self, request: Request, tenant: str, error: RequestRefusedError) -> None:
        """Show a refusal among the tenant's errors, if it is for a fault in the request: others pass, or clients expect them."""
        if error.status in (400, 413, 415, 422):
            kind = request.scope["path"].rsplit("/", 1)[-1][:80]
            self._service.figures.note(tenant, Problem(self._service.clock(), kind, "", "user", str(error)))
