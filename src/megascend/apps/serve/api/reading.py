"""Read and decompress request bodies within limits on time and memory, before anything is parsed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request

from megascend.apps.serve.errors import RequestRefusedError
from weightwire import asgi
from weightwire.errors import WireError

MAX_WINDOW = 8 * 2**20
"""Largest zstd window accepted: the limit that encoders keep by default (RFC 8878)."""

STEP = 512
"""Compressed bytes per step: 4 bytes expand to at most 128 KiB, so a step yields at most 16 MiB."""


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Decompress a body to at most ``limit`` bytes.

    Raises:
        RequestRefusedError: 413, too large; 415, an encoding other than zstd or identity; 400, damaged.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise RequestRefusedError(f"Content-Encoding {encoding[:40]!r} is not supported; use zstd, or none", 415)
    import zstandard

    try:
        opener = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj()
        # In steps: a small body can expand to gigabytes, and the limit must be noticed before they are allocated.
        parts, size = [], 0
        for start in range(0, len(body), STEP):
            if opener.eof:
                raise RequestRefusedError("the body has data after its zstd frame")
            parts.append(opener.decompress(body[start : start + STEP]))
            size += len(parts[-1])
            if size > limit:
                raise RequestRefusedError(f"the body has more than {limit} bytes when decompressed", 413)
    except zstandard.ZstdError as error:
        raise RequestRefusedError(f"the body is not a zstd frame that this server accepts: {error}") from None
    if not opener.eof:
        raise RequestRefusedError("the body ends within its zstd frame")
    return b"".join(parts)


MAX_CONTAINERS = 2**17
"""Maximum number of objects and arrays in a JSON body, twice that of 4096 samples: no other thread runs while they are parsed."""
MAX_TEXTS = 2**18
"""Maximum number of texts and constants, each of which the parser takes without letting another thread run."""
MAX_DEPTH = 64


def check_json(body: bytes) -> None:
    """Bound the number of values other than numbers before parsing. Those in strings count, too."""
    if body.count(b"{") + body.count(b"[") > MAX_CONTAINERS:
        raise RequestRefusedError(f"the body holds more than {MAX_CONTAINERS} objects and arrays", 413)
    if body.count(b'"') // 2 + sum(map(body.count, (b"null", b"true", b"false"))) > MAX_TEXTS:
        raise RequestRefusedError(f"the body holds more than {MAX_TEXTS} texts and constants", 413)


TIMEOUT_S = 120.0
"""Deadline for receiving a body."""

INLINE = 2**16
"""Maximum bytes of a body that is parsed on the event loop."""

SMALL = 2**20
"""Maximum bytes of a JSON request without tokens."""

LARGE = 16 * 2**20
"""Maximum bytes of a JSON request with tokens. JSON takes a multiple of its size in memory, and parsing blocks the event loop;
larger requests must use protobuf."""


class Bodies:
    """Limits on the bytes of bodies being read or processed, per tenant and in total, so that concurrent requests fit in memory.

    Args:
        largest: maximum bytes of one body. A tenant may have four times as much in flight, all tenants sixteen times.
    """

    def __init__(self, largest: int) -> None:
        self._tenant_limit, self._total_limit = 4 * largest, 16 * largest
        self._used: Counter[str] = Counter()

    @contextmanager
    def reserve(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that charges bytes to a request, 429 beyond the limits; they are released at the end of the block."""
        charged = 0

        def charge(size: int) -> None:
            nonlocal charged
            if self._used[tenant] + size > self._tenant_limit or self._used.total() + size > self._total_limit:
                raise RequestRefusedError("too many bytes of requests are being read; send fewer at a time", 429)
            self._used[tenant] += size
            charged += size

        try:
            yield charge
        finally:
            self._used[tenant] -= charged


async def read_body(request: Request, limit: int | None = None) -> bytes:
    """Read and decompress the body, and set the state's ``body``, and ``digest`` to that of its bytes.

    Args:
        request: its state has ``charge``, ``max_body_bytes`` and ``in_thread`` (:mod:`~megascend.apps.serve.api.guard`).
        limit: maximum bytes; None: the server's limit.

    Raises:
        RequestRefusedError: 413, too large; 429, too many bytes in flight; 408, timeout; and as :func:`decompress`.
    """
    charge, largest = request.state.charge, int(request.state.max_body_bytes)
    bound = largest if limit is None else min(limit, largest)
    try:
        body = await asgi.read_body(request.receive, bound, TIMEOUT_S, charge)
    except WireError as error:
        raise RequestRefusedError(str(error), 413 if isinstance(error, asgi.LargeBodyError) else 408) from None
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        # In a thread, which zstd runs in without the GIL: other tenants' requests are answered meanwhile.
        body = await request.state.in_thread(decompress, body, encoding, bound)
        charge(len(body))
    # The same for the digest, of all but small bodies.
    request.state.digest = digest_of(body) if len(body) <= SMALL else await request.state.in_thread(digest_of, body)
    request.state.body = body
    return body


def digest_of(body: bytes) -> str:
    """Return the digest by which a request sent again is recognised: clients encode it to the same bytes."""
    return hashlib.blake2b(body, digest_size=16).hexdigest()


async def read_json(request: Request, limit: int = SMALL) -> dict[str, Any]:
    """Read the body as a JSON object.

    Raises:
        RequestRefusedError: 400 or 422, not a JSON object; 413, larger than ``limit`` or with too many objects.
    """
    body = await read_body(request, limit)
    content = parse(body) if len(body) <= INLINE else await request.state.in_thread(parse, body)
    if not isinstance(content, dict):
        raise RequestRefusedError("the body must be a JSON object", 422)
    return content


def parse(body: bytes) -> Any:
    """Parse a JSON body; refuse a name that an object has twice, of which others may read the other value."""
    check_json(body)
    try:
        # With hooks of Python: the parser is one call of C, in which no other thread runs between two values without them.
        content = json.loads(
            body or b"{}",
            object_pairs_hook=_object,
            parse_int=lambda text: int(text),
            parse_float=lambda text: float(text),
        )
    except (ValueError, RecursionError) as error:
        raise RequestRefusedError(f"the body is not valid JSON: {str(error)[:120]}") from None
    # The body may be encoded, and parsed again after a restart, with less of the stack left.
    level: list[Any] = [[content]]
    for _ in range(MAX_DEPTH + 1):
        parts = (entry.values() if isinstance(entry, dict) else entry for entry in level)
        level = [value for part in parts for value in part if isinstance(value, dict | list)]
        if not level:
            return content
    raise RequestRefusedError(f"the body has objects and arrays more than {MAX_DEPTH} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"an object has {name[:60]!r} twice")
    return content
