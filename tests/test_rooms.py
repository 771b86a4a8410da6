"""Rooms, their sizes and the direction of imports between them match the table of docs/architecture.md.

Imports inside functions and for type checkers count too.
"""

from __future__ import annotations

from collections import Counter

import pytest

from changed_rooms import FACADE, SIBLINGS, imported, modules, room_of, rooms, select

pytestmark = pytest.mark.core
PROGRAMS = {"megascend.__main__", "megascend.__init__"}


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
        for other in imported(modules()[name])
        if order[room_of(other)] > order[room_of(name)]
    ]
    assert upward == []


@pytest.mark.parametrize("package", [*SIBLINGS, "megascend"])
def test_imports_have_no_cycles(package: str) -> None:
    """Check for import cycles, also within a package."""
    edges = {
        name: sorted({other for other in imported(modules()[name]) if other != name})
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
        for other in imported(modules()[name])
        if room_of(other) != package
    ] == []


# --- tests that a change concerns ---


@pytest.mark.parametrize(
    ("path", "included", "left_out"),
    [
        ("src/megascend/models/registry.py", "tests/engines", "tests/apps/serve"),
        ("src/megascend/backend.py", "tests/models", "tests/apps/train"),
        ("src/megascend/training/batch/losses.py", "tests/engines", "tests/weightwire"),
        ("src/megascend/errors.py", "tests/weightwire", "tests/apps/train"),
        ("src/weightwire/group.py", "tests/sync", "tests/apps/rl"),
        ("tests/engines/plain_optimizers.py", "tests/engines", "tests/apps/cli"),
        ("src/megascend/apps/serve/service.py", "tests/apps/serve", "tests/engines"),
        ("src/megascend/apps/serve/service.py", "tests/apps/cli/test_cli_serve.py", "tests/apps/cli"),
        ("src/megascend/apps/data/files.py", "tests/apps/train", "tests/apps/plan"),
        ("src/simnpu/hccl.py", "tests/npu", "tests/engines"),
        ("src/simnpu/hccl.py", "tests/apps/cli/test_cli_simnpu.py", "tests/apps/cli"),
        ("src/megascend/integrations/verl/engine.py", "tests/integrations", "tests/engines"),
        ("docs/serve.md", "tests/test_docs.py", "tests/apps/serve"),
        ("CHANGELOG.md", "tests/test_docs.py", "tests/test_snippets.py"),
        ("tests/sync/test_push.py", "tests/sync/test_push.py", "tests/sync"),
    ],
)
def test_change_selects_rooms_that_it_concerns(path: str, included: str, left_out: str) -> None:
    tests, _ = select([path])
    assert included in tests
    assert left_out not in tests
    assert "tests" not in tests
