"""Documentation: links resolve, requirements are current, pages are short, and the site builds."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import docs_tables

ROOT = Path(__file__).resolve().parent.parent


@cache
def expanded(page: Path) -> str:
    """Return a page as the site shows it, with its tables."""
    return docs_tables.expanded(page.read_text(encoding="utf-8"))


@cache
def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings as mkdocs and GitHub generate them."""
    text = re.sub(r"^```.*?^```", "", expanded(page), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


PAGES = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
LINKING = [*{*ROOT.glob("*.md"), *PAGES}, ROOT / "cookbook" / "README.md"]


@pytest.mark.parametrize("page", sorted(LINKING), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_resolve(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        if file.startswith("http"):
            continue
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    assert broken == []


def test_requirements_are_those_of_the_version_table() -> None:
    text = docs_tables.PROJECT.read_text(encoding="utf-8")
    assert docs_tables.packaging(text) == text, "run: python scripts/docs_tables.py"


def test_site_builds_without_warnings(tmp_path: Path) -> None:
    """Build as `pip install -e '.[docs]'` and `mkdocs build --strict` do."""
    from importlib.util import find_spec

    if missing := [name for name in ("mkdocs", "material", "mkdocstrings_handlers") if find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} is not installed: pip install -e '.[docs]'")
    completed = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    assert 'not included in the "nav"' not in completed.stderr
    site = tmp_path / "site"
    assert (site / "own-data" / "index.html").is_file()
    assert 'id="optimizermuon"' in (site / "settings" / "index.html").read_text(encoding="utf-8")
    assert (site / "figures" / "numerics" / "index.html").is_file()
