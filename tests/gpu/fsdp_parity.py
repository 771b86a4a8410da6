"""Compare engine fsdp on the devices of this machine with Hugging Face and torch AdamW on the CPU.

    torchrun --nproc-per-node 2 tests/gpu/fsdp_parity.py FOLDER [--platform cuda|npu]

Trains ten steps of tiny models in several settings, saved and resumed half way. Rank 0 prints the largest differences of losses
and gradient norms as JSON lines. Checkpoints and references are created in FOLDER. Exits with 1 if a difference exceeds its
bound.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from megascend import Adam, Batching, Fsdp, FsdpBackend, Parallel, Recompute
from megascend.config import Precision
from megascend.testing.parity import (
    LR,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    TrainingCurve,
    case_checkpoint,
    causal_samples,
    differences,
    hf_reference,
    token_lists,
)

RECOMPUTED = Recompute(granularity="full")
CASES: dict[str, tuple[str, Precision, dict[str, Any], float, float]] = {
    "fp32": ("qwen3", "fp32", {}, 1e-5, 1.5e-4),
    "fp32, offload": ("qwen3", "fp32", {"fsdp": Fsdp(offload=True)}, 1e-5, 1.5e-4),
    "fp32, recomputed": ("qwen3", "fp32", {"recompute": RECOMPUTED}, 1e-5, 1.5e-4),
    "bf16": ("qwen3", "bf16", {}, 2e-2, 0.1),
    "fp16": ("qwen3", "fp16", {}, 1e-2, 0.1),
    "MoE bf16, recomputed": ("qwen3_moe", "bf16", {"recompute": RECOMPUTED}, 0.15, 1.0),
    "MoE fp32": ("qwen3_moe", "fp32", {}, 1e-5, 1.5e-4),
    "sinks bf16": ("gpt_oss", "bf16", {}, 0.15, 1.0),
}
ON_TWO: dict[str, tuple[str, Precision, dict[str, Any], float, float]] = {
    "fp32, SP2": (
        "qwen3",
        "fp32",
        {"parallel": Parallel(context=2, context_algorithm="ulysses")},
        1e-5,
        1.5e-4,
    ),
    "fp32, two copies": ("qwen3", "fp32", {"fsdp": Fsdp(replicate=2)}, 1e-5, 1.5e-4),
    "MoE fp32, EP2": ("qwen3_moe", "fp32", {"parallel": Parallel(expert=2)}, 1e-5, 1.5e-4),
    "MoE fp32, EP2 x SP2, recomputed": (
        "qwen3_moe",
        "fp32",
        {"parallel": Parallel(expert=2, context=2, context_algorithm="ulysses"), "recompute": RECOMPUTED},
        1e-5,
        1.5e-4,
    ),
    "MoE bf16, EP2, recomputed": (
        "qwen3_moe",
        "bf16",
        {"parallel": Parallel(expert=2), "recompute": RECOMPUTED},
        0.15,
        1.0,
    ),
}


def trajectory(checkpoint: Path, precision: Precision, platform: Any, options: dict[str, Any]) -> TrainingCurve:
    """Ten steps; saved and resumed half way."""
    settings: dict[str, Any] = {"precision": precision, "platform": platform, "timeout_s": 60}
    settings["optimizer"] = Adam(lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM)
    settings["batching"] = Batching(micro_batch_tokens=64)
    losses, norms = [], []
    saved = checkpoint.with_name("saved")
    for half in range(2):
        with FsdpBackend(checkpoint, **settings | options) as backend:
            samples = backend.shard(causal_samples(token_lists()))
            if half:
                backend.load(saved)
            for _ in range(5):
                losses.append(backend.forward_backward(samples).loss)
                norms.append(backend.optimizer_step().grad_norm)
            if not half:
                backend.save(saved, wait=True)
    return TrainingCurve(losses, norms, [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--platform", default="auto")
    arguments = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    failed = False
    for name, (arch, precision, options, loss, norm) in (CASES | (ON_TWO if world_size == 2 else {})).items():
        checkpoint = case_checkpoint(arguments.folder, arch)
        try:
            measured = trajectory(checkpoint, precision, arguments.platform, options)
        except Exception as error:
            print(
                json.dumps({"case": name, "rank": rank, "error": f"{type(error).__name__}: {error}"[:600]}), flush=True
            )
            raise
        if rank == 0:
            reference = hf_reference(arguments.folder, checkpoint, token_lists())
            errors = differences(measured, TrainingCurve(reference.losses, reference.grad_norms, []))
            good = errors.loss <= loss and errors.grad_norm <= norm
            failed = failed or not good
            print(json.dumps({"case": name, "loss": errors.loss, "norm": errors.grad_norm, "good": good}), flush=True)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
