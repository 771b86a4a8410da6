"""Programs of a section that run on several cards: torchrun, a deadline, and a finding if it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megascend.acceptance.processes import Ended, run, torchrun
from megascend.acceptance.settings import Settings


def run_ranks(
    settings: Settings, ranks: int, module: str, job: dict[str, Any], deadline_s: float, **environment: str
) -> Ended:
    """Run ``module`` on ``ranks`` cards with ``job``, which it finds as JSON in the file named by its argument."""
    name = f"{module.rpartition('.')[2]}-{job.get('name', ranks)}".replace(" ", "_")
    path = settings.folder / "jobs" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(job), encoding="utf-8")
    ended = run(torchrun(ranks, module, str(path)), settings.folder / "logs" / f"{name}.log", deadline_s, environment)
    if ended.code != 0:
        print(f"== the end of {name}\n{ended.tail}", flush=True)
    return ended


def read_job(argument: str) -> dict[str, Any]:
    """A rank's job."""
    return json.loads(Path(argument).read_text(encoding="utf-8"))


def last_error(ended: Ended) -> str:
    """What the first rank that raised said last, or how it ended."""
    errors = [line.split("]: ", 1)[-1] for line in ended.tail.splitlines() if "Error: " in line or "Error(" in line]
    return errors[0] if errors else f"exit code {ended.code}"
