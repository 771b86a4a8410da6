"""Hooks of mkdocs: tables made from the code, pages of benchmarks/ under figures/, labels of cells, roles of reStructuredText."""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.append(str(Path(__file__).parent))

import docs_tables

FIGURES = docs_tables.DOCS.parent / "benchmarks"


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages of benchmarks/ as ``figures/NAME.md``."""
    for page in sorted(FIGURES.glob("*.md")):
        text = re.sub(r"\]\(\.\./docs/", "](../", page.read_text(encoding="utf-8"))
        files.append(File.generated(config, f"figures/{page.name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert the tables, and link to figures where the site has them and to the repository's other files by their path."""
    up = "../" * page.file.src_uri.count("/")
    return docs_tables.expanded(re.sub(r"\]\((?:\.\./)+benchmarks/([\w-]+\.md)", rf"]({up}figures/\1", markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Label the cells of tables, and drop the role before a name and Sphinx's tilde: ``:class:`~a.B``` becomes ``B``."""
    html = re.sub(r"<table>.*?</table>", _labelled, html, flags=re.DOTALL)
    html = re.sub(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>)", "", html)
    return re.sub(r"<code>~(?:\w+\.)+(\w+)</code>", r"<code>\1</code>", html)


def _labelled(match: re.Match[str]) -> str:
    """Name the column in each cell but a row's first, for narrow screens, where a row is a block."""
    names = [escape(re.sub(r"<[^>]*>", "", name), quote=True) for name in re.findall(r"<th[^>]*>(.*?)</th>", match[0])]

    def row(found: re.Match[str]) -> str:
        labels = iter(["", *names[1:]])
        return re.sub(r"<td", lambda _: f'<td data-label="{next(labels, "")}"', found[0])

    return re.sub(r"<tr>.*?</tr>", row, match[0], flags=re.DOTALL)
