"""Heads that ``megascend export`` gives a model: as recorded with an adapter, in its run, or in a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from megascend.apps.train.exports import find_adapter, head_of, stored_head
from megascend.config import Classification, Lora
from megascend.errors import CheckpointError
from megascend.training.lora.adapter_io import STATE, write
from megascend.training.lora.factors import Factors, UnshardedAdapter, head_factors
from megascend.training.lora.target_modules import HEAD

QUERY = "model.layers.0.self_attn.q_proj"
REGRESSION = {"problem_type": "regression"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return folder


def adapter_with(folder: Path, labels: tuple[str, ...] | None, problem_type: Any, rows: int) -> Path:
    """Write an adapter as a run does."""
    factors = {
        QUERY: Factors(torch.ones(2, 4), torch.ones(4, 2)),
        HEAD: head_factors(torch.ones(rows, 4), 2),
    }
    saved = UnshardedAdapter(Lora(rank=2, targets=("q_proj",)), factors, labels=labels, problem_type=problem_type)
    write(folder, saved, "base", [QUERY, HEAD])
    return folder


@pytest.mark.parametrize(
    ("labels", "problem_type", "expected"),
    [
        (("LABEL_0",), "regression", Classification(num_labels=1, problem_type="regression")),
        (("LABEL_0",), None, "reward_model"),
        (
            ("no", "yes"),
            "multi_label_classification",
            Classification(labels=("no", "yes"), problem_type="multi_label_classification"),
        ),
        (("b", "a"), "single_label_classification", Classification(labels=("b", "a"))),
    ],
)
def test_adapter_records_its_labels(
    tmp_path: Path, model: Path, labels: tuple[str, ...], problem_type: Any, expected: Any
) -> None:
    """Copied out of its run, too."""
    adapter = adapter_with(tmp_path / "copy", labels, problem_type, len(labels))
    assert head_of(adapter, len(labels), model) == expected


def test_adapter_without_a_record_has_the_labels_of_its_run(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = adapter_with(tmp_path / "run" / "adapter", None, None, 1)
    (adapter / STATE).unlink()
    run_file = adapter.parent / "config.yaml"
    run_file.write_text(yaml.safe_dump({"classification": REGRESSION}))
    monkeypatch.chdir(adapter)
    expected = Classification(num_labels=1, problem_type="regression")
    assert head_of(find_adapter(Path()), 1, model) == expected
    run_file.write_text(yaml.safe_dump({"bradley_terry": {}}))
    assert head_of(find_adapter(Path()), 1, model) == "reward_model"
    assert caplog.text == ""
    run_file.unlink()
    assert head_of(find_adapter(Path()), 1, model) == "reward_model"
    assert "exported as a reward model, without problem_type" in caplog.text
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", **REGRESSION}))
    assert head_of(find_adapter(Path()), 1, model) == expected
    assert "problem_type: regression" in caplog.text


def test_damaged_record_is_refused(tmp_path: Path, model: Path) -> None:
    adapter = adapter_with(tmp_path / "adapter", ("a", "b"), "single_label_classification", 2)
    with pytest.raises(CheckpointError, match=r"records 2 labels \(a, b\), and its head has 3 rows"):
        head_of(adapter, 3, model)
    (adapter / STATE).write_text(json.dumps({"head": {"labels": ["a", 1], "problem_type": None}}))
    with pytest.raises(CheckpointError, match="state is damaged"):
        head_of(adapter, 2, model)


@pytest.mark.parametrize(
    ("rows", "settings", "expected"),
    [
        (None, {}, None),
        (1, {}, "scalar"),
        (1, REGRESSION, "scalar"),
        (3, {}, Classification(num_labels=3)),
        (3, REGRESSION, Classification(num_labels=3, problem_type="regression")),
    ],
)
def test_checkpoint_tells_its_head(model: Path, rows: int | None, settings: dict[str, Any], expected: Any) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", **settings}))
    tensors = {"lm_head.weight": torch.zeros(8, 4)} if rows is None else {"score.weight": torch.zeros(rows, 4)}
    save_file(tensors, model / "model.safetensors")
    assert stored_head(model) == expected
