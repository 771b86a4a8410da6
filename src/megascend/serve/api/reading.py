"""Bodies of requests, read and opened within bounds: large and compressed ones, and messages before anything is made of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request

from megascend.serve.errors import RequestRefusedError

MAX_WINDOW = 8 * 2**20
"""Most memory that opening a zstd frame may take: what every encoder stays within unless it is told otherwise (RFC 8878)."""

STEP = 512
"""Bytes that are opened at a time: at most 128 KiB come of four, so that no step gives more than 16 MiB."""


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Decompress a body to at most ``limit`` bytes.

    Raises:
        RequestRefusedError: 413, it is larger; 415, an encoding other than zstd or identity; 400, it is damaged.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise RequestRefusedError(f"Content-Encoding {encoding[:40]!r} is not supported; use zstd, or none", 415)
    import zstandard

    try:
        opener = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj()
        parts, size = [], 0
        for start in range(0, len(body), STEP):
            if opener.eof:
                raise RequestRefusedError("the body has something after its zstd frame")
            parts.append(opener.decompress(body[start : start + STEP]))
            size += len(parts[-1])
            if size > limit:
                raise RequestRefusedError(f"the body has more than {limit} bytes when it is opened", 413)
    except zstandard.ZstdError as error:
        raise RequestRefusedError(f"the body is no zstd frame that this server opens: {error}") from None
    if not opener.eof:
        raise RequestRefusedError("the body ends within its zstd frame")
    return b"".join(parts)


MAX_CONTAINERS = 2**18
"""Most objects and arrays in a body of JSON: an empty one takes two bytes there and 64 in memory."""


def check_json(body: bytes) -> None:
    """Count what may begin an object or array before a parser makes one of each. Brackets in texts count, too.

    Raises:
        RequestRefusedError: 413; there are too many.
    """
    if body.count(b"{") + body.count(b"[") > MAX_CONTAINERS:
        raise RequestRefusedError(f"the body holds more than {MAX_CONTAINERS} objects and arrays", 413)


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
        """Count the bytes of a tenant's request until the block ends."""
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
    """Read the body, and decompress it.

    Args:
        limit: most bytes; None: as many as the server takes.

    Raises:
        RequestRefusedError: 413, it is larger; 429, too much is being read; and as :func:`decompress`.
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
    """Read the body as a JSON object.

    Raises:
        RequestRefusedError: 400 or 422, it is none; 413, it is larger than ``limit``, or holds too many objects.
    """
    body = await read_body(request, limit)
    check_json(body)
    try:
        content = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise RequestRefusedError(f"the body is not valid JSON: {str(error)[:120]}") from None
    if not isinstance(content, dict):
        raise RequestRefusedError("the body must be a JSON object", 422)
    return content
