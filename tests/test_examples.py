"""Every example of a run file is one that ``megascend train`` accepts, and its data are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascend.app.data import read_documents
from megascend.config import load_config

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "examples").rglob("*.yaml"))


def test_there_are_examples() -> None:
    assert {path.name for path in FILES} >= {"quickstart.yaml", "lora.yaml"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_can_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    assert len(read_documents(config.data.path)) >= config.data.global_batch_size
    assert config.schedule.total_steps in (0, config.steps)
