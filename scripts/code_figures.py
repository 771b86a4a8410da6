#!/usr/bin/env python
"""Count the parts of src/: files, lines, functions, small modules with one importer, names and bodies that occur twice.

    python scripts/code_figures.py            the working tree
    python scripts/code_figures.py REV        a git revision next to the working tree
    python scripts/code_figures.py --list     the modules, names and bodies behind the counts

Uses the standard library alone, and reads a revision through ``git archive``.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import subprocess
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = ("megascend", "weightwire", "simnpu")
SMALL_MODULE = 80
"""Most lines of a module that may be too small to stand alone."""
SMALLEST_DUPLICATE = 30
"""Fewest nodes of a function's syntax tree for which an equal one counts as a duplicate: about three statements."""


@dataclass(frozen=True)
class Module:
    """A source file, parsed."""

    name: str
    lines: int
    tree: ast.Module

    @property
    def package(self) -> str:
        """The distribution, or the package of megascend; its root modules count together as ``megascend``."""
        parts = self.name.split(".")
        return f"{parts[0]}/{parts[1]}" if parts[0] == "megascend" and len(parts) > 2 else parts[0]


def working_tree() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")}


def revision(name: str) -> dict[str, str]:
    archive = subprocess.run(["git", "archive", name, "src"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        members = [member for member in files if member.isfile() and member.name.endswith(".py")]
        return {member.name: files.extractfile(member).read().decode() for member in members}  # type: ignore[union-attr]


def parse(sources: Mapping[str, str]) -> list[Module]:
    """Parse all sources but the packages that simnpu puts in place of others (``site_packages``)."""
    modules = []
    for path, text in sorted(sources.items()):
        parts = Path(path).with_suffix("").parts[1:]
        if "site_packages" not in parts:
            modules.append(Module(".".join(parts), len(text.splitlines()), ast.parse(text)))
    return modules


def importers(modules: list[Module]) -> dict[str, set[str]]:
    """Map each module to the modules that import it, inside functions and for type checkers too."""
    names = {module.name.removesuffix(".__init__"): module.name for module in modules}
    users: dict[str, set[str]] = {module.name: set() for module in modules}
    for module in modules:
        for node in ast.walk(module.tree):
            candidates: list[str] = []
            if isinstance(node, ast.Import):
                candidates = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                candidates = [f"{node.module}.{alias.name}" for alias in node.names]
            for candidate in candidates:
                target = names.get(candidate) or names.get(candidate.rpartition(".")[0])
                if target and target != module.name:
                    users[target].add(module.name)
    return users


def functions(modules: list[Module]) -> Iterator[tuple[Module, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield module, node


def normalised(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """Return a function's body without docstring and with names numbered as they occur; None for one that is too small."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    text = " ".join(map(ast.dump, body))
    if text.count("(") < SMALLEST_DUPLICATE:
        return None
    numbers: dict[str, int] = {}
    return re.sub(r"(?<=id=')\w+", lambda name: str(numbers.setdefault(name[0], len(numbers))), text)


def figures(modules: list[Module]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the counts by their title, and the lists behind three of them."""
    lines = Counter[str]()
    files = Counter[str]()
    for module in modules:
        lines[module.package] += module.lines
        files[module.package] += 1
    library = [module for module in modules if not module.name.startswith("simnpu")]
    users = importers(modules)
    small = {module.name for module in library if module.lines <= SMALL_MODULE and not module.name.endswith("__init__")}
    classes: dict[str, set[str]] = defaultdict(set)
    bodies: dict[str, list[str]] = defaultdict(list)
    raises = 0
    for module in library:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(module.name)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                raises += "Raises:" in (ast.get_docstring(node) or "")
    for module, function in functions(library):
        if (body := normalised(function)) is not None:
            bodies[body].append(f"{module.name}.{function.name}")
    lists = {
        f"modules of at most {SMALL_MODULE} lines with one importer": [
            f"{name} <- {next(iter(users[name]))}" for name in sorted(small) if len(users[name]) == 1
        ],
        "class names in several files": [
            f"{n}: {', '.join(sorted(m))}" for n, m in sorted(classes.items()) if len(m) > 1
        ],
        "function bodies that occur twice": [", ".join(group) for group in bodies.values() if len(group) > 1],
    }
    total = sum(module.lines for module in library)
    sizes = sorted(module.lines for module in library if not module.name.endswith("__init__"))
    table = {f"{package}: files / lines": f"{files[package]} / {lines[package]}" for package in sorted(lines)}
    table["megascend + weightwire: files / lines"] = f"{len(library)} / {total}"
    table["all of src: files / lines"] = f"{len(modules)} / {sum(lines.values())}"
    table["file median / p90 (lines)"] = f"{statistics.median(sizes):.0f} / {sizes[len(sizes) * 9 // 10]}"
    table["functions per kLoC"] = f"{1000 * sum(1 for _ in functions(library)) / total:.0f}"
    table |= {title: str(len(entries)) for title, entries in lists.items()}
    table["`Raises:` blocks"] = str(raises)
    return table, lists


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("revision", nargs="?", help="a git revision to compare with")
    parser.add_argument("--list", action="store_true", help="print what is behind the counts of the working tree")
    options = parser.parse_args()
    now, lists = figures(parse(working_tree()))
    before = figures(parse(revision(options.revision)))[0] if options.revision else {}
    width = max(map(len, now | before))
    print(f"{'':<{width}}" + (f"  {options.revision[:14]:>14}" if before else "") + f"  {'working tree':>14}")
    for title in {**before, **now}:
        row = [before.get(title, "-")] if before else []
        print(f"{title:<{width}}  " + "  ".join(f"{value:>14}" for value in [*row, now.get(title, "-")]))
    if options.list:
        for title, entries in lists.items():
            print("", f"{title}:", *entries, sep="\n  ")


if __name__ == "__main__":
    main()
