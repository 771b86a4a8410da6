#!/usr/bin/env python3
"""Whether the simulated device is as it was when all of its own tests passed: tests/simnpu/.verified tells.

    python scripts/npu/simnpu_verified.py            # exit code 0 if it is, 1 if it is not; a line says why
    bash scripts/test.sh npu --verify-simulator  # runs the tests and writes the file (--state before, --write after)

The file holds a digest of the simulator and of its tests, and the versions of torch and
Python. Documentation does not count. Run it with the Python of the tests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERIFIED = Path("tests/simnpu/.verified")
COVERED = ("src/simnpu", "tests/simnpu")


def covered_files(root: Path) -> list[Path]:
    """List the files of the digest relative to ``root``: all but documentation and files that Python and editors leave."""
    paths = (path.relative_to(root) for folder in COVERED for path in (root / folder).rglob("*") if path.is_file())
    return sorted(
        path
        for path in paths
        if path.suffix not in (".md", ".pyc")
        and not any(part.startswith(".") or part == "__pycache__" for part in path.parts)
    )


def state(root: Path) -> dict[str, str]:
    """Return the digest and the versions that the tests depend on; torch's without its build (``+cpu``)."""
    digest = hashlib.sha256()
    for path in covered_files(root):
        content = (root / path).read_bytes()
        digest.update(f"{path.as_posix()} {len(content)}\n".encode() + content)
    return {
        "files": digest.hexdigest(),
        "torch": version("torch").partition("+")[0],
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def difference(root: Path) -> str:
    """Return the reason why the tests must run; empty if they need not."""
    try:
        verified = json.loads((root / VERIFIED).read_text())
    except FileNotFoundError:
        return f"there is no {VERIFIED}"
    now = state(root)
    if verified.get("files") != now["files"]:
        return f"{', '.join(COVERED)} have changed since {VERIFIED} was written"
    outdated = [name for name in ("torch", "python") if verified.get(name) != now[name]]
    changed = [f"{name} {verified.get(name)} -> {now[name]}" for name in outdated]
    return f"verified with another version: {', '.join(changed)}" if changed else ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Is the simulated device the one whose own tests passed?")
    parser.add_argument("--state", action="store_true", help="print what the tests are about to run on")
    parser.add_argument("--write", metavar="STATE", help="all of tests/simnpu passed on STATE: note it")
    options = parser.parse_args(arguments)
    if options.state:
        print(json.dumps(state(ROOT)))
        return 0
    if options.write:
        if json.loads(options.write) != state(ROOT):
            print(f"{VERIFIED} is not written: files have changed while the tests ran", file=sys.stderr)
            return 1
        (ROOT / VERIFIED).write_text(json.dumps(state(ROOT), indent=1) + "\n")
        print(f"{VERIFIED}: written; commit it")
        return 0
    if reason := difference(ROOT):
        print(f"tests/simnpu run: {reason}. To have CI leave them out: bash scripts/test.sh npu --verify-simulator")
        return 1
    print(f"tests/simnpu left out: the simulator is the one whose tests all passed ({VERIFIED})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
