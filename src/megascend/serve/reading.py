"""Reading the body of a request, within a limit."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from megascend.serve.body import decompress
from megascend.serve.errors import RequestRefusedError

TIMEOUT_S = 120.0
"""How long a client may take to send a body."""


async def read_body(request: Request, limit: int) -> bytes:
    """The body, opened, at most ``limit`` bytes.

    Raises:
        RequestRefusedError: 413, it is larger; and as :func:`megascend.serve.body.decompress`.
    """
    try:
        body = await asyncio.wait_for(_read(request, limit), TIMEOUT_S)
    except ClientDisconnect:
        raise RequestRefusedError("the client went away before its body had ended") from None
    except (TimeoutError, asyncio.TimeoutError):
        raise RequestRefusedError(f"the body had not ended after {TIMEOUT_S:g} s", 408) from None
    encoding = request.headers.get("content-encoding", "").strip().lower()
    return await asyncio.to_thread(decompress, body, encoding, limit)


async def _read(request: Request, limit: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise RequestRefusedError(f"the body has more than {limit} bytes", 413)
        parts.append(part)
    return b"".join(parts)


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The body, a JSON object.

    Raises:
        RequestRefusedError: 400; it is none.
    """
    body = await read_body(request, limit)
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise RequestRefusedError(f"the body is not valid JSON: {str(error)[:120]}") from None
    if not isinstance(found, dict):
        raise RequestRefusedError("the body must be a JSON object", 422)
    return found
