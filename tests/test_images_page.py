"""The files and commands of docs/images.md work in the order of the page, and a killed run resumes with the same bits."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.forked_programs import run_command
from support.page import page_commands, page_files, run_page_command

PAGE = "images.md"
ANSWER = "A green disc on the right."
DEADLINE_S = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with the files of the page."""
    path = tmp_path_factory.mktemp("images")
    for name, text in page_files(PAGE).items():
        (path / name).write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[str, str]:
    """Run the commands of the page, and return what they print."""
    return {command: run_page_command(command, folder, DEADLINE_S) for command in page_commands(PAGE)}


@pytest.mark.nightly
def test_page_ends_with_its_answer(printed: dict[str, str]) -> None:
    assert list(printed) == [
        "python make_images.py",
        "megascend new-model model --arch qwen3_vl --hidden 128 --layers 2 --context 512",
        "megascend train images.yaml",
        "python answer.py",
    ]
    last = printed["megascend train images.yaml"].rpartition("answers after step 120:")[2]
    assert last.startswith(f"\n  > user: [new.png] What is this?\n    {ANSWER}\n")
    assert printed["python answer.py"].strip() == ANSWER


@pytest.mark.nightly
@pytest.mark.slow
def test_killed_run_resumes_with_the_same_bits(printed: dict[str, str], folder: Path) -> None:
    assert printed
    ended = []
    arguments = ("train", "images.yaml", "--set", "output=runs/killed")
    thread = threading.Thread(
        target=lambda: ended.append(run_command(*arguments, directory=folder, timeout_s=DEADLINE_S))
    )
    thread.start()
    output, deadline = folder / "runs" / "killed", time.monotonic() + DEADLINE_S
    metrics = output / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 55):
        assert thread.is_alive(), ended
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(json.loads((output / "events.jsonl").read_text(encoding="utf-8").splitlines()[0])["pid"], signal.SIGKILL)
    thread.join(DEADLINE_S)
    assert ended[0].returncode != 0
    run_page_command("megascend train images.yaml --set output=runs/killed --resume auto", folder, DEADLINE_S)
    uninterrupted, resumed = (
        load_file(folder / "runs" / name / "hf" / "model.safetensors") for name in ("images", "killed")
    )
    assert uninterrupted.keys() == resumed.keys()
    assert [name for name, tensor in uninterrupted.items() if not torch.equal(tensor, resumed[name])] == []


def test_commands_of_the_page_work_with_few_steps(tmp_path: Path) -> None:
    for name, text in page_files(PAGE).items():
        (tmp_path / name).write_text(text.replace("\nsteps: 120\n", "\nsteps: 12\n"), encoding="utf-8")
    outputs = {command: run_page_command(command, tmp_path, DEADLINE_S) for command in page_commands(PAGE)}
    assert "answers after step 12:" in outputs["megascend train images.yaml"]
    assert outputs["python answer.py"].strip()
