"""Train a tiny model on an engine without Megatron, in a process where Megatron is not imported. A script:

python engine_steps.py ENGINE CHECKPOINT STEPS RESULT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import megascend
from megascend.testing.parity import LR, MAX_GRAD_NORM, WEIGHT_DECAY, causal_samples, token_lists

REFUSED_PACKED = ("nemotron_h",)
"""Families whose packed samples engine fsdp refuses."""


def main(engine: str, checkpoint: str, steps: str, result: str) -> None:
    samples = causal_samples(token_lists())
    model_type = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))["model_type"]
    packed = engine == "fsdp" and model_type not in REFUSED_PACKED
    with megascend.make_backend(
        engine,
        model=Path(checkpoint),
        precision="fp32",
        platform="cpu",
        optimizer=megascend.Adam(lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM),
        batching=megascend.Batching(packing=packed, micro_batch_tokens=64 if packed else 200),
    ) as backend:
        losses, norms = [], []
        for _ in range(int(steps)):
            losses.append(backend.forward_backward(samples).loss)
            norms.append(backend.optimizer_step().grad_norm)
    Path(result).write_text(json.dumps({"losses": losses, "grad_norms": norms}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
