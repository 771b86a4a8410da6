"""Checks before a run: the limits of its samples, its tokenizer, and free disk space."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megascend.apps.train.preflight import check_run, required_disk_bytes
from megascend.backends import register_engine
from megascend.config import RunConfig
from megascend.config.registry import ENGINES
from megascend.errors import DataError
from megascend.testing import write_tiny_checkpoint
from megascend.training.batch.packing import plan_micro_batches, round_up

CHECKPOINT, FP32, BF16 = 14, 4, 2
"""Bytes of a parameter."""
CASES: dict[str, tuple[dict[str, Any], int, int, str]] = {
    "the model": ({}, 1, 128, "max_position_embeddings: 128"),
    "a setting": ({"batching": {"max_length": 100}}, 1, 100, "batching.max_length: 100"),
    "a micro batch": ({"batching": {"micro_batch_tokens": 91}}, 1, 91, "batching.micro_batch_tokens: 91"),
    "CP 2": ({"batching": {"micro_batch_tokens": 91}, "parallel": {"context": 2}}, 2, 88, "micro_batch_tokens: 91"),
    "CP 2 of fsdp": (
        {"batching": {"micro_batch_tokens": 91}, "parallel": {"context": 2}, "engine": "fsdp"},
        2,
        90,
        "micro_batch_tokens: 91",
    ),
    "TP 2 with SP, padded": (
        {"batching": {"micro_batch_tokens": 91, "packing": False}, "parallel": {"tensor": 2, "sequence": True}},
        2,
        90,
        "micro_batch_tokens: 91",
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", max_position_embeddings=128)


@pytest.mark.parametrize("name", CASES)
def test_smallest_limit_and_its_setting(name: str, model: Path) -> None:
    settings, world_size, length, setting = CASES[name]
    config = RunConfig.model_validate({"model": model, "output": "o", "data": {"path": "d"}} | settings)
    limits = check_run(config, world_size, overwrite=False).limits
    assert limits.length == length
    assert setting in limits.setting
    # The longest sample fits into a micro batch, and with a budget as the limit one token more does not.
    budget, multiple = config.batching.micro_batch_tokens, limits.multiple
    assert plan_micro_batches([round_up(length, multiple)], [None], budget, limits.packing) == [[0]]
    if "micro_batch_tokens" in setting:
        with pytest.raises(DataError, match=r"over batching\.micro_batch_tokens"):
            plan_micro_batches([round_up(length + 1, multiple)], [None], budget, limits.packing)


@mock.patch.dict(ENGINES)
def test_registered_engine_describes_its_layout(model: Path) -> None:
    register_engine("rows", lambda model: None, always_pads=True)
    register_engine("ulysses", lambda model: None, contiguous=True)
    settings = {"model": model, "output": "o", "data": {"path": "d"}, "batching": {"micro_batch_tokens": 91}}
    rows = check_run(RunConfig.model_validate(settings | {"engine": "rows"}), 1, overwrite=False)
    assert (rows.layout.packing, rows.limits.packing) == (False, False)
    ulysses = RunConfig.model_validate(settings | {"engine": "ulysses", "parallel": {"context": 2}})
    # Pieces of two ranks are a multiple of 2; two chunks for each of them would be one of 4.
    assert check_run(ulysses, 2, overwrite=False).limits.length == 90


# --- room on the disk ---


@pytest.mark.parametrize(
    ("settings", "bytes_of_a_parameter"),
    [
        ({}, CHECKPOINT + BF16),  # one checkpoint if a signal stops it, and the export
        ({"export": False}, CHECKPOINT),
        ({"precision": "fp32", "checkpoint": {"every": 5}}, 3 * CHECKPOINT + FP32),  # two stay, one is being written
        ({"steps": 100, "checkpoint": {"every": 5, "keep_last": 1, "keep_every": 20}}, 7 * CHECKPOINT + BF16),
        ({"checkpoint": {"every": 5, "hf": True}}, 3 * (CHECKPOINT + BF16) + BF16),
        ({"lora": {}}, 0),
    ],
)
def test_disk_needed_by_settings(settings: dict, bytes_of_a_parameter: int) -> None:
    config = RunConfig.model_validate({"model": "m", "output": "o", "data": {"path": "d"}} | settings)
    assert required_disk_bytes(config, 1000) == 1000 * bytes_of_a_parameter
