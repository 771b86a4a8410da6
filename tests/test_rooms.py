"""Packages and the direction of imports between them match the table of docs/architecture.md.

Imports inside functions and for type checkers count too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
FACADE = "megascend"
"""``megascend/__init__.py`` counts as a separate package: it loads its names lazily."""
SIBLINGS = ("simnpu", "weightwire")
"""Independent top-level packages in src, each one row of the table."""
PROGRAMS = {"megascend.__main__", "megascend.__init__"}


def packages() -> list[str]:
    """Return the names of the packages in docs/architecture.md, lowest first."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.split("## Packages", 1)[1].split("\n## ", 1)[0]
    return [match[1].rstrip("/") for match in re.finditer(r"^\| `([\w/]+)` \|", table, re.MULTILINE)]


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


def package_of(name: str) -> str:
    """Return the package of a module."""
    parts = name.split(".")
    return parts[0] if parts[0] in SIBLINGS else FACADE if len(parts) == 1 else parts[1]


def test_table_lists_exactly_the_packages() -> None:
    existing = {package_of(name) for name in modules() if name not in PROGRAMS}
    assert sorted(existing - set(packages())) == [], "not in the table of docs/architecture.md"
    assert sorted(set(packages()) - existing) == [], "in the table of docs/architecture.md, but not in src"
    assert len(packages()) == len(set(packages()))


def test_imports_follow_the_package_order() -> None:
    order = {name: index for index, name in enumerate(packages())}
    upward = [
        f"{name} ({package_of(name)}) imports {other} ({package_of(other)})"
        for name in modules()
        if name not in PROGRAMS
        for other in imported(name)
        if order[package_of(other)] > order[package_of(name)]
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
        if package_of(name) == package
        for other in imported(name)
        if package_of(other) != package
    ] == []
