"""Answers in JSON that can be written whatever text they hold."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response


class Json(Response):
    """A JSON answer in ASCII.

    What clients sent may come back in it: halves of surrogate pairs, which JSON can hold and UTF-8 cannot, stay escaped. Numbers
    that are not finite are written as Python's clients read them.
    """

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """``content`` as text."""
        return json.dumps(content, separators=(",", ":")).encode("ascii")
