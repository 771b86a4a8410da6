"""Section ``resume``: a run that is killed after a checkpoint and resumed ends as one that was not, bit for bit."""

from __future__ import annotations

import json
from typing import Any

from megascend.acceptance.layouts import largest_power_of_two
from megascend.acceptance.processes import Ended
from megascend.acceptance.ranks import last_error, run_ranks
from megascend.acceptance.records import Results, equal, failed
from megascend.acceptance.settings import Settings
from megascend.testing.parity import case_checkpoint

LAYOUTS = {1: {}, 2: {"tensor": 2}, 4: {"tensor": 2, "pipeline": 2}, 8: {"tensor": 2, "pipeline": 2}}
STEPS, SAVED_AFTER, KILLED_IN = 8, 4, 7
LIMIT_S = 280.0
DETERMINISTIC = {"HCCL_DETERMINISTIC": "true", "LCCL_DETERMINISTIC": "1"}
"""Without them HCCL may sum in another order each time."""


def run(settings: Settings, results: Results) -> None:
    """Three launches: whole, killed, resumed."""
    ranks = largest_power_of_two(settings.cards)
    folder = settings.folder / "resume"
    whole, ended = launch("whole", ranks, settings)
    if whole is None:
        results.add(failed("the run that is not interrupted", last_error(ended)))
        return
    _, killed = launch("killed", ranks, settings)
    reached = (folder / "killed.reached").is_file()
    results.add(equal(f"a rank killed in step {KILLED_IN}", (reached, bool(killed.code)), (True, True)))
    resumed, ended = launch("resumed", ranks, settings)
    if resumed is None:
        results.add(failed("the run that is resumed", last_error(ended)))
        return
    note = f"{ranks} cards, {LAYOUTS[ranks] or 'one process'}, saved after step {SAVED_AFTER}"
    results.add(equal("the step that it resumes with", resumed["first_step"], SAVED_AFTER + 1, note))
    for figure in ("losses", "grad_norms"):
        results.add(
            equal(
                f"{figure.replace('grad_', 'gradient ')} after the resume", resumed[figure], whole[figure][SAVED_AFTER:]
            )
        )
    results.add(equal("digest of the exported weights", resumed["weights"], whole["weights"]))


def launch(mode: str, ranks: int, settings: Settings) -> tuple[dict[str, Any] | None, Ended]:
    """Run one of the three; what rank 0 left, or None if it did not come to its end."""
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
    ended = run_ranks(settings, ranks, "megascend.acceptance.resume_ranks", job, limit, **DETERMINISTIC)
    answer = folder / f"{mode}.json"
    return (json.loads(answer.read_text(encoding="utf-8")) if ended.code == 0 and answer.is_file() else None), ended
