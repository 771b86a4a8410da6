"""A run whose output has no room for what it will write is told so before its model is built."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megascend.app import disk_room
from megascend.app.disk_room import disk_needed, disk_warning, in_words
from megascend.config import RunConfig

CHECKPOINT, FP32, BF16 = 14, 4, 2


@pytest.mark.parametrize(
    ("settings", "bytes_of_a_parameter"),
    [
        ({}, CHECKPOINT + BF16),  # one checkpoint where a signal stops it, and the export
        ({"export": False}, CHECKPOINT),
        ({"precision": "fp32", "checkpoint": {"every": 5}}, 3 * CHECKPOINT + FP32),  # two stay, one is being written
        ({"steps": 100, "checkpoint": {"every": 5, "keep_last": 1, "keep_every": 20}}, 7 * CHECKPOINT + BF16),
        ({"checkpoint": {"every": 5, "hf": True}}, 3 * (CHECKPOINT + BF16) + BF16),
        ({"lora": {}}, 0),
    ],
)
def test_what_a_run_writes(settings: dict, bytes_of_a_parameter: int) -> None:
    config = RunConfig.model_validate({"model": "m", "output": "o", "data": {"path": "d"}} | settings)
    assert disk_needed(config, 1000) == 1000 * bytes_of_a_parameter


def test_what_is_missing_is_said_and_what_an_earlier_run_left_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 1000
    monkeypatch.setattr(disk_room, "inspect_checkpoint", lambda path: SimpleNamespace(parameter_count=count))
    config = RunConfig.model_validate(
        {"model": tmp_path / "model", "output": tmp_path / "new" / "out", "data": {"path": "d"}}
    )
    assert disk_warning(config) is None
    needed = disk_needed(config, count)
    monkeypatch.setattr(disk_room, "free_bytes", lambda path: 5000)
    said = disk_warning(config)
    assert said is not None
    assert f"out has 4.9 KiB free, and checkpoints and export will take about {in_words(needed)}: make room" in said
    earlier = config.output / "checkpoints" / "step-000005"
    earlier.mkdir(parents=True)
    (earlier / "file").write_bytes(bytes(needed - 5001))
    assert disk_warning(config) is not None
    (earlier / "file").write_bytes(bytes(needed - 5000))
    assert disk_warning(config) is None


def test_sizes() -> None:
    assert [in_words(count) for count in (0, 2048, 3 * 2**20, 2**31)] == ["0 bytes", "2.0 KiB", "3.0 MiB", "2.0 GiB"]
