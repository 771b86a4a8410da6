"""Callbacks of a run file: exit codes and messages of the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

CALLBACKS = """
import megascend

class Stop(megascend.Callback):
    def on_step(self, control, record):
        control.should_training_stop = True

class Broken(megascend.Callback):
    def on_step(self, control, record):
        record["no such figure"]
"""


@pytest.fixture(scope="module")
def folder(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("callbacks")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": f"number {n}"}) + "\n" for n in range(4)))
    (folder / "mine.py").write_text(CALLBACKS)
    settings = {
        "model": str(small_model),
        "data": {"path": "texts.jsonl", "global_batch_size": 2},
        "platform": "cpu",
        "precision": "fp32",
        "steps": 4,
        "plot": False,
        "self_check": False,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return folder


def arguments(output: Path, callback: str, engine: str) -> list[str]:
    values = (f"output={output}", f"callbacks=[mine.py:{callback}]", f"engine={engine}")
    return ["train", "run.yaml", *(part for value in values for part in ("--set", value))]


def test_stop_ends_with_75_and_says_how_to_resume(megascend, folder: Path, tmp_path: Path) -> None:
    completed = megascend(*arguments(tmp_path / "run", "Stop", "single"), cwd=folder, code=75)
    assert "stopped by callback mine.py:Stop after step 1; resume with --resume auto" in completed.stdout
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()
    report = megascend("doctor", "--run", tmp_path / "run")
    assert "stopped by callback mine.py:Stop after step 1 of 4" in report.stdout
