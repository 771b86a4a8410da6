"""Hooks of mkdocs: show roles of reStructuredText in docstrings as code."""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Drop the role before a name, and the tilde with which Sphinx shortens one: ``:class:`~a.B``` becomes ``B``."""
    html = re.sub(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>)", "", html)
    return re.sub(r"<code>~(?:\w+\.)+(\w+)</code>", r"<code>\1</code>", html)
