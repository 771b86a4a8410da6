"""Measurements as typed records: one is a line of a section's results file, all of them form the report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["ok", "failed", "left out", "noted"]
"""``noted``: a figure without an expectation, as all speeds are until a card has been measured."""

FORMAT = 1
"""Format version of the report; increment when a field changes its meaning."""


@dataclass(frozen=True)
class Measurement:
    """One measured figure or checked value.

    Attributes:
        name: unique within its section.
        found: the figure or the text that was measured; None if the measurement failed or was left out.
        bound: the largest figure allowed, or the text expected; None where nothing is expected.
        unit: of ``found`` and ``bound``.
        note: why it failed or was left out, or what it means.
    """

    name: str
    verdict: Verdict
    found: float | str | None = None
    bound: float | str | None = None
    unit: str = ""
    note: str = ""


def at_most(name: str, value: float, bound: float, unit: str = "", note: str = "") -> Measurement:
    """Measure a value that must not exceed ``bound``; a value that is not finite fails."""
    holds = math.isfinite(value) and value <= bound
    return Measurement(name, "ok" if holds else "failed", value, bound, unit, note)


def equal(name: str, value: object, expected: object, note: str = "") -> Measurement:
    """Measure a value that must equal ``expected``; both are stored as text."""
    return Measurement(name, "ok" if value == expected else "failed", str(value), str(expected), note=note)


def noted(name: str, value: float | str, unit: str = "", note: str = "") -> Measurement:
    """Record a figure without an expectation."""
    return Measurement(name, "noted", value, unit=unit, note=note)


def left_out(name: str, reason: str) -> Measurement:
    """Record a check that could not run here."""
    return Measurement(name, "left out", note=reason)


def failed(name: str, reason: str) -> Measurement:
    """Record a check that failed before it produced a figure."""
    return Measurement(name, "failed", note=reason)


@dataclass(frozen=True)
class SectionResult:
    """Verdict, duration and measurements of a section.

    Attributes:
        problem: why it ended early: an exit code, or its deadline. Empty if it completed.
        tail: the end of its output, where there was a problem.
    """

    name: str
    verdict: Verdict
    seconds: float
    deadline_s: float
    measurements: tuple[Measurement, ...] = ()
    problem: str = ""
    tail: str = ""

    @property
    def failures(self) -> list[Measurement]:
        """Failed measurements."""
        return [measurement for measurement in self.measurements if measurement.verdict == "failed"]


@dataclass(frozen=True)
class Report:
    """The whole run.

    Attributes:
        about: the environment: versions, the device's name, cards, options. Text and numbers only.
    """

    about: dict[str, Any]
    sections: tuple[SectionResult, ...]
    format: int = FORMAT

    @property
    def failed(self) -> list[str]:
        """Names of the sections that failed."""
        return [section.name for section in self.sections if section.verdict == "failed"]

    def to_json(self) -> str:
        """Return the report as a JSON object; non-finite figures become text, since JSON has no number for them."""
        return json.dumps(plain(asdict(self)), indent=2, allow_nan=False)


def plain(value: Any) -> Any:
    """Replace infinities and NaN in ``value`` by text."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class Results:
    """A section's results file: one line a measurement, written at once so that a killed section keeps its results."""

    path: Path
    names: set[str] = field(default_factory=set)

    def add(self, measurement: Measurement) -> None:
        """Append one measurement."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(asdict(measurement)), allow_nan=False) + "\n")
        self.names.add(measurement.name)

    def extend(self, measurements: Iterable[Measurement]) -> None:
        """Append several measurements."""
        for measurement in measurements:
            self.add(measurement)


def read_results(path: Path) -> tuple[Measurement, ...]:
    """Return the measurements of a results file; skip a line truncated by a kill."""
    measurements = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            measurements.append(Measurement(**json.loads(line)))
        except json.JSONDecodeError:
            continue
    return tuple(measurements)
