"""Documentation: files, modules, public names and links on its pages exist, and the site builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import docs_tables

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.nightly  # covered: test_snippets.py; the tests themselves
def test_examples_in_testing_page_run(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    assert sum("def test_" in program for program in programs) == 3
    for number, program in enumerate(programs):
        (tmp_path / f"test_example_{number}.py").write_text(program)
    completed = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "OMP_NUM_THREADS": "1"},
    )
    assert completed.returncode == 0, completed.stdout[-4000:]
    assert "3 passed" in completed.stdout


PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_on_a_page_exist(page: Path) -> None:
    """Check paths below the repository, src, src/megascend, src/simnpu or tests."""
    folders = [ROOT, ROOT / "src", ROOT / "src" / "megascend", ROOT / "src" / "simnpu", ROOT / "tests"]
    mentions = set(re.findall(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|sh|md))`", page.read_text(encoding="utf-8")))
    missing = sorted(path for path in mentions if not any((folder / path).exists() for folder in folders))
    assert missing == [], f"{page.name} names missing files"


@pytest.mark.parametrize("page", ["benchmarks.md", "numerics.md"])
def test_files_of_measurements_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    files = set(re.findall(r"`(?:benchmarks/)?([\w-]+/[\w.-]+\.json)`", text))
    assert len(files) > 5
    assert sorted(file for file in files if not (ROOT / "benchmarks" / file).exists()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_named_on_a_page_exist(page: Path) -> None:
    from importlib.util import find_spec

    missing = []
    for name in set(re.findall(r"\b((?:megascend|simnpu)(?:\.[a-z_]+){2,})\b", page.read_text(encoding="utf-8"))):
        package, _, last = name.rpartition(".")
        if find_spec(package.split(".")[0]) is None or not _exists(package, last):
            missing.append(name)
    assert sorted(missing) == [], f"{page.name} names missing modules"


def _exists(package: str, last: str) -> bool:
    """Check whether ``package.last`` is a module, or a name in one."""
    path = ROOT / "src" / Path(*package.split("."))
    if (path / f"{last}.py").exists() or (path / last).is_dir():
        return True
    files = [path.with_suffix(".py"), path / "__init__.py"]
    return any(re.search(rf"\b{last}\b", file.read_text(encoding="utf-8")) for file in files if file.exists())


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings as mkdocs and GitHub generate them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_api_page_lists_exactly_the_public_names() -> None:
    import megascend
    from megascend.errors import MegascendError

    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    rows = "".join(re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE))
    entries = [
        *re.findall(r"^::: megascend\.(?:runtime\.bootstrap\.)?(\w+)$", page, re.MULTILINE),
        *re.findall(r"`(\w+)`", rows),
    ]
    public = {name: getattr(megascend, name) for name in megascend.__all__ if name != "__version__"}
    errors = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, MegascendError)}
    assert set(entries) - (public.keys() - errors) == set(), "docs/api.md lists names that do not exist"
    assert (public.keys() - errors) - set(entries) == set(), "add them to docs/api.md"
    errors_page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert [name for name in errors if f"`{name}`" not in errors_page and name != "MegascendError"] == []


LINKING = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "cookbook" / "README.md"]


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


def test_navigation_lists_every_page_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = text[text.index("\nnav:") :]
    entries = re.findall(r": ([\w/-]+\.md)$", navigation, re.MULTILINE)
    assert sorted(entries) == sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))


def test_generated_tables_are_current() -> None:
    """Compare all but the published models', which ``models/test_published.py`` compares: it has described them."""
    tables = {name: table for name, table in docs_tables.TABLES.items() if name != "published models"}
    assert not docs_tables.outdated(tables), "run: python scripts/docs_tables.py"


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
    assert (tmp_path / "site" / "own-data" / "index.html").is_file()
