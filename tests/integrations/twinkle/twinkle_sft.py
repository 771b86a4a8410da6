"""Losses and gradient norms of twinkle's MegatronModel in fp32: twinkle_sft.py MODEL DP TP PP OUT.json

Each batch has sequences of several lengths, so that tokens and not samples are what a mean is over.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
import twinkle
from twinkle import DeviceMesh
from twinkle.model import MegatronModel

LENGTHS = (17, 9, 24, 12)
STEPS, RATE = 4, 1e-3


def batches() -> list[list[list[int]]]:
    """Build token ids of every step; not 0, which transformers takes for padding and gives no gradient."""
    generator = torch.Generator().manual_seed(0)
    return [[torch.randint(1, 200, (n,), generator=generator).tolist() for n in LENGTHS] for _ in range(STEPS)]


def features(ids: list[int]) -> dict[str, list[int]]:
    """Build a sequence for twinkle's processors, with every next token as label."""
    places = list(range(len(ids)))
    return {"input_ids": ids, "labels": [*ids[1:], -100], "position_ids": places, "attention_mask": [1] * len(ids)}


def main(path: str, dp: str, tp: str, pp: str, out: str) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=int(dp), tp_size=int(tp), pp_size=int(pp))
    twinkle.initialize(mode="local", global_device_mesh=mesh)
    model = MegatronModel(model_id=path, mixed_precision="no")
    model.set_optimizer(optimizer_cls="default", lr=RATE, weight_decay=0.0)
    steps = []
    for sequences in batches():
        loss = model.forward_backward(inputs=[features(ids) for ids in sequences])["loss"]
        model.clip_grad_and_step()
        steps.append([float(loss), float(model.optimizer_group[""]._last_grad_norm)])
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(steps, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
