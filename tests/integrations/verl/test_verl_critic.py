"""A critic of verl, trained by megascend with verl's value loss, equals transformers' token classifier with AdamW.

On one rank by the engine's methods, on several by verl's own worker.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl.workers", reason="no verl in this environment: bash scripts/test_integrations.sh verl")

import torch
from safetensors.torch import load_file
from torch.distributed.elastic.utils.distributed import get_free_port
from verl_runs import FOLDER, ROOT, python

from megascend.testing import write_tiny_checkpoint

pytestmark = pytest.mark.nightly

CRITIC = {"architectures": ["Qwen3ForTokenClassification"], "num_labels": 1, "classifier_dropout": 0.0}
SEQUENCES = """
import json
from critic_calls import sequences
print(json.dumps(sequences()))
"""
LOADED = """
import json, sys, torch
from transformers import AutoModelForTokenClassification
model = AutoModelForTokenClassification.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
with torch.no_grad():
    found = [model(torch.tensor([row["ids"]])).logits.flatten().tolist() for row in json.load(open(sys.argv[2]))]
print(json.dumps(sum(found, [])))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run critic_calls.py, and transformers on the same sequences."""
    directory = tmp_path_factory.mktemp("critic")
    write_tiny_checkpoint(directory / "critic", "qwen3", **CRITIC)
    write_tiny_checkpoint(directory / "causal", "qwen3")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    calls = [str(FOLDER / "critic_calls.py"), str(directory / "critic"), str(directory / "causal"), str(directory)]
    completed = python(calls, directory, **meeting)
    assert completed.returncode == 0, completed.stderr[-6000:]
    assert "a critic with the head of its checkpoint" in completed.stdout
    assert "a critic with a new head" in completed.stdout
    return directory


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[dict[str, Any]]:
    completed = python(["-c", SEQUENCES], FOLDER)
    assert completed.returncode == 0, completed.stderr[-4000:]
    (folder / "rows.json").write_text(completed.stdout.splitlines()[-1])
    return json.loads((folder / "rows.json").read_text())


@pytest.fixture(scope="module")
def reference(folder: Path, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    samples = []
    for row in rows:
        before, after = row["prompt"] - 1, 1
        models = {
            name: [0.0] * before + row[key] + [0.0] * after
            for name, key in (("returns", "returns"), ("old_values", "old"))
        }
        samples.append(
            {"token_ids": row["ids"], "weights": [0.0] * before + [1.0] * len(row["old"]) + [0.0] * after, **models}
        )
    job = {"checkpoint": str(folder / "critic"), "samples": samples, "loss": "clipped_value", "steps": 3, "lr": 5e-4}
    (folder / "job.json").write_text(json.dumps(job | {"weight_decay": 0.0, "max_grad_norm": 1.0}))
    program = ROOT / "tests/support/scalar_reference.py"
    completed = python(
        [str(program), str(folder / "job.json"), str(folder / "reference.safetensors")], folder, VERL_ENGINE_VENDOR=""
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    return load_file(folder / "reference.safetensors")


@pytest.fixture(scope="module")
def calls(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "found.safetensors")


def test_values_are_those_of_transformers_at_verls_places(
    calls: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> None:
    expected = torch.cat([reference[f"values.{index}"] for index in range(4)])
    torch.testing.assert_close(calls["values"], expected, rtol=1e-4, atol=1e-5)


def test_verls_value_loss_trains_as_with_transformers(
    folder: Path, calls: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> None:
    figures = json.loads((folder / "found.json").read_text())
    assert figures["losses"] == pytest.approx(reference["losses"].tolist(), rel=2e-5)
    assert figures["norms"] == pytest.approx(reference["grad_norms"].tolist(), rel=5e-5)
    assert min(figures["micro batches"]) > 1
    weights = {name: tensor for name, tensor in reference.items() if name.startswith("weights.")}
    assert weights.keys() == {name for name in calls if name.startswith("weights.")}
    for name, expected in weights.items():
        torch.testing.assert_close(calls[name], expected, rtol=1e-3, atol=2e-4)


def test_a_critic_is_saved_loaded_and_exported(folder: Path, rows: list[Any], calls: dict[str, torch.Tensor]) -> None:
    assert not torch.allclose(calls["trained"], calls["values"], atol=1e-3)
    torch.testing.assert_close(calls["fresh"], calls["values"], rtol=0, atol=0)
    torch.testing.assert_close(calls["loaded"], calls["trained"], rtol=0, atol=0)
    exported = folder / "global_step_3" / "huggingface"
    completed = python(["-c", LOADED, str(exported), str(folder / "rows.json")], folder, VERL_ENGINE_VENDOR="")
    assert completed.returncode == 0, completed.stderr[-4000:]
    expected = torch.tensor(json.loads(completed.stdout.splitlines()[-1]))
    torch.testing.assert_close(calls["trained"], expected, rtol=1e-4, atol=1e-5)


def test_a_causal_model_gets_a_new_head(calls: dict[str, torch.Tensor]) -> None:
    weights = calls["new head"]
    assert weights.shape == (1, 64)
    assert 0.01 < weights.std() < 0.03


def test_a_second_model_in_a_process_is_refused_by_name(folder: Path) -> None:
    message = json.loads((folder / "found.json").read_text())["second"]
    assert "two models" in message
    assert "trainer.v1.trainer_mode=sync" in message


LAYOUTS = {
    "DP2": ({}, {0: 0, 1: 1}),
    "TP2": ({"tensor_model_parallel_size": 2}, {0: 0}),
    "PP2": ({"pipeline_model_parallel_size": 2}, {1: 0}),
    "CP2": ({"context_parallel_size": 2}, {0: 0}),
}
"""The engine's settings, and which ranks answer verl, each for the data parallel rank that it is."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_two_ranks_it_is_transformers_too(folder: Path, reference: dict[str, torch.Tensor], layout: str) -> None:
    """Get losses, norms and rates from the ranks that have outputs, and full weights from all."""
    settings, answering = LAYOUTS[layout]
    out = folder / layout
    out.mkdir()
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    completed = python(
        [*command, str(FOLDER / "critic_ranks.py"), str(folder / "critic"), str(out), json.dumps(settings)], out
    )
    assert completed.returncode == 0, completed.stderr[-6000:]
    rank_reports = {rank: json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)}
    parallel = len(answering)
    assert {
        rank: rank_report["data rank"] for rank, rank_report in rank_reports.items() if rank_report["collects"]
    } == answering
    for rank, rank_report in rank_reports.items():
        if rank not in answering:
            assert rank_report["values"] is None
            assert rank_report["steps"] == [None] * 3
            continue
        data_rank = answering[rank]
        expected = torch.cat([reference[f"values.{index}"] for index in range(data_rank, 4, parallel)])
        torch.testing.assert_close(torch.tensor(rank_report["values"]), expected, rtol=1e-4, atol=1e-5)
        assert [step["loss"] for step in rank_report["steps"]] == pytest.approx(reference["losses"].tolist(), rel=2e-5)
        norms = reference["grad_norms"].tolist()
        assert [step["grad_norm"] for step in rank_report["steps"]] == pytest.approx(norms, rel=5e-5)
        assert [step["lr"] for step in rank_report["steps"]] == pytest.approx([5e-4] * 3)
    for rank in rank_reports:
        weights = load_file(out / f"rank{rank}.safetensors")
        assert {f"weights.{name}" for name in weights} == {name for name in reference if name.startswith("weights.")}
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, reference[f"weights.{name}"], rtol=1e-3, atol=2e-4)
