"""Packages and the direction of imports between them: the code is compared with the table of docs/architecture.md.

Imports inside functions and those for type checkers count like all others.
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
"""``megascend/__init__.py``, a package of its own: names that are loaded when they are used."""
BESIDE = ("simnpu", "weightwire")
"""Packages of their own in src, each a package in the table."""
PROGRAMS = {"megascend.__main__", "megascend.__init__"}


def packages() -> list[str]:
    """Names of the packages, lowest first, as the table of docs/architecture.md has them."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.split("## Packages", 1)[1].split("\n## ", 1)[0]
    return [match[1].rstrip("/") for match in re.finditer(r"^\| `([\w/]+)` \|", table, re.MULTILINE)]


@cache
def modules() -> dict[str, Path]:
    """Every module of the packages in src, by name; packages without their ``__init__``."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if "site_packages" not in parts:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str) -> Iterator[str]:
    """Modules of ours that a module imports, wherever in it."""
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
    """The package that a module is in."""
    parts = name.split(".")
    return parts[0] if parts[0] in BESIDE else FACADE if len(parts) == 1 else parts[1]


def test_the_table_has_every_package_and_no_other() -> None:
    there = {package_of(name) for name in modules() if name not in PROGRAMS}
    assert sorted(there - set(packages())) == [], "not in the table of docs/architecture.md"
    assert sorted(set(packages()) - there) == [], "in the table of docs/architecture.md, but not in src"
    assert len(packages()) == len(set(packages()))


def test_imports_point_one_way() -> None:
    order = {name: place for place, name in enumerate(packages())}
    upward = [
        f"{name} ({package_of(name)}) imports {other} ({package_of(other)})"
        for name in modules()
        if name not in PROGRAMS
        for other in imported(name)
        if order[package_of(other)] > order[package_of(name)]
    ]
    assert upward == []


@pytest.mark.parametrize("package", [*BESIDE, "megascend"])
def test_there_are_no_circles(package: str) -> None:
    """Not among the modules of one package either."""
    edges = {
        name: sorted({other for other in imported(name) if other != name})
        for name in modules()
        if name.split(".")[0] == package
    }
    left = dict(edges)
    while free := [name for name, others in left.items() if not any(other in left for other in others)]:
        for name in free:
            del left[name]
    assert _a_circle(left) == []


def _a_circle(edges: dict[str, list[str]]) -> list[str]:
    """One of the circles that is left when all that is in none has been taken away."""
    if not edges:
        return []
    path = [next(iter(edges))]
    while True:
        following = next(other for other in edges[path[-1]] if other in edges)
        if following in path:
            return [*path[path.index(following) :], following]
        path.append(following)


@pytest.mark.parametrize("package", BESIDE)
def test_packages_beside_megascend_know_nothing_of_it(package: str) -> None:
    assert [
        (name, other)
        for name in modules()
        if package_of(name) == package
        for other in imported(name)
        if package_of(other) != package
    ] == []
