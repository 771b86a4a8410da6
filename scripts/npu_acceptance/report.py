"""The report of a run: what it ran on, its text for a terminal, and the bundle to send back, which holds nothing private."""

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
from megascend.bootstrap.providers import provider_for
from megascend.bootstrap.versions import PACKAGES
from npu_acceptance.plan import SECTIONS, Settings
from npu_acceptance.privacy import Scrubber
from npu_acceptance.records import Measurement, Report, SectionResult

DRIVER = Path("/usr/local/Ascend/driver/version.info")
IN_TOOLKIT = ("version.cfg", "compiler/version.info", "runtime/version.info")
VERSION = re.compile(r"(?:^Version=|running_version=\[[^:\]]*:)([\w.]+)", re.MULTILINE)

TITLES = {section.name: section.title for section in SECTIONS}
SHOWN = 12
"""Failures of a section that are listed; the report has all."""

FOLDER = "npu_acceptance"


def about(settings: Settings, environment: Mapping[str, str]) -> dict[str, Any]:
    """For the report's head."""
    return {
        "simulated": settings.simulated,
        "cards": settings.cards,
        "quick": settings.quick,
        "versions": versions(settings, environment),
    }


def versions(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """Every package that decides what is computed; those of files that are not there are not named."""
    found = {"megascend": megascend.__version__, "Python": platform.python_version(), "machine": platform.machine()}
    for package in (*PACKAGES, "torch_npu", "triton-ascend"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    found |= provider_for("npu").versions()
    home = environment.get("ASCEND_HOME_PATH", "")
    toolkit = [version_in(Path(home) / name) for name in IN_TOOLKIT] if home else []
    found["CANN"] = next(filter(None, toolkit), "not found")
    found["driver"] = version_in(DRIVER) or "not found"
    return found


def version_in(path: Path) -> str:
    """The version that a file of Ascend's states; empty if there is none."""
    if not path.is_file():
        return ""
    found = VERSION.search(path.read_text(errors="replace", encoding="utf-8"))
    return found[1] if found else ""


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


def write_bundle(path: Path, report: Report, scrub: Scrubber) -> Path:
    """Write the bundle: ``report.json``, ``summary.txt``, and the end of the output of each section that failed."""
    content = scrub.value(json.loads(report.to_json()))
    files = {"report.json": json.dumps(content, indent=2) + "\n", "summary.txt": scrub.text(render(report)) + "\n"}
    files |= {f"{section.name}.txt": scrub.text(tail_of(section)) for section in report.sections if section.tail}
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


def tail_of(section: SectionResult) -> str:
    """What a failed section printed last."""
    return f"{section.name}: {section.problem}\n\n{section.tail}\n"
