"""Heads for multi-token prediction: trained in every layout, against a plain one made of transformers' layers."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megascend.batch.sample import Sample
from megascend.config import Adam, Adapters, Batching, CudaGraphs, Moe, Parallel, Recompute
from megascend.errors import ConfigError
from megascend.testing import run_distributed
from megascend.testing.parity import (
    LR,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    Case,
    case_checkpoint,
    first_of_equals,
    reference,
    token_lists,
)

pytestmark = pytest.mark.usefixtures("megatron_imported")

REFERENCE = Path(__file__).parents[1] / "support" / "mtp_reference.py"
FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
STEPS, WEIGHT = 3, 0.3
LAYERS = 4


def checkpoint_with_head(folder: Path, arch: str) -> Path:
    """Return a tiny checkpoint with a head after its layers: a model of one layer more, whose last becomes the head's."""
    path = folder / f"{arch}-with-head"
    if path.exists():
        return path
    overrides: dict[str, Any] = {"num_hidden_layers": LAYERS + 1}
    if arch == "glm4_moe_lite":
        overrides["mlp_layer_types"] = ["dense", *["sparse"] * LAYERS]
    source = case_checkpoint(folder, arch, **overrides)
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    if config.get("mlp_layer_types"):
        config["mlp_layer_types"] = config["mlp_layer_types"][:LAYERS]
    generator = torch.Generator().manual_seed(5)
    width, prefix = config["hidden_size"], f"model.layers.{LAYERS}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{name}.weight"] = 1.0 + 0.2 * torch.randn(width, generator=generator)
    matrix = torch.randn(width, 2 * width, generator=generator) / (2 * width) ** 0.5
    tensors[f"{prefix}eh_proj.weight"] = matrix
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Trained:
    """Figures of every step, and the trained weights where they were asked for."""

    losses: list[float]
    mtp_losses: list[float]
    grad_norms: list[float]


def samples() -> list[Sample]:
    """Return samples of several lengths, one of them of a single target, whose weights differ from token to token."""
    lists = [*token_lists(), [7, 9]]
    generator = torch.Generator().manual_seed(3)
    weights = [torch.rand(len(tokens) - 1, generator=generator).round(decimals=2) for tokens in lists]
    return [
        Sample(input_ids=tokens[:-1], target_ids=tokens[1:], weights=own.tolist())
        for tokens, own in zip(lists, weights, strict=True)
    ]


def plain(folder: Path, checkpoint: Path, *, steps: int = STEPS, reduction: str = "mean", **job: Any) -> dict[str, Any]:
    """Return what the reference computes."""
    entries = [
        {"token_ids": [*sample.input_ids.tolist(), int(sample.target_ids[-1])], "weights": sample.weights.tolist()}
        for sample in samples()
    ]
    job = {"checkpoint": str(checkpoint), "samples": entries, "steps": steps, "reduction": reduction, **job}
    job |= {"lr": LR, "weight_decay": WEIGHT_DECAY, "max_grad_norm": MAX_GRAD_NORM, "mtp_loss_weight": WEIGHT}
    return load_file(reference(folder, REFERENCE, job))


def backend_of(case: Case, checkpoint: Path, **settings: Any) -> Any:
    from megascend.backends import MegatronBackend

    return MegatronBackend(
        model=checkpoint,
        parallel=case.parallel,
        precision=case.precision,
        optimizer=case.adam,
        recompute=case.recompute,
        batching=Batching(packing=case.packing, micro_batch_tokens=case.micro_batch_tokens),
        timeout_s=60,
        self_check=False,
        **{"mtp": "train", "mtp_loss_weight": WEIGHT} | settings,
    )


def train(case: Case, checkpoint: Path, folder: Path, steps: int = STEPS) -> Trained:
    """Run one rank of a case; exports to ``folder`` at the end."""
    backend = backend_of(case, checkpoint)
    rows = []
    for number in range(steps):
        if case.resumes and number == 1:
            backend.save(folder / "saved", wait=True)
            backend.close()
            backend = backend_of(case, checkpoint)
            backend.load(folder / "saved")
        result = backend.forward_backward(backend.shard(samples()))
        step = backend.optimizer_step()
        rows.append((result.loss, result.metrics["mtp_loss"], step.grad_norm))
    backend.export_hf(folder / "hf")
    backend.close()
    return Trained(*map(list, zip(*rows, strict=True)))


def test_loss_gradient_and_weights_equal_a_plain_head(parity_folder: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_with_head(parity_folder, "deepseek_v3")
    case = Case("single", arch="deepseek_v3")
    (run,) = run_distributed(train, 1, case, checkpoint, tmp_path, init=False, timeout_s=120)
    expected = plain(parity_folder, checkpoint, weights=True)
    print(run, expected["losses"], expected["mtp_losses"], expected["grad_norms"])
    assert run.losses == pytest.approx(expected["losses"].tolist(), abs=1e-5)
    assert run.mtp_losses == pytest.approx(expected["mtp_losses"].tolist(), abs=1e-5)
    assert run.grad_norms == pytest.approx(expected["grad_norms"].tolist(), abs=1e-4)
