"""Run all benchmarks of the suite in one table, with ratios, and check that no ratio has fallen.

    python scripts/bench.py                                  # everything, one GPU; --list shows the deadlines
    python scripts/bench.py --only dense,load --json out.json
    python scripts/bench.py --compare                        # with the ratios stored for this device (benchmarks/DEVICE.json)
    python scripts/bench.py --store                          # writes them
    python scripts/bench.py --tiny --platform cpu            # checks the benchmarks, not speed
    python scripts/bench.py NAME --help                      # one benchmark: a module of scripts/bench

A line whose work may not fit runs at the largest of its sizes that fits the device's memory, and prints it; its ratios are stored
under that size (``moe@4-layers``) and compared with those of the same size only.

Absolute figures differ between machines and from hour to hour; ratios within one run hardly do, so only ratios are stored and
compared. Each line of the suite runs in its own process with a deadline, and fails if the variants that it compares
do not agree numerically. A line that fails is reported, and the others still run.

Exit code: 0; 1 if a line failed or a ratio has fallen by more than its noise or is missing; 2 for a wrong option; 3 if
``--compare`` found nothing to compare with: no stored ratios, or those of another device.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import gate
from bench.gate import Row
from bench.lines import Line, card, select, sized
from bench.runner import SCRIPTS, command, this_device, versions, write
from bench.running import Outcome, run

BENCHMARKS = SCRIPTS.parent / "benchmarks"
TINY_DEADLINE_S = 300.0
"""Deadline of a tiny line; it takes seconds, but the cores may be busy."""
FOLDER = Path("of this device")  # --compare without a file


def choose_sizes(lines: Sequence[Line], memory_gib: float, report: dict[str, Any]) -> list[Line]:
    """Return the lines at sizes that fit the device; record those that have none as failed in ``report``."""
    chosen = []
    for line in lines:
        try:
            chosen.append(sized(line, memory_gib))
        except ValueError as error:
            print(f"{line.name}: FAILED: {error}", flush=True)
            report["lines"][line.name] = {"seconds": 0.0, "problem": str(error), "figures": None}
            continue
        if line.sizes and chosen[-1].name != f"{line.name}@{line.sizes[0].label}":
            largest = line.sizes[0]
            print(
                f"{line.name}: runs as {chosen[-1].name}: {largest.label} needs {largest.gib:g} GiB of device memory, this "
                f"device has {memory_gib:.1f}",
                flush=True,
            )
    return chosen


def table(rows: Sequence[Row]) -> str:
    """Format the rows as a table; a higher ratio is better."""
    width = max(len(row.name) for row in rows)
    text = [f"{'':<{width}} {'value':>11} {'':<9} {'ratio':>7}  to"]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:7.3f}"
        text.append(f"{row.name:<{width}} {row.value:11.5g} {row.unit:<9} {ratio:>7}  {row.against if ratio else ''}")
    return "\n".join(line.rstrip() for line in text)


def measure(lines: Sequence[Line], options: argparse.Namespace, report: dict[str, Any]) -> list[Row]:
    """Run the lines in order; ``report`` is filled and written after each, since a rented machine may disappear."""
    rows: list[Row] = []
    for line in lines:
        deadline = TINY_DEADLINE_S if options.tiny else line.deadline_s
        call = command(line.bench, ["--platform", options.platform, *(line.tiny if options.tiny else line.full)])
        outcome = run(call, options.logs / f"{line.name}.json", options.logs / f"{line.name}.log", deadline)
        line_rows, problem = read_rows(line, outcome)
        rows += line_rows
        took = f"{line.name}: {outcome.seconds:.0f} s"
        print(f"{took}, FAILED: {problem}" if problem else took, flush=True)
        report["lines"][line.name] = {"seconds": outcome.seconds, "problem": problem, "figures": outcome.figures}
        report["rows"] = [asdict(row) for row in rows]
        if options.json:
            write(options.json, report)
    return rows


def read_rows(line: Line, outcome: Outcome) -> tuple[list[Row], str]:
    """Return (rows, problem); figures of an unknown form count as a failure of the line."""
    if outcome.figures is None:
        return [], outcome.problem
    try:
        return line.rows(line.name, outcome.figures), ""
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return [], f"its figures cannot be read: {error!r}"


def compare(rows: Sequence[Row], lines: Sequence[Line], path: Path, device: str, scale: str) -> int:
    """Compare the run with the file; return the exit code."""
    try:
        stored = gate.read(path)
    except FileNotFoundError:
        print(f"NOT COMPARED: no ratios are stored for {device}, scale {scale} ({path}); --store writes them")
        return 3
    if reason := gate.refusal(stored, device, scale):
        print(f"NOT COMPARED: {path}: {reason}")
        return 3
    verdict = gate.compare(rows, stored, [line.name for line in lines])
    for label, entries in (("FALLEN ", verdict.fallen), ("MISSING", verdict.missing)):
        for entry in entries:
            print(f"{label} {entry}")
    for name in verdict.new:
        print(f"new     {name}: nothing stored")
    print(f"{path}: {'no ratio has fallen by more than its noise' if verdict.passed else 'FAILED'}")
    return 0 if verdict.passed else 1


def end_on_sigterm() -> None:
    """Turn SIGTERM into an exception, so that the running line, which has its own session, is ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models for a CPU, a few seconds a line")
    parser.add_argument("--only", metavar="NAMES", help="suites or lines, with commas between them")
    parser.add_argument("--list", action="store_true", help="print the lines and their deadlines, and run nothing")
    parser.add_argument("--json", type=Path, help="write all figures to this file, after every line")
    parser.add_argument("--logs", type=Path, help="keep what the lines print in this folder")
    parser.add_argument(
        "--compare", type=Path, nargs="?", const=FOLDER, metavar="FILE", help="default: the device's file"
    )
    parser.add_argument("--store", action="store_true", help="write the ratios to this device's file in benchmarks/")
    options = parser.parse_args(arguments)
    if options.store and options.compare:
        parser.error("--store would write what --compare compares with: use one of them")
    try:
        options.lines = select(options.only)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if options.list:
        for line in options.lines:
            sizes = "; ".join(f"{size.label} from {size.gib:g} GiB" for size in line.sizes)
            print(f"{line.name:<12} at most {line.deadline_s:4.0f} s  {line.about}{f' ({sizes})' if sizes else ''}")
        return 0
    device, memory_gib, count = this_device(options.platform)
    for line in (line for line in options.lines if line.cards > count):
        print(f"{line.name}: left out: it needs {line.cards} GPUs, and there are {count}", flush=True)
    options.lines = [line for line in options.lines if line.cards <= count]
    scale = "tiny" if options.tiny else "full"
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        options.logs = options.logs or Path(folder)
        options.logs.mkdir(parents=True, exist_ok=True)
        report: dict[str, Any] = {"device": device, "scale": scale, "versions": versions(), "lines": {}, "rows": []}
        lines = options.lines if options.tiny else choose_sizes(options.lines, memory_gib, report)
        rows = measure(lines, options, report)
    print(f"\n{device}, {scale}; {', '.join(f'{name} {version}' for name, version in versions().items())}")
    if rows:
        print(table(rows))
    failed = [name for name, line in report["lines"].items() if line["problem"]]
    print(f"{sum(line['seconds'] for line in report['lines'].values()):.0f} s; failed: {', '.join(failed) or 'none'}")
    path = BENCHMARKS / gate.file_name(device, scale)
    code = 0
    if options.compare:
        code = compare(rows, lines, path if options.compare == FOLDER else options.compare, device, scale)
    if options.store and rows:
        before = gate.read(path) if path.is_file() else None
        gate.write(path, gate.merged(before, rows, device, scale, versions()))
        print(f"stored: {path}")
        for line in lines if scale == "full" else ():
            if line.published and (figures := report["lines"][line.name]["figures"]):
                write(BENCHMARKS / "published" / f"{line.name.partition('@')[0]}-{path.name}", card(line, figures))
    return 1 if failed else code
