"""``torchrun -m megascend.acceptance.parity_ranks JOB``: one rank that trains the job's layouts, one after the other."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import megascend
from megascend.acceptance.ranks import read_job


def main(argument: str) -> None:
    """Leave a file for each layout that was trained."""
    job = read_job(argument)
    megascend.bootstrap("npu")
    from safetensors.torch import save_file

    from megascend.acceptance.layouts import cases
    from megascend.acceptance.parity import logits_file, trajectory_file
    from megascend.files import replacing
    from megascend.testing.parity import run_case, token_lists

    rank, folder = int(os.environ["RANK"]), Path(job["folder"])
    wanted = {case.name: case for case in cases(job["simulated"], job["quick"])}
    for name, checkpoint in job["cases"].items():
        case = wanted[name]
        seen = run_case(case, Path(checkpoint), token_lists())
        if rank == 0 and seen.logits:
            logits = {str(index): one.cpu().contiguous() for index, one in enumerate(seen.logits)}
            save_file(logits, logits_file(folder, case))
        file = trajectory_file(folder, case, rank)
        with replacing(file) as fresh:
            fresh.write_text(json.dumps({"losses": seen.losses, "grad_norms": seen.grad_norms}), encoding="utf-8")
        if rank == 0:
            print(f"{name}: done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
