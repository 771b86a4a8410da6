"""The sessions of docs/sessions.md, from a model and a run file to answers, in the order of the page."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import forked_programs
from support.page import DOCS, page_commands, run_page_command

PAGE = "sessions.md"
DEADLINE_S = 300


def commands_of(heading: str) -> list[str]:
    """Return the commands of a section."""
    text = (DOCS / PAGE).read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [command for command in page_commands(PAGE) if f"    {command}\n" in section]


def follow(heading: str, folder: Path) -> str:
    """Run the commands of a section up to the question, and return the response to it."""
    for command in commands_of(heading):
        if not command.startswith("echo "):
            run_page_command(command, folder, DEADLINE_S)
            continue
        question, _, command = command.partition(" | ")
        (response,) = answers(command, shlex.split(question)[1], folder)
        return response["response"]
    raise AssertionError(f"{heading} asks nothing")


def answers(command: str, text: str, folder: Path) -> list[dict[str, Any]]:
    """Return what ``megascend generate`` answers to standard input."""
    return [json.loads(line) for line in run_with_input(command, text, folder).splitlines()]


def run_with_input(command: str, text: str, folder: Path) -> str:
    completed = subprocess.run(
        [sys.executable, "-m", "megascend", *shlex.split(command)[1:]],
        input=f"{text}\n", capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=folder,
        env=forked_programs.environment(),
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly  # covered: apps/cli/test_cli_init.py: the same task to its end; test_snippets.py
def test_pretraining_session_continues_a_text(tmp_path: Path) -> None:
    assert follow("Pre-training", tmp_path).startswith(" 5 apples.")
    vocabulary = json.loads((tmp_path / "fresh" / "config.json").read_text())["vocab_size"]
    assert metrics(tmp_path / "runs" / "pretrain")[0]["loss"] == pytest.approx(math.log(vocabulary), rel=0.1)


@pytest.mark.nightly
def test_sft_session_answers_and_its_model_learns_preferences(tmp_path: Path) -> None:
    assert follow("Supervised fine-tuning", tmp_path) == "7."
    (chat,) = [command for command in commands_of("Supervised fine-tuning") if "megascend chat" in command]
    assert re.search(r"^> 7\.$", run_with_input(chat, "What is 2 + 5?", tmp_path), re.MULTILINE)

    assert follow("Preferences", tmp_path) == "6."
    rows = metrics(tmp_path / "runs" / "dpo")
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert rows[-1]["accuracy"] == 1
