"""Reading the body of a request, within a limit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request

from megascend.serve.body import check_json, decompress
from megascend.serve.errors import RequestRefusedError

TIMEOUT_S = 120.0
"""How long a client may take to send a body."""

SMALL = 2**20
"""Most bytes of a request in JSON that holds no tokens."""

LARGE = 16 * 2**20
"""Most bytes of one that does. JSON takes a multiple of its size in memory, and nothing else runs while it is parsed. What is
larger comes as protobuf."""


class Bodies:
    """Bytes of bodies that are being read or answered, of each tenant and of all, so that many requests at once fit in memory.

    Args:
        largest: most bytes of one body. A tenant may have four of them at a time, all tenants sixteen.
    """

    def __init__(self, largest: int) -> None:
        self.largest, self._each, self._all = largest, 4 * largest, 16 * largest
        self._held: dict[str, int] = {}

    @contextmanager
    def of(self, tenant: str) -> Iterator[Held]:
        """A tenant's request, with nothing read so far."""
        held = Held(self, tenant)
        try:
            yield held
        finally:
            left = self._held.get(tenant, 0) - held.size
            if left:
                self._held[tenant] = left
            else:
                self._held.pop(tenant, None)

    def add(self, tenant: str, size: int) -> None:
        """Count bytes.

        Raises:
            RequestRefusedError: 429; there are too many.
        """
        if self._held.get(tenant, 0) + size > self._each or sum(self._held.values()) + size > self._all:
            raise RequestRefusedError("too many bytes of requests are being read; send fewer at a time", 429)
        self._held[tenant] = self._held.get(tenant, 0) + size


class Held:
    """Bytes that one request holds.

    Attributes:
        largest: that its body may have, after it is opened.
    """

    def __init__(self, bodies: Bodies, tenant: str) -> None:
        self._bodies, self._tenant, self.size = bodies, tenant, 0
        self.largest = bodies.largest

    def add(self, size: int) -> None:
        """Count bytes; see :meth:`Bodies.add`."""
        self._bodies.add(self._tenant, size)
        self.size += size


async def read_body(request: Request, limit: int | None = None) -> bytes:
    """The body, opened.

    Args:
        limit: most bytes; None: as many as the server takes.

    Raises:
        RequestRefusedError: 413, it is larger; 429, too much is being read; and as :func:`megascend.serve.body.decompress`.
    """
    held: Held = request.state.body
    limit = held.largest if limit is None else min(limit, held.largest)
    try:
        body = await asyncio.wait_for(_read(request, held, limit), TIMEOUT_S)
    except ClientDisconnect:
        raise RequestRefusedError("the client went away before its body had ended") from None
    except (TimeoutError, asyncio.TimeoutError):
        raise RequestRefusedError(f"the body had not ended after {TIMEOUT_S:g} s", 408) from None
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return body
    opened = await asyncio.to_thread(decompress, body, encoding, limit)
    held.add(len(opened))
    return opened


async def _read(request: Request, held: Held, limit: int) -> bytes:
    body = bytearray()  # not a list of its parts: each may be a byte
    async for part in request.stream():
        if len(body) + len(part) > limit:
            raise RequestRefusedError(f"the body has more than {limit} bytes", 413)
        held.add(len(part))
        body += part
    return bytes(body)


async def read_json(request: Request, limit: int = SMALL) -> dict[str, Any]:
    """The body, a JSON object.

    Raises:
        RequestRefusedError: 400 or 422, it is none; 413, it is larger than ``limit``, or holds too many objects.
    """
    body = await read_body(request, limit)
    check_json(body)
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise RequestRefusedError(f"the body is not valid JSON: {str(error)[:120]}") from None
    if not isinstance(found, dict):
        raise RequestRefusedError("the body must be a JSON object", 422)
    return found
