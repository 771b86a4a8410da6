"""Sections in separate processes: isolation, verdicts, deadlines and clean-up."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from npu_acceptance import processes
from npu_acceptance.plan import Section, Settings
from npu_acceptance.runner import SETTINGS_VARIABLE, run_sections

pytestmark = pytest.mark.waiting

SCRIPTS = Path(processes.__file__).parents[1]
MEASURE = """
import os, sys
sys.path.append("{scripts}")
from npu_acceptance.records import Results, at_most, left_out
from npu_acceptance.plan import Settings
settings = Settings.from_json(os.environ["{variable}"])
results = Results(settings.folder / f"{name}.jsonl")
{body}
"""
BODIES = {
    "good": "results.add(at_most('a', 1, 2))",
    "bad": "results.add(at_most('a', 3, 2))",
    "raises": "results.add(at_most('a', 1, 2))\nraise RuntimeError('the card fell off')",
    "hangs": "results.add(at_most('a', 1, 2))\nimport subprocess\nsubprocess.run(['sleep', '300'])",
    "silent": "pass",
    "nothing_here": "results.add(left_out('a', 'no such operator'))",
    "dies": "os.kill(os.getpid(), 9)",
}
EXPECTED = {
    "good": ("ok", ""),
    "bad": ("failed", ""),
    "raises": ("failed", "exit code 1"),
    "hangs": ("failed", "not done after 10 s"),
    "silent": ("failed", "it measured nothing"),
    "nothing_here": ("left out", ""),
    "dies": ("failed", "exit code -9"),
    "larger": ("left out", "needs 4 cards, and 2 take part"),
}


def command(section: Section) -> list[str]:
    values = {"scripts": SCRIPTS, "variable": SETTINGS_VARIABLE, "name": section.name, "body": BODIES[section.name]}
    return [sys.executable, "-c", MEASURE.format(**values)]


def test_run_sections_gives_verdicts_despite_failures(tmp_path: Path) -> None:
    sections = [Section(name, name, 10 if name == "hangs" else 120) for name in BODIES] + [
        Section("larger", "larger", 6, min_cards=4)
    ]
    started: list[str] = []
    results = list(
        run_sections(
            sections, Settings(tmp_path, 2), on_start=lambda section: started.append(section.name), command=command
        )
    )
    assert {section.name: (section.verdict, section.problem) for section in results} == EXPECTED
    assert started == list(BODIES)
    by_name = {section.name: section for section in results}
    assert "RuntimeError: the card fell off" in by_name["raises"].tail
    assert len(by_name["hangs"].measurements) == len(by_name["raises"].measurements) == 1  # made before it ended


def test_run_sections_doubles_deadlines_when_simulated(tmp_path: Path) -> None:
    (result,) = run_sections([Section("good", "", 6)], Settings(tmp_path, 2, simulated=True), command=command)
    (overridden,) = run_sections([Section("good", "", 6)], Settings(tmp_path, 2), deadline_s=50, command=command)
    assert (result.deadline_s, overridden.deadline_s) == (12, 50)


@pytest.mark.parametrize("own_session", [False, True])
@pytest.mark.nightly_cases("False")  # covered: in a session of their own
def test_run_ends_descendants_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_session: bool
) -> None:
    """Cover a child that ignores SIGTERM, with and without its own session, as torchrun's ranks have."""
    monkeypatch.setattr(processes, "TERMINATE_S", 0.5)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    starts = "import subprocess, sys\n"
    starts += f"child = subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session={own_session})\n"
    starts += "print(child.pid, flush=True)\nchild.wait()\n"
    for deadline_s in (5, 60):  # on a busy machine it may not have started its child within the first
        outcome = processes.run([sys.executable, "-c", starts], tmp_path / "log", deadline_s)
        assert outcome.code is None
        assert outcome.problem(deadline_s) == f"not done after {deadline_s} s"
        if outcome.tail:
            break
    command = Path(f"/proc/{outcome.tail.split()[0]}/cmdline")
    until = time.monotonic() + 60
    while command.is_file() and command.read_bytes():
        assert time.monotonic() < until, "its child still runs"
        time.sleep(0.1)
