"""Public names of Transformer Engine, read from its wheels without importing them.

    pip download --no-deps transformer_engine==2.8.0 ...
    python scripts/te_names.py transformer_engine-*.whl > tests/reference/te/transformer_engine_names.json

Names are those that a module defines or imports from its own package, without those that begin with an underscore. The list is by
version and by module, for the modules in ``MODULES``. Where a module has an ``__all__``, only what that names counts.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "transformer_engine"
MODULES = (
    "common.recipe", "pytorch", "pytorch.attention", "pytorch.distributed", "pytorch.fp8", "pytorch.module", "pytorch.ops",
    "pytorch.optimizers", "pytorch.quantization", "pytorch.router", "pytorch.tensor",
)  # fmt: skip


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements of the module itself, those under ``if`` and ``try`` included."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.If, ast.Try)):
            waiting += [
                child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.ExceptHandler))
            ]
        elif isinstance(node, ast.ExceptHandler):
            waiting += node.body
        elif isinstance(node, ast.stmt):
            yield node


class Wheel:
    """The sources of one release."""

    def __init__(self, file: Path) -> None:
        self._archive = zipfile.ZipFile(file)
        self._files = set(self._archive.namelist())
        self.version = file.name.split("-")[1]

    def _file(self, module: str) -> str | None:
        path = f"{PACKAGE}/{module.replace('.', '/')}"
        return next((file for file in (f"{path}/__init__.py", f"{path}.py") if file in self._files), None)

    def names(self, module: str) -> list[str]:
        """Sorted public names of ``module``, which is relative to the package; none if there is no such module."""
        file = self._file(module)
        if file is None:
            return []
        names: set[str] = set()
        tree = ast.parse(self._archive.read(file))
        for node in statements(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                return sorted(ast.literal_eval(node.value))
            elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith(PACKAGE)):
                names |= self._imported(node, module, is_package=file.endswith("__init__.py"))
        return sorted(name for name in names if not name.startswith("_"))

    def _imported(self, node: ast.ImportFrom, module: str, is_package: bool) -> set[str]:
        if [alias.name for alias in node.names] != ["*"]:
            return {alias.asname or alias.name for alias in node.names}
        if not node.level:
            return set(self.names((node.module or "").removeprefix(f"{PACKAGE}.")))
        parts = module.split(".")
        parents = parts[: len(parts) - node.level + is_package]
        return set(self.names(".".join([*parents, *filter(None, [node.module])])))


def main(files: list[str]) -> None:
    """Print the list."""
    wheels = sorted(
        (Wheel(Path(file)) for file in files), key=lambda wheel: [int(part) for part in wheel.version.split(".")]
    )
    table = {wheel.version: {f"{PACKAGE}.{module}": wheel.names(module) for module in MODULES} for wheel in wheels}
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
