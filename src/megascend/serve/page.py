"""The page at ``/``: one file with its own style and script, which asks ``/status`` for what it shows."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_FILE = Path(__file__).with_name("page.html")


@cache
def page() -> tuple[bytes, str]:
    """The page, and the Content-Security-Policy that allows its one style and its one script by their digests, and no others."""
    text = _FILE.read_text("utf-8")
    style, script = (re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("style", "script"))
    policy = (
        f"default-src 'none'; style-src {_digests(style)}; script-src {_digests(script)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def _digests(parts: list[str]) -> str:
    found = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
    return " ".join(f"'sha256-{each}'" for each in found)


async def show_page(request: Request) -> Response:
    """Answers with the page, which holds no figures itself."""
    text, policy = page()
    headers = {
        "content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }  # fmt: skip
    return Response(text, media_type="text/html; charset=utf-8", headers=headers)
