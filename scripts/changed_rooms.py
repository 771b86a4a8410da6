"""Rooms of the source, imports between them, and the tests that a change concerns.

    python scripts/changed_rooms.py              # tests of what differs from MEGASCEND_CI_BASE
    python scripts/changed_rooms.py --backend    # tests of a change of the backend

Prints folders and files of tests, one a line, for pytest's option --concerned (tests/conftest.py), and on stderr the reason.
MEGASCEND_CI_BASE is a branch or a commit; its default is the default branch.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
FACADE = "megascend"
"""``megascend/__init__.py`` is a room of its own, which names what it loads lazily from all others."""
SIBLINGS = ("simnpu", "weightwire")
"""Independent top-level packages in src, each one row of the table."""
UNDER_ALL = ("config", "runtime")
"""Rooms of the backend on which every application depends so much that a change of them runs everything."""
ENDS = {"simnpu": ["tests/simnpu", "tests/npu"], "integrations": ["tests/integrations"]}
"""Tests of rooms that no other room needs: beside them, files that name the room."""
LOWEST = ("weightwire", "reference")
"""Folders of tests that use none of the rooms from ``models`` on."""
PAGES = ["tests/test_docs.py", "tests/test_snippets.py", "tests/test_recipes.py"]
PAGE_FILES = re.compile(r"(docs|benchmarks|examples|recipes)/.*|[^/]+\.md|cookbook/README\.md")


def rooms() -> dict[str, int]:
    """Return the rooms in docs/architecture.md, lowest first, with their budgets in lines."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.split("## The house", 1)[1].split("\nThe rooms before", 1)[0]
    rows = re.finditer(r"^\| `([\w/]+)` \|.*\| ([\d,]+) \|$", table, re.MULTILINE)
    return {row[1].rstrip("/"): int(row[2].replace(",", "")) for row in rows}


@cache
def modules() -> dict[str, Path]:
    """Return every module in src by name; ``__init__`` is named as its package."""
    modules_by_name = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if "site_packages" not in parts:
            modules_by_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules_by_name


@cache
def imported(path: Path) -> list[str]:
    """Return the modules in src that a file imports at any level."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            candidates = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path} imports relatively"
            candidates = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for candidate in candidates:
            if candidate in modules():
                yield candidate
            elif candidate.rpartition(".")[0] in modules():  # a name in a module
                yield candidate.rpartition(".")[0]


def room_of(name: str) -> str:
    """Return the room of a module."""
    parts = name.split(".")
    return parts[0] if parts[0] in SIBLINGS else FACADE if len(parts) == 1 else parts[1]


def backend() -> list[str]:
    """Return the rooms of the backend: those before the applications."""
    names = list(rooms())
    return [name for name in names[: names.index("apps")] if name != "simnpu"]


def application_of(path: Path | str) -> str | None:
    """Return the application of a file of its source or tests."""
    match = re.search(r"(?:src/megascend|tests)/apps/(\w+)/", str(path))
    return match and match[1]


def backend_tests(room: str | None = None) -> set[str]:
    """Return the tests of a change of a room of the backend, or of any: all but the applications' and those of rooms below."""
    left_out = ["apps"]
    if room in backend() and backend().index(room) >= backend().index("models"):
        left_out += LOWEST
    return all_tests() - {f"tests/{name}" for name in left_out}


def all_tests() -> set[str]:
    """Return the folders and files in tests."""
    children = [path for path in (ROOT / "tests").iterdir() if path.is_dir() or path.name.startswith("test_")]
    return {f"tests/{path.name}" for path in children if path.name != "__pycache__"}


def application_tests(changed: str) -> set[str]:
    """Return the tests of an application, those of what imports it among applications, and files elsewhere that import it.

    The commands import every application: of their tests, those of a command that imports the changed one.
    """
    package = f"megascend.apps.{changed}."
    importing = [path for path in modules().values() if any(name.startswith(package) for name in imported(path))]
    files = [
        path for path in (ROOT / "tests").rglob("test_*.py") if any(name.startswith(package) for name in imported(path))
    ]
    for path in importing:
        if application_of(path) == "cli" != changed:
            files += (ROOT / "tests" / "apps" / "cli").glob(f"test_cli_{path.stem}*.py")
    applications = {changed, *map(application_of, importing)} - {None} - ({"cli"} - {changed})
    return {f"tests/apps/{name}" for name in applications} | {str(path.relative_to(ROOT)) for path in files}


def tests_naming(word: str) -> set[str]:
    """Return the files of tests in which a word occurs, if only in a program or a command."""
    files = (path for path in (ROOT / "tests").rglob("test_*.py") if re.search(rf"\b{word}\b", path.read_text("utf-8")))
    return {str(path.relative_to(ROOT)) for path in files}


def select(paths: Iterable[str]) -> tuple[set[str], str]:
    """Return the tests that changed files concern, and the reason.

    A change of the backend runs the backend's tests and of the applications, all of which import it, only those marked ``core``;
    a change of an application runs the core of the backend, which does not import it. ``tests`` alone is everything, installation
    included; a change of code below all rooms concerns all tests and no installation.
    """
    tests, reasons = set[str](), dict[str, None]()
    for path in paths:
        folder, _, rest = path.removeprefix("src/megascend/").removeprefix("src/").partition("/")
        room = rest.partition("/")[0] if folder == "tests" else folder.removesuffix(".py")
        application = application_of(path)
        if re.fullmatch(r"tests/.*/?test_\w+\.py", path):
            tests.add(path)
            reasons["changed files of tests"] = None
        elif path == "CHANGELOG.md":  # has no programs
            tests.add("tests/test_docs.py")
            reasons["changelog"] = None
        elif PAGE_FILES.fullmatch(path):
            tests.update(PAGES)
            reasons["pages"] = None
        elif application:
            tests |= application_tests(application)
            reasons[f"application {application}"] = None
        elif room in ENDS and (path.startswith("src/") or folder == "tests"):
            tests |= {*ENDS[room], *tests_naming(room)}
            reasons[room] = None
        elif room in backend() and room not in UNDER_ALL and (path.startswith("src/") or folder == "tests"):
            tests |= backend_tests(room)
            reasons[f"backend ({room})"] = None
        elif path.startswith(("src/", "tests/")):  # UNDER_ALL, megascend.testing, helpers of tests
            tests |= all_tests()
            reasons[f"every room, for {path}"] = None
        else:
            return {"tests"}, f"everything: {path} concerns every room and its installation"
    if not tests:
        return {"tests"}, "everything: nothing differs from the base"
    folders = tuple(f"{path}/" for path in tests)
    return {path for path in tests if not path.startswith(folders)}, " and ".join(reasons)


def changes(base: str) -> list[str] | None:
    """Return the files that differ from the commit where HEAD left ``base``; None if there is none."""
    merge_base = _git("merge-base", "HEAD", base)
    if not merge_base:
        return None
    new = _git("ls-files", "--others", "--exclude-standard") or ""
    return [*(_git("diff", "--name-only", "--no-renames", merge_base) or "").splitlines(), *new.splitlines()]


def _git(*arguments: str) -> str | None:
    completed = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    return completed.stdout.strip() if completed.returncode == 0 else None


def main() -> None:
    if sys.argv[1:] == ["--backend"]:
        tests, reason = backend_tests(), "backend"
    else:
        bases = [os.environ["MEGASCEND_CI_BASE"]] if "MEGASCEND_CI_BASE" in os.environ else ["origin/HEAD", "main"]
        found = next((paths for paths in map(changes, bases) if paths is not None), None)
        tests, reason = ({"tests"}, f"everything: no common commit with {bases[0]}") if found is None else select(found)
    print(f"tests of {reason}", file=sys.stderr)
    print(*sorted(tests), sep="\n")


if __name__ == "__main__":
    main()
