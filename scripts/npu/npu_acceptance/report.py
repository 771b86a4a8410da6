"""The report of a run: its environment, text for a terminal, and the bundle to send back, free of private data."""

from __future__ import annotations

import gzip
import io
import json
import platform
import re
import tarfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import megascend
from megascend.runtime.bootstrap.providers import provider_for
from megascend.runtime.bootstrap.versions import PACKAGES
from npu_acceptance.plan import SECTIONS, Settings
from npu_acceptance.privacy import Scrubber
from npu_acceptance.records import Measurement, Report, SectionResult

DRIVER = Path("/usr/local/Ascend/driver/version.info")
IN_TOOLKIT = ("version.cfg", "compiler/version.info", "runtime/version.info")
VERSION = re.compile(r"(?:^Version=|running_version=\[[^:\]]*:)([\w.]+)", re.MULTILINE)

TITLES = {section.name: section.title for section in SECTIONS}
MAX_FAILURES = 12
"""Failures of a section that are listed; the report contains all."""

FOLDER = "npu_acceptance"


def about(settings: Settings, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the report's head."""
    return {
        "simulated": settings.simulated,
        "cards": settings.cards,
        "quick": settings.quick,
        "versions": versions(settings, environment),
    }


def versions(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of every package that affects the results."""
    packages = {"megascend": megascend.__version__, "Python": platform.python_version(), "machine": platform.machine()}
    for package in (*PACKAGES, "torch_npu", "triton-ascend"):
        try:
            packages[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            packages[package] = "not installed"
    provider = provider_for("npu")
    packages |= {"provider": provider.name} | provider.versions()
    home = environment.get("ASCEND_HOME_PATH", "")
    toolkit = [version_in(Path(home) / name) for name in IN_TOOLKIT] if home else []
    packages["CANN"] = next(filter(None, toolkit), "not found")
    packages["driver"] = version_in(DRIVER) or "not found"
    return packages


def version_in(path: Path) -> str:
    """Return the version in a version file of Ascend; empty if there is none."""
    if not path.is_file():
        return ""
    match = VERSION.search(path.read_text(errors="replace", encoding="utf-8"))
    return match[1] if match else ""


def render(report: Report) -> str:
    """Render the report as text."""
    about = report.about
    head = [f"{name}: {value}" for name, value in about.items() if not isinstance(value, dict)]
    head += [f"{name}: " + ", ".join(f"{key} {item}" for key, item in value.items())
             for name, value in about.items() if isinstance(value, dict)]  # fmt: skip
    rows = [line for section in report.sections for line in section_lines(section)]
    figures = [line for section in report.sections for line in figure_lines(section)]
    return "\n".join([*head, "", *rows, "", *figures, verdict(report)])


def section_lines(section: SectionResult) -> Iterator[str]:
    """Yield a section's line and its failures."""
    counts = {
        verdict: sum(measurement.verdict == verdict for measurement in section.measurements)
        for verdict in ("ok", "failed", "left out")
    }
    summary = ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number) or "no figures"
    yield (
        f"{section.verdict.upper():<8}  {section.name:<12}  {section.seconds:>6.0f} s  {TITLES[section.name]}: "
        + (section.problem or summary)
    )
    for failure in section.failures[:MAX_FAILURES]:
        yield f"          failed  {describe(failure)}"
    if len(section.failures) > MAX_FAILURES:
        yield f"          and {len(section.failures) - MAX_FAILURES} more"


def figure_lines(section: SectionResult) -> Iterator[str]:
    """Yield a section's figure nearest to its bound, its noted figures, and the checks left out."""
    bounded = [
        measurement
        for measurement in section.measurements
        if measurement.verdict == "ok" and ratio(measurement) is not None
    ]
    if bounded:
        nearest = max(bounded, key=lambda measurement: ratio(measurement) or 0.0)
        yield f"{section.name}: of {len(bounded)} figures the nearest to its bound: {describe(nearest)}"
    for measurement in section.measurements:
        if measurement.verdict == "noted":
            yield f"{section.name}: {describe(measurement)}"
    reasons: dict[str, list[str]] = {}
    for measurement in section.measurements:
        if measurement.verdict == "left out":
            reasons.setdefault(measurement.note, []).append(measurement.name)
    for reason, names in reasons.items():
        yield f"{section.name}: left out, {reason}: {', '.join(names)}"


def ratio(measurement: Measurement) -> float | None:
    """Return a figure divided by its bound; None if it has no bound."""
    value, bound = measurement.found, measurement.bound
    if isinstance(value, (int, float)) and isinstance(bound, (int, float)) and bound > 0:
        return value / bound
    return None


def describe(measurement: Measurement) -> str:
    """Format a measurement on one line."""
    text = measurement.name
    if measurement.found is not None:
        text += f": {figure(measurement.found)}"
        if measurement.bound is not None:
            sign = "<=" if isinstance(measurement.bound, (int, float)) else "expected"
            text += f" ({sign} {figure(measurement.bound)})"
        text += f" {measurement.unit}" if measurement.unit else ""
    return f"{text}: {measurement.note}" if measurement.note else text


def figure(value: float | str) -> str:
    """Format a figure with three digits."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def verdict(report: Report) -> str:
    """Return the last line of the report."""
    if report.failed:
        return f"FAILED: {', '.join(report.failed)}"
    passed = [section.name for section in report.sections if section.verdict == "ok"]
    omitted = [section.name for section in report.sections if section.verdict == "left out"]
    qualifier = " on the simulated device, which says nothing about cards" if report.about.get("simulated") else ""
    return f"PASSED: {', '.join(passed) or 'nothing'}{qualifier}" + (
        f"; left out: {', '.join(omitted)}" if omitted else ""
    )


def write_bundle(path: Path, report: Report, scrub: Scrubber) -> Path:
    """Write the bundle: ``report.json``, ``summary.txt``, and the end of the output of each section that failed."""
    content = scrub.value(json.loads(report.to_json()))
    files = {"report.json": json.dumps(content, indent=2) + "\n", "summary.txt": scrub.text(render(report)) + "\n"}
    files |= {f"{section.name}.txt": scrub.text(tail_text(section)) for section in report.sections if section.tail}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{FOLDER}/{name}")  # owner, group and time stay 0: they belong to this machine
            data = text.encode()
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    # Neither a file name nor a time in the compressed file's header.
    path.write_bytes(gzip.compress(packed.getvalue(), mtime=0))
    return path


def tail_text(section: SectionResult) -> str:
    """Return the end of a failed section's output."""
    return f"{section.name}: {section.problem}\n\n{section.tail}\n"
