"""A raised message is one sentence with one remedy: at most 160 characters, a field counted as six."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "megascend"
LIMIT = 160
FIELD = "x" * 6


def literal(node: ast.expr) -> str:
    """Return the text of a message, with ``FIELD`` for whatever is computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal(node.left) + literal(node.right)
    return FIELD


def test_raised_messages_are_short() -> None:
    too_long = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                size = len(literal(node.exc.args[0]))
                if size > LIMIT:
                    too_long.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {size} characters")
    assert too_long == []
