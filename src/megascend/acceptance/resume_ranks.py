"""``torchrun -m megascend.acceptance.resume_ranks JOB``: one rank of a run that is whole, killed or resumed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import megascend
from megascend.acceptance.ranks import read_job
from megascend.acceptance.resume import KILLED_IN, SAVED_AFTER, STEPS


def main(argument: str) -> None:
    """Train; the last rank of the killed run ends itself in the middle of a step."""
    job = read_job(argument)
    mode, folder = job["mode"], Path(job["folder"])
    parallel = megascend.Parallel(**job["parallel"])
    megascend.bootstrap("npu", parallel)
    import torch

    from megascend.testing.parity import causal_samples, token_lists

    torch.use_deterministic_algorithms(True, warn_only=True)
    backend = megascend.MegatronBackend(
        model=job["model"],
        parallel=parallel,
        precision="bf16",
        optimizer=megascend.Adam(lr=5e-3, weight_decay=0.01),
        schedule=megascend.Schedule(kind="cosine", warmup_steps=2, total_steps=STEPS),
        batching=megascend.Batching(packing=True, micro_batch_tokens=64),
        platform="npu",
        timeout_s=60,
    )
    checkpoint = folder / "checkpoint"
    first = backend.load(checkpoint)["next"] if mode == "resumed" else 1
    share = backend.shard(causal_samples(token_lists()))
    losses, norms = [], []
    for step in range(first, STEPS + 1):
        result = backend.forward_backward(share)
        if mode == "killed" and step == KILLED_IN and backend.rank == backend.world_size - 1:
            (folder / "killed.reached").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        norms.append(backend.optimizer_step().grad_norm)
        losses.append(result.loss)
        if step == SAVED_AFTER and mode == "killed":
            backend.save(checkpoint, progress={"next": step + 1}, wait=True)
    backend.export_hf(folder / mode)
    if backend.rank == 0:
        answer = {"first_step": first, "losses": losses, "grad_norms": norms, "weights": digest(folder / mode)}
        (folder / f"{mode}.json").write_text(json.dumps(answer), encoding="utf-8")
    backend.close()


def digest(directory: Path) -> str:
    """Of all weights of an exported model."""
    total = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        total.update(file.read_bytes())
    return total.hexdigest()[:16]


if __name__ == "__main__":
    main(sys.argv[1])
