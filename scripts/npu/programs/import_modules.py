"""Import modules, each by itself, and say how many could be. python import_modules.py MODULE..."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    names = sys.argv[1:]
    missing = {}
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing[name] = f"{type(error).__name__}: {error}"
    for name, reason in missing.items():
        print(f"{name}: {reason}", file=sys.stderr)
    print(f"RESULT {'not all' if missing else 'ok'} {len(names) - len(missing)} of {len(names)} modules imported")


if __name__ == "__main__":
    main()
