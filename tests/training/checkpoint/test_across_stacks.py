"""A run that is saved on one stack continues on another: optimizer state, main parameters and layout, in both directions.

Needs MEGASCEND_OTHER_STACK_PYTHON, an interpreter with another stack and megascend's requirements.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from megascend.testing.parity import Case, TrainingCurve, case_checkpoint, differences, hf_reference, token_lists
from support import families
from support.parity_matrix import matrix

PROGRAM = Path(__file__).with_name("partial_run.py")
OTHER = os.environ["MEGASCEND_OTHER_STACK_PYTHON"]
STEPS, SAVED_AFTER = 6, 3
DEADLINE_S = 600
NAMES = ("TP2 + SP", "DP2, distributed optimizer", "PP2 x VPP2", "MoE EP2", "bf16")
"""Sharded by rows, by a flat run of numbers, by layers and by experts; main parameters beside 16-bit ones."""
CASES = [case for case in matrix() if case.name in NAMES]
IN_CI = ("MoE EP2", "bf16")


def part(python: str, folder: Path, case: Case, checkpoint: Path, **job: Any) -> dict[str, Any]:
    """Run ``partial_run.py`` on an interpreter; return its result."""
    job |= {"case": case.name, "checkpoint": str(checkpoint)}
    request, result = folder / f"{job['steps'][0]}.json", folder / f"{job['steps'][0]}.result"
    request.write_text(json.dumps(job), encoding="utf-8")
    completed = families.run([python, PROGRAM, request, result], DEADLINE_S)
    assert completed.returncode == 0, completed.stderr[-4000:]
    return json.loads(result.read_text(encoding="utf-8"))


# differs: weights and optimizer state in checkpoints
@pytest.mark.difference_cases("from the other-MoE EP2", "to the other-bf16")
@pytest.mark.parametrize(
    "case",
    [case if case.name in IN_CI else pytest.param(case, marks=pytest.mark.nightly) for case in CASES],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("direction", ["from the other", "to the other"])
def test_run_saved_on_one_stack_continues_on_another(
    case: Case, direction: str, parity_folder: Path, tmp_path: Path
) -> None:
    writer, reader = (OTHER, sys.executable) if direction == "from the other" else (sys.executable, OTHER)
    checkpoint, saved = case_checkpoint(parity_folder, case.arch, **case.overrides), str(tmp_path / "saved")
    first = part(writer, tmp_path, case, checkpoint, steps=[0, SAVED_AFTER], load=None, save=saved)
    second = part(reader, tmp_path, case, checkpoint, steps=[SAVED_AFTER, STEPS], load=saved, save=None)
    assert first["megatron_core"] != second["megatron_core"]
    curve = TrainingCurve(first["losses"] + second["losses"], first["grad_norms"] + second["grad_norms"], [])
    difference = differences(curve, hf_reference(parity_folder, checkpoint, token_lists(), steps=STEPS))
    assert difference.loss <= case.loss_bound, difference
    assert difference.grad_norm <= case.norm_bound, difference
