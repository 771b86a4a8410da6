"""What stands before every handler: whose request it is, what becomes of what is raised, and the line in the audit log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from megascend.errors import MegascendError
from megascend.rollout.connections import OWNER
from megascend.serve.answering import Json
from megascend.serve.audit import Audit
from megascend.serve.errors import RequestRefusedError
from megascend.serve.figures import Problem
from megascend.serve.keys import Keys
from megascend.serve.reading import Bodies
from megascend.serve.service import Service

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
        """The answer to a request that is not done."""
        self._service.figures.refuse(error.status)
        headers = {"retry-after": "1"} if error.status == 429 else {}
        category = "user" if error.status < 500 else "server"
        return Json({"detail": str(error), "category": category}, error.status, headers)

    def _note(self, request: Request, tenant: str, error: RequestRefusedError) -> None:
        """Show a refusal among the tenant's errors, if it is for a fault in the request: others pass, or clients expect them."""
        if error.status in (400, 413, 415, 422):
            kind = request.scope["path"].rsplit("/", 1)[-1][:80]
            self._service.figures.note(tenant, Problem(self._service.clock(), kind, "", "user", str(error)))
