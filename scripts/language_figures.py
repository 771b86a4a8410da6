#!/usr/bin/env python
"""Count habits of language that CONTRIBUTING.md asks to avoid: names, docstrings and comments.

    python scripts/language_figures.py                     src, cookbook, scripts and tests
    python scripts/language_figures.py --list src/megascend/training/lora     every place behind the counts
    python scripts/language_figures.py --added main        fail if what was added since a revision has such names or docstrings

Uses the standard library alone. A name counts where it is bound: an assignment, a parameter, an attribute, a function or a class.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "cookbook", "scripts", "tests")
NOT_OURS = ("src/simnpu/site_packages", "tests/doubles")
"""Names there are those of the packages they stand for."""

PRONOUNS = """each every mine theirs ours own our their its my others those these this both it them one ones some either more
most several few everything something anything nothing whatever what which who whom whose"""
PARTICIPLES = """found said told given made wanted asked kept taken gone come came held meant shown known written needed tried
began begun got went sent done put stood lay seen drawn lost heard brought thought called named stated noted offered picked
explained described answered listed counted looked handed spent"""
"""Not among them: names of the field (expected, chosen, packed, cached, saved) and ``left`` of left and right."""
ADVERBS = """apart beside besides beyond alone together anew again ahead aside here there where when why how at of into within
without whole place way thing things worst enough meanwhile"""
PREFIXES = ("of_", "what_", "its_", "their_", "our_")
CLAUSES = (
    """what which where whether of how who whose whom when why that as if from around nothing everything without kept"""
)
ARTICLES = """the a an one all both each every these those"""
VAGUE_NAMES = frozenset(f"{PRONOUNS} {PARTICIPLES} {ADVERBS}".split())
NOUN_CLAUSES = frozenset(CLAUSES.split())
NOUN_PHRASES = frozenset(ARTICLES.split())
DIFF_HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Finding:
    """A vague name or a noun-clause docstring, with its place."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass
class Figures:
    """Counts over some files."""

    lines: int = 0
    comments: int = 0
    names: int = 0
    docstrings: int = 0
    vague_names: list[Finding] = field(default_factory=list)
    noun_clauses: list[Finding] = field(default_factory=list)

    def add_file(self, path: str, source: str) -> None:
        self.lines += source.count("\n")
        self.comments += sum(
            token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# noqa", "# pyright", "#!"))
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
        )
        tree = ast.parse(source, path)
        for name, line in bound_names(tree):
            self.names += 1
            if is_vague(name):
                self.vague_names.append(Finding(path, line, f"name {name}"))
        for line, first_line, may_be_noun in docstrings(tree):
            self.docstrings += 1
            words = first_line.split()
            word = words[0].lower().rstrip(",:;.") if words else ""
            if word in NOUN_CLAUSES or (word in NOUN_PHRASES and not may_be_noun):
                self.noun_clauses.append(Finding(path, line, f"docstring {first_line!r}"))


def is_vague(name: str) -> bool:
    """Check whether a name is a pronoun, a participle or an adverb, or begins with a preposition or possessive."""
    plain = name.strip("_").lower()
    return plain in VAGUE_NAMES or plain.startswith(PREFIXES)


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of every binding."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, first line, may be a noun) of the docstrings of functions and classes.

    Classes, properties and fixtures are things, and tests say what holds: their first line need not begin with a verb.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = ast.get_docstring(node)
            if text:
                decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
                may_be_noun = (
                    isinstance(node, ast.ClassDef)
                    or node.name.startswith("test_")
                    or "property" in decorators
                    or "fixture" in decorators
                )
                yield node.body[0].lineno, text.splitlines()[0], may_be_noun


def files(paths: Iterable[str]) -> Iterator[str]:
    """Yield the Python files under paths, relative to the repository."""
    for path in paths:
        root = ROOT / path
        for file in [root] if root.is_file() else sorted(root.rglob("*.py")):
            name = file.relative_to(ROOT).as_posix()
            if not name.startswith(NOT_OURS) and "/.venv" not in name:
                yield name


def count(names: Iterable[str]) -> Figures:
    figures = Figures()
    for name in names:
        figures.add_file(name, (ROOT / name).read_text(encoding="utf-8"))
    return figures


def added_lines(revision: str) -> dict[str, set[int]]:
    """Return the numbers of the lines that were added since a revision, by file."""
    diff = subprocess.run(
        ["git", "diff", "--unified=0", "--no-color", revision, "--", *FOLDERS],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        encoding="utf-8",
    ).stdout
    lines: dict[str, set[int]] = {}
    path = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line[6:]
        elif hunk := DIFF_HUNK.match(line):
            start, length = int(hunk[1]), int(hunk[2] or 1)
            lines.setdefault(path, set()).update(range(start, start + length))
    return lines


def check_added(revision: str) -> int:
    """Print vague names and noun-clause docstrings on lines added since a revision; return the exit code."""
    lines = added_lines(revision)
    figures = count(name for name in files(FOLDERS) if name in lines)
    findings = [item for item in figures.vague_names + figures.noun_clauses if item.line in lines[item.path]]
    for finding in findings:
        print(finding)
    if findings:
        print(
            f"{len(findings)} vague names and noun-clause docstrings were added since {revision}: see CONTRIBUTING.md"
        )
    return 1 if findings else 0


def table(rows: Iterable[tuple[str, Figures]]) -> str:
    text = [f"{'':<24} {'lines':>7} {'vague names':>12} {'noun clauses':>13} {'comments a kLoC':>16}"]
    for label, figures in rows:
        names = len(figures.vague_names) / max(figures.names, 1)
        clauses = len(figures.noun_clauses) / max(figures.docstrings, 1)
        comments = 1000 * figures.comments / max(figures.lines, 1)
        text.append(f"{label:<24} {figures.lines:>7} {names:>12.1%} {clauses:>13.1%} {comments:>16.1f}")
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=list(FOLDERS), help="files and folders, relative to the repository")
    parser.add_argument("--list", action="store_true", help="print every finding")
    parser.add_argument("--added", metavar="REVISION", help="check the lines added since a revision")
    arguments = parser.parse_args()
    if arguments.added:
        return check_added(arguments.added)
    rows = [(path, count(files([path]))) for path in arguments.paths]
    if arguments.list:
        for _, figures in rows:
            for finding in figures.vague_names + figures.noun_clauses:
                print(finding)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
