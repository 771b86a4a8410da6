"""Running the sections one after the other, each in a process of its own: one that fails or hangs stops no other."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from megascend.acceptance import processes
from megascend.acceptance.plan import SIMULATED_TIMEOUT_FACTOR, Section, reason_to_leave_out
from megascend.acceptance.records import SectionResult, Verdict, left_out, read_results
from megascend.acceptance.settings import Settings

SETTINGS_VARIABLE = "MEGASCEND_ACCEPTANCE_SETTINGS"


def run_sections(
    sections: Sequence[Section],
    settings: Settings,
    deadline_s: float | None = None,
    about_to: Callable[[Section], object] = lambda section: None,
    command: Callable[[Section], list[str]] | None = None,
) -> Iterator[SectionResult]:
    """Run ``sections`` in order, yielding each result as it comes.

    Args:
        deadline_s: of every section, in place of the plan's.
        about_to: called before each section that is run.
        command: what runs a section; by default this Python with :mod:`megascend.acceptance.section`.
    """
    for section in sections:
        reason = reason_to_leave_out(section, settings.cards)
        limit = deadline_s or section.deadline_s * (SIMULATED_TIMEOUT_FACTOR if settings.simulated else 1)
        if reason:
            yield SectionResult(section.name, "left out", 0.0, limit, (left_out(section.name, reason),), reason)
            continue
        about_to(section)
        yield run_section(section, settings, limit, (command or own_command)(section))


def own_command(section: Section) -> list[str]:
    """This Python, running the section."""
    return [sys.executable, "-m", "megascend.acceptance.section", section.name]


def run_section(section: Section, settings: Settings, deadline_s: float, command: list[str]) -> SectionResult:
    """Run one section, and read what it wrote."""
    results = settings.folder / f"{section.name}.jsonl"
    results.unlink(missing_ok=True)
    environment = section_environment(settings, os.environ)
    ended = processes.run(command, settings.folder / "logs" / f"{section.name}.log", deadline_s, environment)
    measurements = read_results(results)
    problem = ended.problem(deadline_s)
    if not problem and not measurements:
        problem = "it measured nothing"
    bad = bool(problem) or any(each.verdict == "failed" for each in measurements)
    verdict: Verdict = "failed" if bad else "ok"
    if not bad and all(each.verdict == "left out" for each in measurements):
        verdict = "left out"
    return SectionResult(
        section.name, verdict, ended.seconds, deadline_s, measurements, problem, ended.tail if problem else ""
    )


def section_environment(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """What a section's processes find in their environment."""
    own = {SETTINGS_VARIABLE: settings.to_json(), "PYTHONUNBUFFERED": "1"}
    # Without it every operator reports deprecations of the stack's packages, once a process.
    return own if "PYTHONWARNINGS" in environment else own | {"PYTHONWARNINGS": "ignore"}
