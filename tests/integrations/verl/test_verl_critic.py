"""A critic of verl's, trained by megascend with verl's own value loss, is transformers' token classifier with torch's AdamW.

On one rank by the engine's methods, on several by verl's own worker.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="no verl in this environment: bash scripts/test_integrations.sh verl")

import torch
from safetensors.torch import load_file
from verl_runs import HERE, ROOT, python

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
    """critic_calls.py's findings, and what transformers makes of the same sequences."""
    found = tmp_path_factory.mktemp("critic")
    write_tiny_checkpoint(found / "critic", "qwen3", **CRITIC)
    write_tiny_checkpoint(found / "causal", "qwen3")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randint(20000, 60000))}
    calls = [str(HERE / "critic_calls.py"), str(found / "critic"), str(found / "causal"), str(found)]
    done = python(calls, found, **meeting)
    assert done.returncode == 0, done.stderr[-6000:]
    assert "a critic with the head of its checkpoint" in done.stdout
    assert "a critic with a new head" in done.stdout
    return found


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[dict[str, Any]]:
    done = python(["-c", SEQUENCES], HERE)
    assert done.returncode == 0, done.stderr[-4000:]
    (folder / "rows.json").write_text(done.stdout.splitlines()[-1])
    return json.loads((folder / "rows.json").read_text())


@pytest.fixture(scope="module")
def reference(folder: Path, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    samples = []
    for row in rows:
        before, after = row["prompt"] - 1, 1
        of = {
            name: [0.0] * before + row[key] + [0.0] * after
            for name, key in (("returns", "returns"), ("old_values", "old"))
        }
        samples.append(
            {"token_ids": row["ids"], "weights": [0.0] * before + [1.0] * len(row["old"]) + [0.0] * after, **of}
        )
    job = {"checkpoint": str(folder / "critic"), "samples": samples, "loss": "clipped_value", "steps": 3, "lr": 5e-4}
    (folder / "job.json").write_text(json.dumps(job | {"weight_decay": 0.0, "max_grad_norm": 1.0}))
    program = ROOT / "tests/support/scalar_reference.py"
    done = python(
        [str(program), str(folder / "job.json"), str(folder / "reference.safetensors")], folder, VERL_ENGINE_VENDOR=""
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(folder / "reference.safetensors")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "found.safetensors")


def test_values_are_those_of_transformers_at_verls_places(
    found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> None:
    theirs = torch.cat([reference[f"values.{index}"] for index in range(4)])
    torch.testing.assert_close(found["values"], theirs, rtol=1e-4, atol=1e-5)


def test_verls_value_loss_trains_as_with_transformers(
    folder: Path, found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> None:
    figures = json.loads((folder / "found.json").read_text())
    assert figures["losses"] == pytest.approx(reference["losses"].tolist(), rel=2e-5)
    assert figures["norms"] == pytest.approx(reference["grad_norms"].tolist(), rel=5e-5)
    assert min(figures["micro batches"]) > 1
    weights = {name: tensor for name, tensor in reference.items() if name.startswith("weights.")}
    assert weights.keys() == {name for name in found if name.startswith("weights.")}
    for name, theirs in weights.items():
        torch.testing.assert_close(found[name], theirs, rtol=1e-3, atol=2e-4)


def test_a_critic_is_saved_loaded_and_exported(folder: Path, rows: list[Any], found: dict[str, torch.Tensor]) -> None:
    assert not torch.allclose(found["trained"], found["values"], atol=1e-3)
    torch.testing.assert_close(found["fresh"], found["values"], rtol=0, atol=0)
    torch.testing.assert_close(found["loaded"], found["trained"], rtol=0, atol=0)
    exported = folder / "global_step_3" / "huggingface"
    done = python(["-c", LOADED, str(exported), str(folder / "rows.json")], folder, VERL_ENGINE_VENDOR="")
    assert done.returncode == 0, done.stderr[-4000:]
    theirs = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    torch.testing.assert_close(found["trained"], theirs, rtol=1e-4, atol=1e-5)


def test_a_causal_model_gets_a_new_head(found: dict[str, torch.Tensor]) -> None:
    drawn = found["new head"]
    assert drawn.shape == (1, 64)
    assert 0.01 < drawn.std() < 0.03


def test_a_second_model_in_a_process_is_refused_by_name(folder: Path) -> None:
    told = json.loads((folder / "found.json").read_text())["second"]
    assert "two models" in told
    assert "trainer.v1.trainer_mode=sync" in told


LAYOUTS = {
    "DP2": ({}, {0: 0, 1: 1}),
    "TP2": ({"tensor_model_parallel_size": 2}, {0: 0}),
    "PP2": ({"pipeline_model_parallel_size": 2}, {1: 0}),
    "CP2": ({"context_parallel_size": 2}, {0: 0}),
}
"""The engine's settings, and which ranks answer verl, each for the data parallel rank that it is."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_two_ranks_it_is_transformers_too(folder: Path, reference: dict[str, torch.Tensor], layout: str) -> None:
    """Losses, norms and rates reach verl from the ranks that have outputs, and only from those; weights are whole on all."""
    settings, answering = LAYOUTS[layout]
    out = folder / layout
    out.mkdir()
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={random.randint(20000, 60000)}"]
    done = python(
        [*command, str(HERE / "critic_ranks.py"), str(folder / "critic"), str(out), json.dumps(settings)], out
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found = {rank: json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)}
    parallel = len(answering)
    assert {rank: each["data rank"] for rank, each in found.items() if each["collects"]} == answering
    for rank, each in found.items():
        if rank not in answering:
            assert each["values"] is None
            assert each["steps"] == [None] * 3
            continue
        place = answering[rank]
        theirs = torch.cat([reference[f"values.{index}"] for index in range(place, 4, parallel)])
        torch.testing.assert_close(torch.tensor(each["values"]), theirs, rtol=1e-4, atol=1e-5)
        assert [step["loss"] for step in each["steps"]] == pytest.approx(reference["losses"].tolist(), rel=2e-5)
        norms = reference["grad_norms"].tolist()
        assert [step["grad_norm"] for step in each["steps"]] == pytest.approx(norms, rel=5e-5)
        assert [step["lr"] for step in each["steps"]] == pytest.approx([5e-4] * 3)
    for rank in found:
        weights = load_file(out / f"rank{rank}.safetensors")
        assert {f"weights.{name}" for name in weights} == {name for name in reference if name.startswith("weights.")}
        for name, mine in weights.items():
            torch.testing.assert_close(mine, reference[f"weights.{name}"], rtol=1e-3, atol=2e-4)
