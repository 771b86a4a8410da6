"""Train a tiny model on samples with images, on an engine without Megatron, in a process where Megatron is not imported.

    python image_steps.py JOB

JOB is a JSON object with ``engine``, ``checkpoint``, ``steps``, ``tower`` and ``result``, the file that rank 0 writes: losses,
gradient norms, the first log-probabilities, how far each sample's move when the first one has another image, and the trained
weights. It may name an ``adapter``, a PEFT directory, that is trained and saved to RESULT.adapter; several ``tenants``, which are
trained together on the samples of their ``shares`` and saved to RESULT.tenant-N; and checkpoints to ``load`` before and to
``save`` after; ``expert`` is the expert parallel size.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import megascend
from megascend.testing.parity import LR, MAX_GRAD_NORM, WEIGHT_DECAY
from support.images import image_samples


def main(job: dict[str, Any]) -> None:
    samples, adapter, tenants = image_samples(), job.get("adapter"), job.get("tenants", [])
    packed = job["engine"] == "fsdp"
    with megascend.make_backend(
        job["engine"],
        model=Path(job["checkpoint"]),
        precision="fp32",
        platform="cpu",
        optimizer=megascend.Adam(lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM),
        batching=megascend.Batching(packing=packed, micro_batch_tokens=64 if packed else 200),
        vision_tower=job["tower"],
        **({"parallel": megascend.Parallel(expert=job["expert"])} if "expert" in job else {}),
        self_check=False,
        adapters=megascend.Adapters() if adapter or tenants else None,
    ) as backend:
        name = None
        if adapter:
            name = "tenant"
            backend.load_adapter(name, Path(adapter), optimizer=False)
        if tenants:
            train_tenants(backend, samples, job)
            return
        if "load" in job:
            backend.load(Path(job["load"]))
        logprobs = backend.forward(samples, adapter=name).logprobs if backend.topology.data == 1 else []
        moved = []
        if logprobs and not adapter:
            other = dataclasses.replace(samples[0], images=image_samples(seed=1)[0].images)
            changed = backend.forward([other, *samples[1:]]).logprobs
            moved = [float((a - b).abs().max()) for a, b in zip(logprobs, changed, strict=True)]
        losses, norms = [], []
        share = backend.shard(samples)
        for _ in range(job["steps"]):
            losses.append(backend.forward_backward(share, adapter=name).loss)
            norms.append(backend.optimizer_step().grad_norm)
        if name is not None:
            backend.save_adapter(name, Path(f"{job['result']}.adapter"))
        if "save" in job:
            backend.save(Path(job["save"]), wait=True)
        weights = {name: tensor.clone() for name, tensor in backend.named_weights(receivers="main")}
    if os.environ.get("RANK", "0") == "0":
        result = {"losses": losses, "grad_norms": norms, "logprobs": logprobs, "weights": weights, "moved": moved}
        torch.save(result, job["result"])


def train_tenants(backend: Any, samples: list[Any], job: dict[str, Any]) -> None:
    """Train several adapters in the same batches."""
    names = [f"tenant-{number}" for number in range(len(job["tenants"]))]
    batch = []
    for name, path, share in zip(names, job["tenants"], job["shares"], strict=True):
        backend.load_adapter(name, Path(path), optimizer=False)
        batch += [dataclasses.replace(samples[index], adapter=name) for index in share]
    losses, norms = ([[] for _ in names] for _ in range(2))
    for _ in range(job["steps"]):
        result, step = backend.forward_backward(backend.shard(batch)), backend.optimizer_step()
        for number, name in enumerate(names):
            losses[number].append(result.adapters[name].loss)
            norms[number].append(step.adapters[name].grad_norm)
    for name in names:
        backend.save_adapter(name, Path(f"{job['result']}.{name}"))
    if os.environ.get("RANK", "0") == "0":
        torch.save({"tenant_losses": losses, "tenant_norms": norms}, job["result"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
