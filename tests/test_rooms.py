"""Rooms, their sizes and the direction of imports between them match the table of docs/architecture.md.

Imports inside functions and for type checkers count too.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
FACADE = "megascend"
"""``megascend/__init__.py`` is a room of its own, which names what it loads lazily from all others."""
SIBLINGS = ("simnpu", "weightwire")
"""Independent top-level packages in src, each one row of the table."""
PROGRAMS = {"megascend.__main__", "megascend.__init__"}


def rooms() -> dict[str, int]:
    """Return the rooms in docs/architecture.md, lowest first, with their budgets in lines."""
    text = (ROOT / "docs" / "architecture.md").read_text()
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


def imported(name: str) -> Iterator[str]:
    """Yield the modules in src that a module imports at any level."""
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        if isinstance(node, ast.Import):
            candidates = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{name} imports relatively"
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


def test_table_lists_exactly_the_rooms() -> None:
    existing = {room_of(name) for name in modules() if name not in PROGRAMS}
    assert sorted(existing - rooms().keys()) == [], "not in the table of docs/architecture.md"
    assert sorted(rooms().keys() - existing) == [], "in the table of docs/architecture.md, but not in src"


def test_rooms_are_within_their_budgets() -> None:
    lines = Counter[str]()
    for name, path in modules().items():
        lines[room_of(name)] += len(path.read_text().splitlines())
    over = {room: f"{lines[room]} lines, {budget} allowed" for room, budget in rooms().items() if lines[room] > budget}
    assert over == {}, "something has to go; or raise the budget in docs/architecture.md, in a commit that says why"


def test_imports_follow_the_order_of_rooms() -> None:
    order = {name: index for index, name in enumerate(rooms())}
    upward = [
        f"{name} ({room_of(name)}) imports {other} ({room_of(other)})"
        for name in modules()
        if name not in PROGRAMS and name != FACADE
        for other in imported(name)
        if order[room_of(other)] > order[room_of(name)]
    ]
    assert upward == []


@pytest.mark.parametrize("package", [*SIBLINGS, "megascend"])
def test_imports_have_no_cycles(package: str) -> None:
    """Check for import cycles, also within a package."""
    edges = {
        name: sorted({other for other in imported(name) if other != name})
        for name in modules()
        if name.split(".")[0] == package
    }
    left = dict(edges)
    while free := [name for name, dependencies in left.items() if not any(other in left for other in dependencies)]:
        for name in free:
            del left[name]
    assert find_cycle(left) == []


def find_cycle(edges: dict[str, list[str]]) -> list[str]:
    """Return a cycle of the remaining graph, in which every module has a successor."""
    if not edges:
        return []
    path = [next(iter(edges))]
    while True:
        following = next(other for other in edges[path[-1]] if other in edges)
        if following in path:
            return [*path[path.index(following) :], following]
        path.append(following)


@pytest.mark.parametrize("package", SIBLINGS)
def test_sibling_packages_import_only_themselves(package: str) -> None:
    assert [
        (name, other)
        for name in modules()
        if room_of(name) == package
        for other in imported(name)
        if room_of(other) != package
    ] == []
