"""The files and commands of docs/own-data.md work in the order of the page."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from support.forked_programs import run_command, run_forked

PAGE = Path(__file__).parents[1] / "docs" / "own-data.md"
STEPS = {"own.yaml": 240, "winter.yaml": 80}
FEWER = {"own.yaml": 9, "winter.yaml": 2}
"""Steps in CI: enough for every command to work, not for correct answers."""
DEADLINE_S = 300


def files_of_the_page() -> dict[str, str]:
    """Return the page's code blocks by the file names in their first lines."""
    blocks = re.findall(r"^```(?:python|yaml|jinja)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return {re.match(r"(?:#|\{#-) (\S+)", block)[1]: block for block in blocks}


def commands() -> list[str]:
    text = re.sub(r"^```.*?^```", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


def run(command: str, folder: Path) -> str:
    """Run a command of the page and return its standard output."""
    program, *arguments = command.split()
    if program == "python":
        completed = run_forked(folder / arguments[0], *arguments[1:], directory=folder, timeout_s=DEADLINE_S)
    else:
        completed = run_command(*arguments, directory=folder, timeout_s=DEADLINE_S)
    assert completed.returncode == (1 if "doctor" in arguments else 0), (
        f"{command}\n{completed.stdout}{completed.stderr}"
    )
    return completed.stdout


def kill(command: str, folder: Path, after: int) -> None:
    """Start a command and kill its process once ``after`` steps have been logged."""
    output, ended = folder / "runs" / "own", []
    arguments = command.split()[1:]
    thread = threading.Thread(
        target=lambda: ended.append(run_command(*arguments, directory=folder, timeout_s=DEADLINE_S))
    )
    thread.start()
    metrics, deadline = output / "metrics.jsonl", time.monotonic() + DEADLINE_S
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= after):
        assert thread.is_alive(), ended
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(json.loads((output / "events.jsonl").read_text().splitlines()[0])["pid"], signal.SIGKILL)
    thread.join(DEADLINE_S)
    assert ended[0].returncode != 0


def follow(folder: Path, steps: dict[str, int]) -> dict[str, str]:
    """Run the page's commands, killing the first training; return their outputs."""
    files = files_of_the_page()
    for name, text in files.items():
        if not name.startswith("model/"):  # a command creates that directory
            (folder / name).write_text(text)
    for name, count in steps.items():
        default, changed = f"\nsteps: {STEPS[name]}\n", f"\nsteps: {count}\n"
        assert default in files[name]
        (folder / name).write_text(files[name].replace(default, changed))
    printed = {}
    for command in commands():
        if command == "megascend train own.yaml":
            kill(command, folder, after=7)
            continue
        printed[command] = run(command, folder)
        if command.startswith("megascend new-model"):
            (folder / "model" / "chat_template.jinja").write_text(files["model/chat_template.jinja"])
    return printed


@pytest.mark.nightly  # covered: test_readme.py; cli/test_cli_train.py; the same commands with fewer steps
@pytest.mark.parametrize("steps", [FEWER, STEPS], ids=["few steps", "whole"])
def test_own_data_page_commands_work(steps: dict[str, int], tmp_path: Path) -> None:
    printed = follow(tmp_path, steps)

    dry_run = printed["megascend train own.yaml --dry-run"]
    assert "⟦<tool_call>{" in dry_run
    assert "⟦Yes, every day.<|im_end|>⟧" in dry_run
    assert "You work for a bakery.<|im_end|>" in dry_run
    assert re.search(r"^learned +19 .*\nheld out +2 ", dry_run, re.MULTILINE)
    assert "megascend train runs/own/config.yaml --resume auto" in printed["megascend doctor --run runs/own"]

    assert "resumed from" in printed["megascend train own.yaml --resume auto"]
    rows = [json.loads(line) for line in (tmp_path / "runs" / "own" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps["own.yaml"] + 1))
    held_out = [row["validation_loss"] for row in rows if row.get("validation_loss") is not None]
    assert held_out
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]

    base, with_peft, merged = (output for command, output in printed.items() if command.startswith("python ask.py"))
    assert with_peft == merged
    if steps == STEPS:
        promised = re.findall(r"^```\n(<tool_call>.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
        assert [base, merged] == promised
        assert held_out[-1] < held_out[0]
