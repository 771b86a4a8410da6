"""Run the sections in order, each in its own process, so that a failure or hang does not affect the next.

``python -m npu_acceptance.runner NAME`` is that process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module

from npu_acceptance import processes
from npu_acceptance.plan import SIMULATED_TIMEOUT_FACTOR, Section, Settings, too_few_cards
from npu_acceptance.records import Results, SectionResult, Verdict, left_out, read_results

SETTINGS_VARIABLE = "MEGASCEND_ACCEPTANCE_SETTINGS"


def run_sections(
    sections: Sequence[Section],
    settings: Settings,
    deadline_s: float | None = None,
    on_start: Callable[[Section], object] = lambda section: None,
    command: Callable[[Section], list[str]] | None = None,
) -> Iterator[SectionResult]:
    """Run ``sections`` in order, yielding each result as it comes.

    Args:
        deadline_s: overrides the plan's deadline of every section.
        on_start: called before each section that is run.
        command: the program of a section; by default this module.
    """
    for section in sections:
        reason = too_few_cards(section.min_cards, settings.cards)
        limit = deadline_s or section.deadline_s * (SIMULATED_TIMEOUT_FACTOR if settings.simulated else 1)
        if reason:
            yield SectionResult(section.name, "left out", 0.0, limit, (left_out(section.name, reason),), reason)
            continue
        on_start(section)
        yield run_section(section, settings, limit, (command or section_program)(section))


def section_program(section: Section) -> list[str]:
    return [sys.executable, "-m", "npu_acceptance.runner", section.name]


def run_section(section: Section, settings: Settings, deadline_s: float, command: list[str]) -> SectionResult:
    """Run one section's program, and read its results."""
    results = settings.folder / f"{section.name}.jsonl"
    results.unlink(missing_ok=True)
    environment = {SETTINGS_VARIABLE: settings.to_json(), "PYTHONUNBUFFERED": "1"}
    # Otherwise every process prints deprecation warnings of the stack's packages.
    environment["PYTHONWARNINGS"] = os.environ.get("PYTHONWARNINGS", "ignore")
    outcome = processes.run(command, settings.folder / "logs" / f"{section.name}.log", deadline_s, environment)
    measurements = read_results(results)
    problem = outcome.problem(deadline_s)
    if not problem and not measurements:
        problem = "it measured nothing"
    bad = bool(problem) or any(measurement.verdict == "failed" for measurement in measurements)
    verdict: Verdict = "failed" if bad else "ok"
    if not bad and all(measurement.verdict == "left out" for measurement in measurements):
        verdict = "left out"
    return SectionResult(
        section.name, verdict, outcome.seconds, deadline_s, measurements, problem, outcome.tail if problem else ""
    )


if __name__ == "__main__":
    name = sys.argv[1]
    settings = Settings.from_json(os.environ[SETTINGS_VARIABLE])
    import_module(f"npu_acceptance.{name}").run(settings, Results(settings.folder / f"{name}.jsonl"))
