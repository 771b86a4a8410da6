"""Train some steps of a parity case on the stack of this interpreter, from a checkpoint or from the start.

    python partial_run.py JOB RESULT

JOB is a JSON file: ``case`` (a name of the parity matrix), ``checkpoint`` (of Hugging Face), ``steps`` [first, end), ``load`` and
``save`` (directories of training checkpoints, or null). RESULT gets ``megatron_core``, ``losses`` and ``grad_norms``.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from megascend.runtime.bootstrap.runtime import bootstrap
from megascend.testing import run_distributed
from megascend.testing.parity import TrainingCurve, case_backend, causal_samples, first_of_equals, token_lists

sys.path.append(str(Path(__file__).parents[2]))  # another stack's interpreter runs this program

from support.parity_matrix import matrix


def train(job: dict[str, Any]) -> TrainingCurve:
    case = next(case for case in matrix() if case.name == job["case"])
    with case_backend(case, Path(job["checkpoint"])) as backend:
        if job["load"] is not None:
            backend.load(Path(job["load"]))
        first, end = job["steps"]
        assert backend.step_count == first
        losses, norms = [], []
        for _ in range(first, end):
            losses.append(backend.forward_backward(backend.shard(causal_samples(token_lists()))).loss)
            norms.append(backend.optimizer_step().grad_norm)
        if job["save"] is not None:
            backend.save(Path(job["save"]), wait=True)
        return TrainingCurve(losses, norms, [])


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    case = next(case for case in matrix() if case.name == job["case"])
    bootstrap("cpu").load_megatron()
    ranks = run_distributed(train, case.world_size, job, init=False, timeout_s=240)
    curve = first_of_equals(case.name, ranks)
    result = {
        "megatron_core": metadata.version("megatron-core"),
        "losses": curve.losses,
        "grad_norms": curve.grad_norms,
    }
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
