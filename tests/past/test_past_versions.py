"""This version against the ones before it: the same losses and norms, from their models and from their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import past_runs
import pytest
import torch
from past_runs import MODELS, RUNS, SAVED_AT, make_backend, samples, train
from safetensors.torch import load_file

from megascend import Parallel
from megascend.testing import run_distributed
from support.forked_programs import run_forked

VERSIONS = sorted(path.parent for path in Path(__file__).parent.glob("*/figures.json"))
LAYOUTS = {"one rank": (1, Parallel()), "TP2": (2, Parallel(tensor=2))}
CASES = [
    # covered: TP2 by parity and training/checkpoint/test_resharding.py
    pytest.param(run, layout, marks=[pytest.mark.nightly] if layout == "TP2" else [])
    for run in RUNS
    for layout in (*LAYOUTS, "fsdp")
]

pytestmark = [
    pytest.mark.usefixtures("megatron_imported"),
    pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name),
]


def stored(version: Path, run: str) -> list[dict[str, float]]:
    return json.loads((version / "figures.json").read_text(encoding="utf-8"))[run]


def trained(version: Path, run: str, layout: str, *checkpoint: Path) -> list[dict[str, float]]:
    if layout == "fsdp":
        completed = run_forked(Path(past_runs.__file__), run, version / RUNS[run], *checkpoint)
        assert completed.returncode == 0, completed.stderr
        return json.loads(completed.stdout.splitlines()[-1])
    world_size, parallel = LAYOUTS[layout]
    places = {"load_from": checkpoint[0]} if checkpoint else {}
    return train("megatron", run, version / RUNS[run], parallel, world_size, **places)


def assert_equal(rows: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(rows) == len(expected)
    for row, past in zip(rows, expected, strict=True):
        assert row == pytest.approx(past, rel=2e-5), (rows, expected)


@pytest.mark.nightly_cases("*-fsdp-*")  # covered: one rank; the second half, from the past checkpoint, on fsdp
@pytest.mark.parametrize(("run", "layout"), CASES)
def test_training_has_the_past_losses_and_norms(version: Path, run: str, layout: str) -> None:
    assert_equal(trained(version, run, layout), stored(version, run))


@pytest.mark.nightly_cases("dense-fsdp-*")  # covered: experts and adapters on fsdp
@pytest.mark.parametrize(("run", "layout"), CASES)
def test_past_checkpoint_resumes_with_the_past_losses_and_norms(version: Path, run: str, layout: str) -> None:
    rows = trained(version, run, layout, version / f"checkpoint-{run}")
    assert_equal(rows, stored(version, run)[SAVED_AT:])


@pytest.mark.parametrize("model", MODELS)
def test_first_figures_are_those_of_transformers(version: Path, model: str) -> None:
    """The past itself has an independent reference: plain transformers, in float64."""
    from transformers import AutoModelForCausalLM

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    reference = AutoModelForCausalLM.from_pretrained(version / model, dtype=torch.float64, **plain)
    reference.get_input_embeddings().padding_idx = None  # transformers gives the row of pad_token_id no gradient
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for sample in samples(model):
        logits = reference(torch.as_tensor(sample.input_ids)[None]).logits[0]
        logprobs = logits.log_softmax(-1).gather(1, torch.as_tensor(sample.target_ids)[:, None])[:, 0]
        weights = torch.as_tensor(sample.weights, dtype=torch.float64)
        total, weight = total - (logprobs * weights).sum(), weight + float(weights.sum())
    loss = total / weight
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None]).norm()
    first = stored(version, model)[0]
    assert (loss.item(), norm.item()) == pytest.approx((first["loss"], first["norm"]), rel=2e-5)


def test_past_adapter_is_read(version: Path) -> None:
    def on_rank() -> Any:
        with make_backend("megatron", "adapters", version / "dense", Parallel()) as backend:
            backend.load_adapter("a", version / "adapter")
            return backend.adapter_as_peft("a")

    ((_, tensors),) = run_distributed(on_rank, 1, init=False, timeout_s=120)
    expected = load_file(version / "adapter" / "adapter_model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
