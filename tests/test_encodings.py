"""Text files and pipes of src name their encoding: the locale of a container may be POSIX, and models' files are not ASCII."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
PROCESSES = ("run", "Popen", "check_output")
CALLS = ("read_text", "write_text", "open", "fdopen", *PROCESSES, "NamedTemporaryFile")


def is_binary(node: ast.Call, position: int) -> bool:
    """Check whether an opening call's mode, an argument at ``position`` or by name, is a binary one or not a constant."""
    modes = [keyword.value for keyword in node.keywords if keyword.arg == "mode"]
    mode = node.args[position] if len(node.args) > position else next(iter(modes), None)
    return mode is not None and (
        not isinstance(mode, ast.Constant) or not isinstance(mode.value, str) or "b" in mode.value
    )


def text_without_encoding(source: str) -> Iterator[ast.Call]:
    """Find calls that read or write text in the locale's encoding; streams of this process keep theirs."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or {"encoding", None} & {keyword.arg for keyword in node.keywords}:
            continue
        if getattr(node.func, "attr", getattr(node.func, "id", None)) not in CALLS:
            continue
        name, owner = ast.unparse(node.func).rpartition(".")[::-2]
        first = node.args[0] if node.args else None
        is_stream = isinstance(first, ast.Constant) and isinstance(first.value, int)
        is_stream = is_stream or (isinstance(first, ast.Call) and ast.unparse(first.func) == "os.dup")
        if name in ("read_text", "write_text"):
            unencoded = bool(owner) and len(node.args) <= (name == "write_text")
        elif name in ("open", "fdopen"):
            by_path = owner not in ("", "os", "io", "gzip")
            unencoded = not is_stream and (owner, name) != ("os", "open") and owner != "tarfile"
            unencoded = unencoded and not is_binary(node, 0 if by_path else 1)
        elif name in PROCESSES:
            unencoded = any(keyword.arg in ("text", "universal_newlines") for keyword in node.keywords)
        else:
            unencoded = name == "NamedTemporaryFile" and len(node.args) > 0 and not is_binary(node, 0)
        if unencoded:
            yield node


def test_source_never_uses_the_locale_encoding():
    calls = [
        f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)[:80]}"
        for path in sorted(SOURCE.rglob("*.py"))
        for node in text_without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert not calls
