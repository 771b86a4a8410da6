"""Run MindSpeed's own unit tests, each file in a pytest of its own with a deadline, and count how they went.

python mindspeed_tests.py MINDSPEED_CHECKOUT RESULTS_FOLDER [PART_OF_A_PATH...]

RESULTS_FOLDER gets each file's log and junit XML, and `failures.txt`: each way to fail, how often it came, and where.
Ends with "RESULT ok N passed, ...": failures are for people to judge, only a run in which nothing passes is an error.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path

DEADLINE = int(os.environ.get("MINDSPEED_TEST_DEADLINE", "300"))  # seconds a file
OUT_OF_TIME = 124  # exit code of timeout
KINDS = ("passed", "failed", "skipped", "files not collected", "files not done in time")


def run(file: Path, results: Path, name: str) -> int:
    """Run one file's tests. ``timeout`` ends the processes of the tests' pools too."""
    command = ["timeout", "--kill-after=10", str(DEADLINE), sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    with (results / f"{name}.log").open("wb") as log:
        return subprocess.run(
            [*command, "-p", "preload_tests", f"--junitxml={results / name}.xml", str(file)],
            cwd=results,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode


def outcomes(code: int, results: Path, name: str) -> tuple[Counter[str], list[str]]:
    """Count a file's tests by outcome, with the first line of each failure and reason to skip."""
    if code == OUT_OF_TIME:
        log = (results / f"{name}.log").read_text(errors="replace")
        counts = Counter(
            {word.lower(): len(re.findall(rf" {word}\b", log)) for word in ("PASSED", "FAILED", "SKIPPED")}
        )
        return counts + Counter({KINDS[4]: 1}), [f"not done after {DEADLINE} s"]
    counts, reasons = Counter[str](), []
    for case in ElementTree.parse(results / f"{name}.xml").iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if bad is None:
            counts["passed"] += 1
        elif bad.tag == "skipped":
            counts["skipped"] += 1
            reasons.append(f"skipped: {bad.get('message')}")
        elif (bad.get("message") or "").startswith("collection"):
            counts[KINDS[3]] += 1
            reasons.append(f"not collected: {last_error(bad.text or '')}")
        else:
            counts["failed"] += 1
            reasons.append((bad.get("message") or "").split("\n")[0])
    return counts, reasons


def last_error(text: str) -> str:
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return lines[-1] if lines else "no error shown"


def main() -> None:
    checkout, results = Path(sys.argv[1]), Path(sys.argv[2])
    results.mkdir(parents=True, exist_ok=True)
    tests = checkout / "tests_extend" / "unit_tests"
    total, ways = Counter[str](), defaultdict[str, list[str]](list)
    for file in sorted(tests.rglob("test_*.py")):
        name = file.relative_to(tests).as_posix()
        if sys.argv[3:] and not any(part in name for part in sys.argv[3:]):
            continue
        started = time.monotonic()
        flat = name.removesuffix(".py").replace("/", ".")
        counts, reasons = outcomes(run(file, results, flat), results, flat)
        total += counts
        for reason in reasons:
            ways[reason].append(name)
        print(f"{name}: {summary(counts)} ({time.monotonic() - started:.0f} s)", flush=True)
    with (results / "failures.txt").open("w") as text:
        for reason, files in sorted(ways.items(), key=lambda item: -len(item[1])):
            print(f"{len(files)} x {reason} [{', '.join(sorted(set(files)))}]", file=text)
    print(f"RESULT {'ok' if total['passed'] else 'nothing passed:'} {summary(total)}")


def summary(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]) or "no tests"


if __name__ == "__main__":
    main()
