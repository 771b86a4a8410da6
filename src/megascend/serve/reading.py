"""Reading the body of a request, within a limit."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from megascend.serve.body import decompress
from megascend.serve.errors import RequestRefusedError


async def read_body(request: Request, limit: int) -> bytes:
    """The body, opened, at most ``limit`` bytes.

    Raises:
        RequestRefusedError: 413, it is larger; and as :func:`megascend.serve.body.decompress`.
    """
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise RequestRefusedError(f"the body has more than {limit} bytes", 413)
            parts.append(part)
    except ClientDisconnect:
        raise RequestRefusedError("the client went away before its body had ended") from None
    encoding = request.headers.get("content-encoding", "").strip().lower()
    return await asyncio.to_thread(decompress, b"".join(parts), encoding, limit)


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
