"""Run a Python program with other values for some of its module-level constants, and nothing else changed.

python run_with_ids.py recipe.py MODEL_ID=/models/small DATASET_ID=/data/small.jsonl
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path


def with_constants(source: str, path: str, values: dict[str, str]) -> ast.Module:
    """Return the program's syntax tree, in which each assignment ``NAME = ...`` of ``values`` has the new value.

    Raises:
        ValueError: the program assigns no such name at module level.
    """
    tree = ast.parse(source, path)
    missing = dict(values)
    for statement in tree.body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(statement, ast.Assign) and isinstance(target, ast.Name) and target.id in values:
            statement.value = ast.copy_location(ast.Constant(values[target.id]), statement.value)
            missing.pop(target.id, None)
    if missing:
        raise ValueError(f"{path} assigns no {', '.join(missing)} at module level")
    return tree


def main() -> None:
    path, *pairs = sys.argv[1:]
    values = dict(pair.split("=", 1) for pair in pairs)
    tree = with_constants(Path(path).read_text(encoding="utf-8"), path, values)
    program = sys.modules["__main__"]
    program.__file__ = path
    sys.argv = [path]
    exec(compile(tree, path, "exec"), program.__dict__)


if __name__ == "__main__":
    main()
