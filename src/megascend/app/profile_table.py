"""What took the time in a recorded step: from the events of a Chrome trace to a table of kernels and operators. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]
"""One of ``traceEvents``: name, category, microseconds, process and thread."""

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a GPU did, as torch.profiler calls them."""
OPERATOR = "cpu_op"
SHOWN = 25
NAME_WIDTH = 72


@dataclass(frozen=True)
class Row:
    """Everything of one name: how often it was called and how long it took in all, in microseconds, without what it called."""

    name: str
    calls: int
    micros: float


def kernels(events: Iterable[Event]) -> list[Row]:
    """What the device did, the longest first; kernels of several streams may have run at the same time."""
    return _sums((event["name"], float(event["dur"])) for event in events if _is(event, ON_DEVICE))


def operators(events: Iterable[Event]) -> list[Row]:
    """What the host's threads did in operators, each without the operators that it called; the longest first."""
    threads: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in events:
        if _is(event, (OPERATOR,)):
            threads[event["pid"], event["tid"]].append(event)
    found: list[tuple[str, float]] = []
    for thread in threads.values():
        found += _own_times(thread)
    return _sums(found)


def busy_micros(events: Iterable[Event]) -> float:
    """How long at least one kernel ran."""
    spans = sorted((float(event["ts"]), float(event["dur"])) for event in events if _is(event, ON_DEVICE))
    total, end = 0.0, float("-inf")
    for start, took in spans:
        total += max(0.0, start + took - max(start, end))
        end = max(end, start + took)
    return total


def render(events: Sequence[Event], steps: int, seconds: float) -> str:
    """The tables of ``steps`` recorded steps that took ``seconds`` in all, as text."""
    lines = [f"{steps} step{'s' if steps > 1 else ''}, {1000 * seconds / steps:.1f} ms each while recorded", ""]
    on_device = kernels(events)
    if on_device:
        share = busy_micros(events) / (1e6 * seconds)
        lines += [f"The device was busy for {share:.0%} of that time. Its kernels and copies:", ""]
        lines += [*_table(on_device, steps, seconds), ""]
    lines += [
        "Operators of the host, each without those that it called:",
        "",
        *_table(operators(events), steps, seconds),
    ]
    return "\n".join([*lines, ""])


def _table(rows: Sequence[Row], steps: int, seconds: float) -> list[str]:
    lines = [f"{'ms a step':>10}  {'of step':>7}  {'calls a step':>12}  name"]
    for row in rows[:SHOWN]:
        name = row.name if len(row.name) <= NAME_WIDTH else f"{row.name[: NAME_WIDTH - 3]}..."
        share = row.micros / (1e6 * seconds)
        lines.append(f"{row.micros / 1000 / steps:>10.3f}  {share:>7.1%}  {row.calls / steps:>12.1f}  {name}")
    if len(rows) > SHOWN:
        rest = sum(row.micros for row in rows[SHOWN:])
        lines.append(
            f"{rest / 1000 / steps:>10.3f}  {rest / (1e6 * seconds):>7.1%}  {'':>12}  {len(rows) - SHOWN} others"
        )
    return lines


def _own_times(thread: list[Event]) -> list[tuple[str, float]]:
    """(name, microseconds without what lies inside) of the events of one thread, which nest."""
    thread.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
    found: list[tuple[str, float]] = []
    open_calls: list[tuple[float, int]] = []  # end, and place in found
    for event in thread:
        start, took = float(event["ts"]), float(event["dur"])
        while open_calls and open_calls[-1][0] <= start:
            open_calls.pop()
        if open_calls:
            name, own = found[open_calls[-1][1]]
            found[open_calls[-1][1]] = (name, own - took)
        open_calls.append((start + took, len(found)))
        found.append((event["name"], took))
    return found


def _sums(calls: Iterable[tuple[str, float]]) -> list[Row]:
    counts: dict[str, int] = defaultdict(int)
    micros: dict[str, float] = defaultdict(float)
    for name, took in calls:
        counts[name] += 1
        micros[name] += took
    rows = [Row(name, counts[name], micros[name]) for name in counts]
    return sorted(rows, key=lambda row: (-row.micros, row.name))


def _is(event: Event, categories: Sequence[str]) -> bool:
    return event.get("ph") == "X" and event.get("cat") in categories
