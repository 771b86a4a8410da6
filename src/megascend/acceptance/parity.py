"""Section ``parity``: ten steps of a tiny model in every layout against Hugging Face and torch's AdamW on the CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megascend.acceptance.layouts import cases
from megascend.acceptance.ranks import last_error, run_ranks
from megascend.acceptance.records import Measurement, Results, at_most, failed, left_out
from megascend.acceptance.settings import Settings
from megascend.testing.parity import STEPS, Case, Trajectory, case_checkpoint, differences, hf_reference, token_lists

START_S, CASE_S = 180, 90
"""Seconds that the ranks may take to start, and for a layout."""
SIMULATED_TIMEOUT_FACTOR = 4


def run(settings: Settings, results: Results) -> None:
    """All layouts that the cards allow, those of one size in one launch; the others are said to be left out."""
    wanted = cases(settings.simulated, settings.quick)
    for case in wanted:
        if case.world_size > settings.cards:
            reason = (
                f"needs {case.world_size} cards, and {settings.cards} take{'s' if settings.cards == 1 else ''} part"
            )
            results.add(left_out(case.name, reason))
    possible = [case for case in wanted if case.world_size <= settings.cards]
    for size in sorted({case.world_size for case in possible}):
        train([case for case in possible if case.world_size == size], settings, results)


def train(together: Sequence[Case], settings: Settings, results: Results) -> None:
    """Run ``together`` in one launch. A layout that fails is named, and those after it get a launch of their own."""
    waiting = list(together)
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
        ended = run_ranks(settings, size, "megascend.acceptance.parity_ranks", job, limit)
        problem = ended.problem(limit)
        while waiting:
            case = waiting.pop(0)
            if not all(trajectory_file(folder, case, rank).is_file() for rank in range(size)):
                results.add(failed(case.name, f"{problem or 'no result'}: {last_error(ended)}"))
                break
            results.extend(compare(case, folder, Path(checkpoints[case.name])))


def trajectory_file(folder: Path, case: Case, rank: int) -> Path:
    """Where a rank leaves what it saw."""
    return folder / f"{case.name.replace(' ', '_')}.{rank}.json"


def logits_file(folder: Path, case: Case) -> Path:
    """Where rank 0 leaves the untrained model's logits."""
    return folder / f"{case.name.replace(' ', '_')}.logits.safetensors"


def compare(case: Case, folder: Path, checkpoint: Path) -> list[Measurement]:
    """Losses, gradient norms and logits of a layout against the reference's, and the ranks against each other."""
    from safetensors.torch import load_file

    found = [
        json.loads(trajectory_file(folder, case, rank).read_text(encoding="utf-8")) for rank in range(case.world_size)
    ]
    if odd := [rank for rank, other in enumerate(found) if other != found[0]]:
        return [failed(case.name, f"rank {odd[0]} reports other losses or gradient norms than rank 0")]
    tokens = token_lists()
    logits = load_file(logits_file(folder, case)) if logits_file(folder, case).is_file() else {}
    mine = Trajectory(found[0]["losses"], found[0]["grad_norms"], [logits[str(index)] for index in range(len(logits))])
    apart = differences(mine, hf_reference(folder, checkpoint, tokens, STEPS, case.aux_loss))
    measured = [
        at_most(f"{case.name}, loss", apart.loss, case.loss_bound),
        at_most(f"{case.name}, gradient norm", apart.grad_norm, case.norm_bound),
    ]
    if apart.logits is not None and case.precision == "fp32":
        measured.append(at_most(f"{case.name}, logits", apart.logits, case.logits_bound))
    return measured
