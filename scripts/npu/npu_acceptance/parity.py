"""Section ``parity``: ten steps of a tiny model in every layout against Hugging Face and torch's AdamW on the CPU.

``torchrun -m npu_acceptance.parity JOB`` is one rank, which trains the job's layouts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import megascend
from megascend.config import Parallel
from megascend.testing.parity import (
    STEPS,
    Case,
    TrainingCurve,
    case_checkpoint,
    differences,
    hf_reference,
    run_case,
    token_lists,
)
from npu_acceptance.plan import Settings, too_few_cards
from npu_acceptance.processes import read_job, run_ranks
from npu_acceptance.records import Measurement, Results, at_most, failed, left_out
from support.parity_matrix import matrix

FROM_MATRIX = (
    "single",
    "full recompute",
    "MoE single",
    "bf16",
    "fp16",
    "TP2",
    "TP2 + SP",
    "PP2",
    "CP2, ring",
    "CP2, all_gather",
    "DP2, distributed optimizer",
    "MoE EP2",
    "MoE TP2 x EP2 + SP",
    "bf16 TP2 + SP",
    "TP2 x PP2",
    "TP2 x CP2, ring",
    "TP2 x DP2, distributed optimizer",
    "MoE TP2 x PP2 x EP2",
)
QUICK = ("single", "TP2 + SP", "MoE EP2")
PADDED = {"packing": False, "micro_batch_tokens": 200}
ON_EIGHT = (
    Case("TP2 x PP2 x DP2", 8, Parallel(tensor=2, pipeline=2)),
    Case("TP2 x PP2 x CP2, ring", 8, Parallel(tensor=2, pipeline=2, context=2), packing=False, micro_batch_tokens=200),
    Case("MoE TP2 x EP4 + SP", 8, Parallel(tensor=2, expert=4, expert_tensor=1), arch="qwen3_moe", logits_bound=2e-5),
)

CARD_BOUNDS = {"fp32": (2e-3, 1e-2), "fp16": (0.05, 0.3), "bf16": (0.15, 0.6)}
"""Largest differences of loss and gradient norm on cards, by precision. No card has been seen: they are what two GPUs stay
within ten times (fp32), or what tiny models lose to 16 bits anywhere."""
CARD_LOGITS_BOUND = 2e-3

START_S, CASE_S = 180, 90
"""Seconds for the ranks to start, and for a layout."""
SIMULATED_TIMEOUT_FACTOR = 4


def cases(simulated: bool, quick: bool) -> list[Case]:
    """Return the layouts by world size, with the bounds of a card or, if simulated, those of benchmarks/numerics.md."""
    by_name = {case.name: case for case in matrix("npu")}
    selected = [by_name[name] for name in (QUICK if quick else FROM_MATRIX)] + ([] if quick else list(ON_EIGHT))
    selected.sort(key=lambda case: case.world_size)
    return selected if simulated else [on_cards(case) for case in selected]


def on_cards(case: Case) -> Case:
    """Return the case with the bounds of a card."""
    loss, norm = CARD_BOUNDS[case.precision]
    return replace(case, loss_bound=loss, norm_bound=norm, logits_bound=CARD_LOGITS_BOUND)


def run(settings: Settings, results: Results) -> None:
    """Run all layouts that fit the cards, one launch for each world size; record the rest as left out."""
    selected = cases(settings.simulated, settings.quick)
    for case in selected:
        if reason := too_few_cards(case.world_size, settings.cards):
            results.add(left_out(case.name, reason))
    possible = [case for case in selected if case.world_size <= settings.cards]
    for size in sorted({case.world_size for case in possible}):
        train([case for case in possible if case.world_size == size], settings, results)


def train(group: Sequence[Case], settings: Settings, results: Results) -> None:
    """Run ``group`` in one launch. A layout that fails is recorded, and a new launch runs those after it."""
    waiting = list(group)
    while waiting:
        size, folder = waiting[0].world_size, settings.folder / "parity"
        checkpoints = {case.name: str(case_checkpoint(folder, case.arch, **case.overrides)) for case in waiting}
        job = {
            "name": f"{size} from {waiting[0].name.replace(',', '')}",
            "cases": checkpoints,
            "simulated": settings.simulated,
            "quick": settings.quick,
            "folder": str(folder),
        }
        limit = (START_S + CASE_S * len(waiting)) * (SIMULATED_TIMEOUT_FACTOR if settings.simulated else 1)
        outcome = run_ranks(settings, size, "parity", job, limit)
        problem = outcome.problem(limit)
        while waiting:
            case = waiting.pop(0)
            if not all(trajectory_file(folder, case, rank).is_file() for rank in range(size)):
                results.add(failed(case.name, f"{problem or 'no result'}: {outcome.last_error}"))
                break
            results.extend(compare(case, folder, Path(checkpoints[case.name])))


def trajectory_file(folder: Path, case: Case, rank: int) -> Path:
    """Return the path of a rank's trajectory."""
    return folder / f"{case.name.replace(' ', '_')}.{rank}.json"


def logits_file(folder: Path, case: Case) -> Path:
    """Return the path of the untrained model's logits, which rank 0 writes."""
    return folder / f"{case.name.replace(' ', '_')}.logits.safetensors"


def compare(case: Case, folder: Path, checkpoint: Path) -> list[Measurement]:
    """Compare a layout's losses, gradient norms and logits with the reference, and the ranks with each other."""
    from safetensors.torch import load_file

    reports = [
        json.loads(trajectory_file(folder, case, rank).read_text(encoding="utf-8")) for rank in range(case.world_size)
    ]
    if odd := [rank for rank, other in enumerate(reports) if other != reports[0]]:
        return [failed(case.name, f"rank {odd[0]} reports other losses or gradient norms than rank 0")]
    tokens = token_lists()
    logits = load_file(logits_file(folder, case)) if logits_file(folder, case).is_file() else {}
    trajectory = TrainingCurve(
        reports[0]["losses"], reports[0]["grad_norms"], [logits[str(index)] for index in range(len(logits))]
    )
    errors = differences(trajectory, hf_reference(folder, checkpoint, tokens, STEPS, case.aux_loss))
    measured = [
        at_most(f"{case.name}, loss", errors.loss, case.loss_bound),
        at_most(f"{case.name}, gradient norm", errors.grad_norm, case.norm_bound),
    ]
    if errors.logits is not None and case.precision == "fp32":
        measured.append(at_most(f"{case.name}, logits", errors.logits, case.logits_bound))
    return measured


def run_rank() -> None:
    """Train the layouts of the job in order, writing a file for each."""
    job = read_job()
    megascend.bootstrap("npu")
    from safetensors.torch import save_file

    from megascend.runtime.io.atomic import replacing

    rank, folder = int(os.environ["RANK"]), Path(job["folder"])
    by_name = {case.name: case for case in cases(job["simulated"], job["quick"])}
    for name, checkpoint in job["cases"].items():
        case = by_name[name]
        observed = run_case(case, Path(checkpoint), token_lists())
        if rank == 0 and observed.logits:
            logits = {str(index): tensor.cpu().contiguous() for index, tensor in enumerate(observed.logits)}
            save_file(logits, logits_file(folder, case))
        file = trajectory_file(folder, case, rank)
        with replacing(file) as fresh:
            fresh.write_text(
                json.dumps({"losses": observed.losses, "grad_norms": observed.grad_norms}), encoding="utf-8"
            )
        if rank == 0:
            print(f"{name}: done", flush=True)


if __name__ == "__main__":
    run_rank()
