"""The files and commands of docs/environments.md work in the order of the page: a model learns to use a calculator."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.page import page_commands, page_files, run_page_command

PAGE = "environments.md"
DEADLINE_S = 400


def follow(folder: Path, warm_up_steps: int, steps: int) -> dict[str, str]:
    """Follow the page with a number of steps; return what each command prints."""
    for name, text in page_files(PAGE).items():
        text = text.replace("\nsteps: 70\n", f"\nsteps: {warm_up_steps}\n").replace(
            "\nsteps: 60\n", f"\nsteps: {steps}\n"
        )
        (folder / name).write_text(text, encoding="utf-8")
    return {command: run_page_command(command, folder, DEADLINE_S) for command in page_commands(PAGE)}


@pytest.mark.nightly
def test_model_learns_to_use_the_calculator(tmp_path: Path) -> None:
    printed = follow(tmp_path, 70, 60)
    assert list(printed) == [
        "python make_problems.py",
        "megascend new-model model --layers 3 --context 64",
        "megascend train warm_up.yaml",
        "megascend rl calculator.yaml",
        "megascend rollouts runs/calculator --sort reward --limit 3",
        "megascend rollouts runs/calculator --sort reward --ascending --limit 3",
    ]
    rewards = re.search(r"reward ([\d.]+) before and ([\d.]+) after", printed["megascend rl calculator.yaml"])
    assert rewards is not None
    before, after = map(float, rewards.groups())
    assert after > before + 0.3
    # More calls, and more of them answered: both parts of the reward rose.
    lines = [json.loads(line) for line in (tmp_path / "runs" / "calculator" / "rollouts.jsonl").open(encoding="utf-8")]
    for part in ("right", "called"):
        early, late = (
            [line["rewards"][part] for line in lines if line["step"] in steps] for steps in (range(1, 6), range(56, 61))
        )
        assert sum(late) / len(late) > sum(early) / len(early)
    assert "reward 1.2 (right 1, called 1)" in printed["megascend rollouts runs/calculator --sort reward --limit 3"]


@pytest.mark.nightly  # covered: test_snippets.py; app/rl/test_loop.py; cli/test_cli_rollouts.py
def test_commands_of_the_page_work_with_few_steps(tmp_path: Path) -> None:
    printed = follow(tmp_path, 70, 3)
    assert "3 steps in" in printed["megascend rl calculator.yaml"]
    best = printed["megascend rollouts runs/calculator --sort reward --limit 3"]
    assert re.search(r"reward [\d.]+ \(right [01], called 1\)", best)
    assert "2 turns" in best
