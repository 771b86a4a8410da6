"""The report for a terminal: a line for each section, what failed in it, and a verdict over all."""

from __future__ import annotations

from collections.abc import Iterator

from megascend.acceptance.plan import SECTIONS
from megascend.acceptance.records import Measurement, Report, SectionResult

TITLES = {section.name: section.title for section in SECTIONS}
SHOWN = 12
"""Failures of a section that are listed; the report has all."""


def render(report: Report) -> str:
    """The whole report as text."""
    about = report.about
    head = [f"{name}: {value}" for name, value in about.items() if not isinstance(value, dict)]
    head += [f"{name}: " + ", ".join(f"{key} {item}" for key, item in value.items())
             for name, value in about.items() if isinstance(value, dict)]  # fmt: skip
    rows = [line for section in report.sections for line in section_lines(section)]
    figures = [line for section in report.sections for line in figure_lines(section)]
    return "\n".join([*head, "", *rows, "", *figures, verdict(report)])


def section_lines(section: SectionResult) -> Iterator[str]:
    """A section's line, and below it what failed."""
    counts = {each: sum(one.verdict == each for one in section.measurements) for each in ("ok", "failed", "left out")}
    said = ", ".join(f"{number} {each}" for each, number in counts.items() if number) or "no figures"
    yield (
        f"{section.verdict.upper():<8}  {section.name:<12}  {section.seconds:>6.0f} s  {TITLES[section.name]}: "
        + (section.problem or said)
    )
    for each in section.failures[:SHOWN]:
        yield f"          failed  {describe(each)}"
    if len(section.failures) > SHOWN:
        yield f"          and {len(section.failures) - SHOWN} more"


def figure_lines(section: SectionResult) -> Iterator[str]:
    """What is worth reading of a section that went well: its figure nearest to its bound, notes, what was left out."""
    bounded = [each for each in section.measurements if each.verdict == "ok" and ratio(each) is not None]
    if bounded:
        nearest = max(bounded, key=lambda each: ratio(each) or 0.0)
        yield f"{section.name}: of {len(bounded)} figures the nearest to its bound: {describe(nearest)}"
    for each in section.measurements:
        if each.verdict == "noted":
            yield f"{section.name}: {describe(each)}"
    reasons: dict[str, list[str]] = {}
    for each in section.measurements:
        if each.verdict == "left out":
            reasons.setdefault(each.note, []).append(each.name)
    for reason, names in reasons.items():
        yield f"{section.name}: left out, {reason}: {', '.join(names)}"


def ratio(measurement: Measurement) -> float | None:
    """How much of its bound a figure takes; None where there is none."""
    found, bound = measurement.found, measurement.bound
    if isinstance(found, (int, float)) and isinstance(bound, (int, float)) and bound > 0:
        return found / bound
    return None


def describe(measurement: Measurement) -> str:
    """A measurement on one line."""
    text = measurement.name
    if measurement.found is not None:
        text += f": {figure(measurement.found)}"
        if measurement.bound is not None:
            sign = "<=" if isinstance(measurement.bound, (int, float)) else "expected"
            text += f" ({sign} {figure(measurement.bound)})"
        text += f" {measurement.unit}" if measurement.unit else ""
    return f"{text}: {measurement.note}" if measurement.note else text


def figure(value: float | str) -> str:
    """Three digits are enough for a terminal."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def verdict(report: Report) -> str:
    """The last line."""
    if report.failed:
        return f"FAILED: {', '.join(report.failed)}"
    done = [section.name for section in report.sections if section.verdict == "ok"]
    omitted = [section.name for section in report.sections if section.verdict == "left out"]
    where = " on the simulated device, which says nothing about cards" if report.about.get("simulated") else ""
    return f"PASSED: {', '.join(done) or 'nothing'}{where}" + (f"; left out: {', '.join(omitted)}" if omitted else "")
