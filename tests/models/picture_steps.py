"""Train a tiny model on samples with pictures, on an engine without Megatron, in a process where Megatron is not imported.

    python picture_steps.py ENGINE CHECKPOINT STEPS TOWER RESULT

RESULT holds losses, gradient norms, the first log-probabilities and the trained weights; rank 0 writes it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import megascend
from megascend.testing.parity import LR, MAX_GRAD_NORM, WEIGHT_DECAY
from support.pictures import picture_samples


def main(engine: str, checkpoint: str, steps: str, tower: str, result: str) -> None:
    samples = picture_samples()
    packed = engine == "fsdp"
    with megascend.make_backend(
        engine,
        model=Path(checkpoint),
        precision="fp32",
        platform="cpu",
        optimizer=megascend.Adam(lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM),
        batching=megascend.Batching(packing=packed, micro_batch_tokens=64 if packed else 200),
        vision_tower=tower,
        self_check=False,
    ) as backend:
        logprobs = backend.forward(samples).logprobs if backend.topology.data == 1 else []
        losses, norms = [], []
        share = backend.shard(samples)
        for _ in range(int(steps)):
            losses.append(backend.forward_backward(share).loss)
            norms.append(backend.optimizer_step().grad_norm)
        weights = {name: tensor.clone() for name, tensor in backend.named_weights(receivers="main")}
    if os.environ.get("RANK", "0") == "0":
        torch.save({"losses": losses, "grad_norms": norms, "logprobs": logprobs, "weights": weights}, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
