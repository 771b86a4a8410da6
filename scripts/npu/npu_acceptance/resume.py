"""Section ``resume``: a run that is killed after a checkpoint and resumed ends as one that was not, bit for bit.

``torchrun -m npu_acceptance.resume JOB`` is one rank of a run that is uninterrupted ("whole"), killed or resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import megascend
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists
from npu_acceptance.plan import Settings, largest_power_of_two
from npu_acceptance.processes import ProgramResult, read_job, run_ranks
from npu_acceptance.records import Results, equal, failed

LAYOUTS = {1: {}, 2: {"tensor": 2}, 4: {"tensor": 2, "pipeline": 2}, 8: {"tensor": 2, "pipeline": 2}}
STEPS, SAVED_AFTER, KILLED_IN = 8, 4, 7
LIMIT_S = 280.0
DETERMINISTIC = {"HCCL_DETERMINISTIC": "true", "LCCL_DETERMINISTIC": "1"}
"""Without them HCCL may sum in another order each time."""


def run(settings: Settings, results: Results) -> None:
    """Launch three runs (uninterrupted, killed, resumed) and compare them."""
    ranks = largest_power_of_two(settings.cards)
    folder = settings.folder / "resume"
    baseline, outcome = launch("whole", ranks, settings)
    if baseline is None:
        results.add(failed("the run that is not interrupted", outcome.last_error))
        return
    _, killed = launch("killed", ranks, settings)
    reached = (folder / "killed.reached").is_file()
    results.add(equal(f"a rank killed in step {KILLED_IN}", (reached, bool(killed.code)), (True, True)))
    resumed, outcome = launch("resumed", ranks, settings)
    if resumed is None:
        results.add(failed("the run that is resumed", outcome.last_error))
        return
    note = f"{ranks} cards, {LAYOUTS[ranks] or 'one process'}, saved after step {SAVED_AFTER}"
    results.add(equal("the step that it resumes with", resumed["first_step"], SAVED_AFTER + 1, note))
    for figure in ("losses", "grad_norms"):
        results.add(
            equal(
                f"{figure.replace('grad_', 'gradient ')} after the resume",
                resumed[figure],
                baseline[figure][SAVED_AFTER:],
            )
        )
    results.add(equal("digest of the exported weights", resumed["weights"], baseline["weights"]))


def launch(mode: str, ranks: int, settings: Settings) -> tuple[dict[str, Any] | None, ProgramResult]:
    """Launch one run; return rank 0's answer (None if it did not complete) and the outcome of the program."""
    folder = settings.folder / "resume"
    folder.mkdir(parents=True, exist_ok=True)
    job = {
        "name": mode,
        "mode": mode,
        "model": str(case_checkpoint(settings.folder / "parity", "qwen3")),
        "parallel": LAYOUTS[ranks],
        "folder": str(folder),
    }
    limit = LIMIT_S * (2 if settings.simulated else 1)
    outcome = run_ranks(settings, ranks, "resume", job, limit, **DETERMINISTIC)
    answer = folder / f"{mode}.json"
    return (json.loads(answer.read_text(encoding="utf-8")) if outcome.code == 0 and answer.is_file() else None), outcome


def run_rank() -> None:
    """Train; the last rank of the killed run kills itself within a step."""
    job = read_job()
    mode, folder = job["mode"], Path(job["folder"])
    parallel = megascend.Parallel(**job["parallel"])
    megascend.bootstrap("npu", parallel)
    import torch

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
    """Return a digest of all weights of an exported model."""
    total = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        total.update(file.read_bytes())
    return total.hexdigest()[:16]


if __name__ == "__main__":
    run_rank()
