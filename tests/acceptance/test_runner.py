"""Sections in processes of their own: what each may do to the others, and what is left of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from megascend.acceptance import processes
from megascend.acceptance.plan import Section
from megascend.acceptance.runner import SETTINGS_VARIABLE, run_sections
from megascend.acceptance.settings import Settings

MEASURE = """
import os, sys
from megascend.acceptance.records import Results, at_most, left_out
from megascend.acceptance.settings import Settings
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
    "hangs": ("failed", "not done after 6 s"),
    "silent": ("failed", "it measured nothing"),
    "nothing_here": ("left out", ""),
    "dies": ("failed", "exit code -9"),
    "larger": ("left out", "needs 4 cards, and 2 take part"),
}


def command(section: Section) -> list[str]:
    return [
        sys.executable,
        "-c",
        MEASURE.format(variable=SETTINGS_VARIABLE, name=section.name, body=BODIES[section.name]),
    ]


def test_every_section_has_a_verdict_and_none_stops_another(tmp_path: Path) -> None:
    sections = [Section(name, name, 6) for name in BODIES] + [Section("larger", "larger", 6, least_cards=4)]
    started: list[str] = []
    results = list(
        run_sections(sections, Settings(tmp_path, 2), about_to=lambda each: started.append(each.name), command=command)
    )
    assert {each.name: (each.verdict, each.problem) for each in results} == EXPECTED
    assert started == list(BODIES)
    by_name = {each.name: each for each in results}
    assert "RuntimeError: the card fell off" in by_name["raises"].tail
    assert len(by_name["hangs"].measurements) == len(by_name["raises"].measurements) == 1  # made before it ended


def test_deadlines_are_longer_on_the_simulated_device(tmp_path: Path) -> None:
    (here,) = run_sections([Section("good", "", 6)], Settings(tmp_path, 2, simulated=True), command=command)
    (told,) = run_sections([Section("good", "", 6)], Settings(tmp_path, 2), deadline_s=50, command=command)
    assert (here.deadline_s, told.deadline_s) == (12, 50)


def test_whatever_a_program_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "TERMINATE_S", 0.5)
    stubborn = "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    stubborn += "child = subprocess.Popen(['sleep', '300']); print(child.pid, flush=True); child.wait()"
    ended = processes.run([sys.executable, "-c", stubborn], tmp_path / "log", 3)
    assert ended.code is None
    assert ended.problem(3) == "not done after 3 s"
    pid = int(ended.tail.split()[0])
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}/cmdline").is_file() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < until, "its child still runs"
        time.sleep(0.1)
