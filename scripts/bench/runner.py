"""Run the suite, or a benchmark by its name."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from bench import suite

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))


def main() -> int | None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        suite.end_on_sigterm()
        return suite.main()
    name = sys.argv[1]
    if name not in NAMES:
        raise SystemExit(f"no benchmark {name}: there are {', '.join(NAMES)}")
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    return import_module(f"bench.{name}").main()
