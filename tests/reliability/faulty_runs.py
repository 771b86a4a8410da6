"""Runs of any engine in which a rank dies, stops or hangs, and the errors of the others.

    python faulty_runs.py JOB RESULT

As a program for engines that must run in a process without Megatron: JOB is a ``torch.save`` file with a list of arguments of
:func:`run`, RESULT one with its results.
"""

from __future__ import annotations

import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import megascend
from megascend.errors import MegascendError
from megascend.runtime.diagnostics.watchdog import EXIT_PEER_LOST
from megascend.testing import Lost, faults, run_distributed
from megascend.testing.parity import causal_samples

TIMEOUT_S = 4.0
LONG_TIMEOUT_S = 40.0  # for deaths, which must be detected before it
DEADLINE_S = 180.0
KILLED = {"die": Lost(-signal.SIGKILL), "stop": Lost(None), "hang": Lost(None)}

Caught = tuple[type[MegascendError] | None, str, float]


def caught(work: Callable[[list[float]], None]) -> Caught:
    """Return (class, message, seconds since ``start[0]``) of the error that ``work(start)`` raises."""
    start = [time.monotonic()]
    try:
        work(start)
    except MegascendError as error:
        return type(error), str(error), time.monotonic() - start[0]
    return None, "", time.monotonic() - start[0]


def timeout_of(fault: faults.Fault) -> float:
    """Return the run's timeout: a closed connection is detected long before it, a stopped or hung rank by it."""
    return LONG_TIMEOUT_S if fault.action == "die" and fault.phase != "start-up" else TIMEOUT_S


def make(engine: str, checkpoint: Path, timeout_s: float = TIMEOUT_S, **settings: Any) -> megascend.Backend:
    return megascend.make_backend(
        engine, model=checkpoint, precision="fp32", platform="cpu", timeout_s=timeout_s, **settings
    )


def train(engine: str, checkpoint: Path, timeout_s: float, settings: dict[str, Any]) -> Caught:
    """Take three steps."""

    def steps(start: list[float]) -> None:
        backend = make(engine, checkpoint, timeout_s, **settings)
        samples = causal_samples([list(range(1, 9))])
        for _ in range(3):
            start[0] = time.monotonic()
            backend.forward_backward(samples)
            backend.optimizer_step()
        backend.close()

    return caught(steps)


def save(engine: str, checkpoint: Path, folder: Path) -> Caught:
    """Take three steps, with a checkpoint after each."""

    def steps(start: list[float]) -> None:
        samples = causal_samples([list(range(1, 9))])
        with make(engine, checkpoint, save_timeout_s=TIMEOUT_S) as backend:
            for step in range(1, 4):
                backend.forward_backward(samples)
                backend.optimizer_step()
                start[0] = time.monotonic()
                backend.save(folder / str(step), wait=step == 1)

    return caught(steps)


def run(fault: faults.Fault, world: int, work: Callable[..., Caught], *arguments: Any) -> dict[int, Caught]:
    """Return the errors of the surviving ranks, by rank."""
    with faults.inject(fault):
        results = run_distributed(work, world, *arguments, init=False, timeout_s=DEADLINE_S, expect_lost={fault.rank})
    ends = [KILLED[fault.action]]
    if fault.action == "hang":  # on a busy machine, its own watchdog may notice that the others have ended
        ends.append(Lost(EXIT_PEER_LOST))
    assert results[fault.rank] in ends
    return {rank: result for rank, result in enumerate(results) if rank != fault.rank}


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    import megascend.engines.fsdp.engine
    import megascend.engines.step.step

    jobs = torch.load(sys.argv[1], weights_only=False)
    torch.save([run(fault, world, globals()[name], *args) for fault, world, name, *args in jobs], sys.argv[2])
    assert not [name for name in sys.modules if name.startswith(("megatron", "mcore_bridge"))]
