"""Hooks of mkdocs: tables made from the code, pages from beside docs/, labels of cells, roles of reStructuredText as code."""

from __future__ import annotations

import posixpath
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.append(str(Path(__file__).parent))

import docs_tables

DOCS, ROOT = docs_tables.DOCS, docs_tables.DOCS.parent
BESIDE = {
    ROOT / "CONTRIBUTING.md": "contributing.md",
    ROOT / "CHANGELOG.md": "changes.md",
    **{page: f"figures/{page.name}" for page in sorted((ROOT / "benchmarks").glob("*.md"))},
}
"""Pages of the site that are not in docs/."""


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages from beside docs/; of the changelog what users of the last version need."""
    for path, page in BESIDE.items():
        text = path.read_text(encoding="utf-8")
        if path.name == "CHANGELOG.md":
            text = "# What changed\n\n" + text[text.index("## [") : text.index("### Added")]
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert the tables, and link to pages where the site has them."""
    uri = page.file.src_uri
    source = next((path for path, beside in BESIDE.items() if beside == uri), DOCS / uri)

    def relinked(match: re.Match[str]) -> str:
        target = (source.parent / match[1]).resolve()
        place = BESIDE.get(target) or (target.relative_to(DOCS).as_posix() if target.is_relative_to(DOCS) else None)
        return (
            match[0]
            if place is None
            else f"]({posixpath.relpath(place, posixpath.dirname(uri) or '.')}{match[2] or ''})"
        )

    return docs_tables.expanded(re.sub(r"\]\(([\w./-]+\.md)(#[\w-]+)?\)", relinked, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Label the cells of tables, and drop the role before a name and Sphinx's tilde: ``:class:`~a.B``` becomes ``B``."""
    html = re.sub(r"<table>.*?</table>", _labelled, html, flags=re.DOTALL)
    html = re.sub(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>)", "", html)
    return re.sub(r"<code>~(?:\w+\.)+(\w+)</code>", r"<code>\1</code>", html)


def _labelled(match: re.Match[str]) -> str:
    """Name the column in each cell but a row's first, for narrow screens, where a row is a block; unescape pipes in code."""
    names = [escape(re.sub(r"<[^>]*>", "", name), quote=True) for name in re.findall(r"<th[^>]*>(.*?)</th>", match[0])]

    def row(found: re.Match[str]) -> str:
        labels = iter(["", *names[1:]])
        return re.sub(r"<td", lambda _: f'<td data-label="{next(labels, "")}"', found[0])

    return re.sub(r"<tr>.*?</tr>", row, match[0].replace(r"\|", "|"), flags=re.DOTALL)
