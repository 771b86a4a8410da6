"""A raised message is one sentence with one remedy: at most 160 characters, a field counted as six."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "megascend"
LIMIT = 160
FIELD = "x" * 6
LEFT = {"config": 8, "apps/data": 13, "apps/serve": 1, "": 0}
"""Longer messages that are still to be shortened, by folder; ``""`` is all others."""


def literal(node: ast.expr) -> str:
    """Return the text of a message, with ``FIELD`` for whatever is computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal(node.left) + literal(node.right)
    return FIELD


@pytest.mark.parametrize("folder", LEFT)
def test_raised_messages_are_short(folder: str) -> None:
    others = [SOURCE / name for name in LEFT if name and not folder]
    too_long = []
    for path in sorted((SOURCE / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                size = len(literal(node.exc.args[0]))
                if size > LIMIT and not any(path.is_relative_to(other) for other in others):
                    too_long.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {size} characters")
    assert len(too_long) <= LEFT[folder], "\n".join(too_long)
