"""What was found, as typed records: one of them is a line of a section's file of results, all of them are the report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["ok", "failed", "left out", "noted"]
"""``noted``: a figure without an expectation, as every speed before a first card has been seen."""

FORMAT = 1
"""Of the report; to be raised when a field changes its meaning."""


@dataclass(frozen=True)
class Measurement:
    """One thing that was looked at.

    Attributes:
        name: of it, unique in its section.
        found: the figure or the text found; None where there is none.
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


def at_most(name: str, found: float, bound: float, unit: str = "", note: str = "") -> Measurement:
    """``found`` must not exceed ``bound``; what is not finite does."""
    holds = math.isfinite(found) and found <= bound
    return Measurement(name, "ok" if holds else "failed", found, bound, unit, note)


def equal(name: str, found: object, expected: object, note: str = "") -> Measurement:
    """``found`` must be ``expected``; both are kept as text."""
    return Measurement(name, "ok" if found == expected else "failed", str(found), str(expected), note=note)


def noted(name: str, found: float | str, unit: str = "", note: str = "") -> Measurement:
    """A figure without an expectation."""
    return Measurement(name, "noted", found, unit=unit, note=note)


def left_out(name: str, reason: str) -> Measurement:
    """Something that could not be looked at here."""
    return Measurement(name, "left out", note=reason)


def failed(name: str, reason: str) -> Measurement:
    """Something that ended before there was a figure."""
    return Measurement(name, "failed", note=reason)


@dataclass(frozen=True)
class SectionResult:
    """How a section went.

    Attributes:
        problem: why it ended early: an exit code, or its deadline. Empty if it came to its end.
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
        """What of it failed."""
        return [each for each in self.measurements if each.verdict == "failed"]


@dataclass(frozen=True)
class Report:
    """The whole run.

    Attributes:
        about: what it ran on: versions, the device's name, cards, options. Text and numbers only.
    """

    about: dict[str, Any]
    sections: tuple[SectionResult, ...]
    format: int = FORMAT

    @property
    def failed(self) -> list[str]:
        """Names of the sections that failed."""
        return [section.name for section in self.sections if section.verdict == "failed"]

    def to_json(self) -> str:
        """The report as one JSON object; figures that are not finite become text, which every reader of JSON takes."""
        return json.dumps(plain(asdict(self)), indent=2, allow_nan=False)


def plain(value: Any) -> Any:
    """``value`` with infinities and NaN as text."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class Results:
    """A section's file of results: a line for each measurement, written as it is made, so that a killed section has some."""

    path: Path
    names: set[str] = field(default_factory=set)

    def add(self, measurement: Measurement) -> None:
        """Append one."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(asdict(measurement)), allow_nan=False) + "\n")
        self.names.add(measurement.name)

    def extend(self, measurements: Iterable[Measurement]) -> None:
        """Append several."""
        for measurement in measurements:
            self.add(measurement)


def read_results(path: Path) -> tuple[Measurement, ...]:
    """The measurements of a file of results; a line that was cut off by a kill is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            found.append(Measurement(**json.loads(line)))
        except json.JSONDecodeError:
            continue
    return tuple(found)
