"""Models with a head for multi-token prediction: tiny checkpoints, training them, and the reference's run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megascend.testing import write_tiny_checkpoint
from megascend.testing.parity import LR, MAX_GRAD_NORM, WEIGHT_DECAY, Case, case_backend, reference, token_lists
from megascend.training.batch.sample import Sample

REFERENCE = Path(__file__).with_name("mtp_reference.py")
STEPS, WEIGHT = 3, 0.3
SEEDS = {"glm4_moe_lite": 1, "qwen3_next": 1}
"""With the usual one, transformers' own fp32 is ten times as far from its fp64, as Adam amplifies gradients near 0."""
LAYERS = 4
HEAD = f"model.layers.{LAYERS}."
"""Prefix of the head's tensors."""
SEPARATE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Architectures whose checkpoints name a head ``mtp.*``, and not like one more layer."""
SEPARATE_LAYER = "mtp.layers.0."
HYBRID_LAYERS = [*["linear_attention"] * (LAYERS - 1), "full_attention", "full_attention"]
"""Of the layers and the head."""


def add_prediction_head(source: Path, target: Path) -> Path:
    """Write the checkpoint ``source`` with its last layer as the head of the layers before it; return ``target``."""
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    layers = config["num_hidden_layers"] - 1
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    if config.get("mlp_layer_types"):
        config["mlp_layer_types"] = config["mlp_layer_types"][:layers]
    embedding = tensors["model.embed_tokens.weight"]
    width, head, dtype = config["hidden_size"], f"model.layers.{layers}.", embedding.dtype
    generator = torch.Generator().manual_seed(5)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{head}{name}.weight"] = (1.0 + 0.2 * torch.randn(width, generator=generator)).to(dtype)
    projection = torch.randn(width, 2 * width, generator=generator) / (2 * width) ** 0.5
    tensors[f"{head}eh_proj.weight"] = projection.to(dtype)
    tensors[f"{head}embed_tokens.weight"] = embedding.clone()
    tensors[f"{head}shared_head.head.weight"] = tensors.get("lm_head.weight", embedding).clone()
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


def add_separate_head(source: Path, target: Path) -> Path:
    """Write ``source`` with its last layer as the head of the layers before it, named as in Qwen's checkpoints."""
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    layers = config["num_hidden_layers"] - 1
    config |= {"num_hidden_layers": layers, "layer_types": config["layer_types"][:layers], "mtp_num_hidden_layers": 1}
    width = config["hidden_size"]
    tensors = {name.replace(f"model.layers.{layers}.", SEPARATE_LAYER): tensor for name, tensor in tensors.items()}
    generator = torch.Generator().manual_seed(5)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):  # offsets from 1
        tensors[f"mtp.{name}.weight"] = 0.2 * torch.randn(width, generator=generator)
    tensors["mtp.fc.weight"] = torch.randn(width, 2 * width, generator=generator) / (2 * width) ** 0.5
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


def checkpoint_with_head(folder: Path, arch: str, *, tied: bool = False) -> Path:
    """Return a tiny checkpoint of four layers and a head, made once."""
    path = folder / f"{arch}-with-head{'-tied' if tied else ''}"
    if not path.exists():
        overrides: dict[str, Any] = {"num_hidden_layers": LAYERS + 1, "tie_word_embeddings": tied}
        if arch == "glm4_moe_lite":
            overrides["mlp_layer_types"] = ["dense", *["sparse"] * LAYERS]
        if arch in SEPARATE:
            overrides |= {"layer_types": HYBRID_LAYERS, "rms_norm_eps": 0.1}
        source = write_tiny_checkpoint(path.with_name(f"{path.name}-source"), arch, SEEDS.get(arch, 0), **overrides)
        (add_separate_head if arch in SEPARATE else add_prediction_head)(source, path)
    return path


@dataclass(frozen=True)
class Trained:
    """Figures of every step."""

    losses: list[float]
    mtp_losses: list[float]
    grad_norms: list[float]


def weighted_samples() -> list[Sample]:
    """Return samples of several lengths, one of them of a single target, whose weights differ from token to token."""
    lists = [*token_lists(), [7, 9]]
    generator = torch.Generator().manual_seed(3)
    weights = [torch.rand(len(tokens) - 1, generator=generator).round(decimals=2) for tokens in lists]
    return [
        Sample(input_ids=tokens[:-1], target_ids=tokens[1:], weights=values.tolist())
        for tokens, values in zip(lists, weights, strict=True)
    ]


def plain_run(
    folder: Path,
    checkpoint: Path,
    samples: Sequence[Sample] | None = None,
    *,
    steps: int = STEPS,
    reduction: str = "mean",
    **job: Any,
) -> dict[str, Any]:
    """Return what the reference computes (``mtp_reference.py``), made once for each job."""
    entries = [
        {"token_ids": [*sample.input_ids.tolist(), int(sample.target_ids[-1])], "weights": sample.weights.tolist()}
        for sample in samples or weighted_samples()
    ]
    job = {"checkpoint": str(checkpoint), "samples": entries, "steps": steps, "reduction": reduction, **job}
    job |= {"lr": LR, "weight_decay": WEIGHT_DECAY, "max_grad_norm": MAX_GRAD_NORM, "mtp_loss_weight": WEIGHT}
    return load_file(reference(folder, REFERENCE, job))


def head_backend(case: Case, checkpoint: Path, **settings: Any) -> Any:
    """Return the backend that a case describes, with the head trained unless ``settings`` say otherwise."""
    return case_backend(case, checkpoint, **{"mtp": "train", "mtp_loss_weight": WEIGHT} | settings)


def train_head(case: Case, checkpoint: Path, folder: Path, **settings: Any) -> Trained:
    """Run one rank of a case; exports to ``folder`` at the end."""
    backend = head_backend(case, checkpoint, **settings)
    rows = []
    for number in range(STEPS):
        if case.resumes and number == 1:
            backend.save(folder / "saved", wait=True)
            backend.close()
            backend = head_backend(case, checkpoint, **settings)
            backend.load(folder / "saved")
        result = backend.forward_backward(backend.shard(weighted_samples()))
        step = backend.optimizer_step()
        rows.append((result.loss, result.metrics["mtp_loss"], step.grad_norm))
    backend.export_hf(folder / "hf")
    backend.close()
    return Trained(*map(list, zip(*rows, strict=True)))


def compare(run: Trained, folder: Path, checkpoint: Path) -> dict[str, Any]:
    """Assert that a run's figures are the reference's, and return what that computed.

    Bounds are 1e-5 for losses and 1e-4 for norms; where a model amplifies rounding, twice what the reference's fp32 is away from
    its fp64, except in the first step, before Adam has amplified anything.
    """
    expected, exact = plain_run(folder, checkpoint, weights=True), plain_run(folder, checkpoint, dtype="float64")
    for figure, bound in (("losses", 1e-5), ("mtp_losses", 1e-5), ("grad_norms", 1e-4)):
        differences = (torch.tensor(getattr(run, figure), dtype=torch.float64) - expected[figure]).abs()
        rounding = float((expected[figure] - exact[figure]).abs().max())
        assert float(differences.max()) <= max(bound, 2 * rounding), (figure, differences, rounding)
        assert float(differences[0]) <= bound, (figure, differences)
    return expected
