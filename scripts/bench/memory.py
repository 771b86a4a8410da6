"""Compare the peak memory of training steps with the estimates of ``megascend.models.memory``, on every engine and in layouts.

    python scripts/bench.py memory                             # 0.9 and 1.3 billion parameters on one GPU, torch's peak
    python scripts/bench.py memory --ranks 2                   # the cases that take two GPUs
    python scripts/bench.py memory --platform cpu --case dense --case "fsdp lora"     # small models, bytes of all tensors

Each case of ``support.memory_cases`` trains three steps of a random model; the peak is that of the last two, in which the
optimizer state exists. Of several ranks, the largest counts. Exit code 1: an estimate is outside -5 to +15 % of the peak.

On a CPU the ranks of a case are forks of one process for each engine, and ``support.tensor_memory`` counts. On GPUs every rank is
a process, ``--parallel`` cases run at the same time (each counts its own allocations), and ``torch.cuda.max_memory_allocated``
counts; the memory reserved by the allocator is shown too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.runner import TESTS, command, environment

sys.path.append(TESTS)

from support.memory_cases import CASES, HIGHEST, LOWEST, Estimate, Measured, estimate_of, measure, write_model

COMMON = ("platform",)


def worker(name: str, platform: str, folder: Path) -> None:
    """Run a case in a process of its own: all ranks on a CPU, one on a GPU; rank 0 writes what they measured."""
    import megascend

    case = CASES[name]
    runtime = megascend.bootstrap(platform, engine=case.engine)
    if case.engine == "megatron":
        runtime.load_megatron()
    import megascend.apps.train.loop
    import megascend.backends  # ranks find them imported

    model = folder / case.model
    if platform == "cpu":
        from megascend.testing import run_distributed

        ranks = run_distributed(measure, case.ranks, case, platform, model, init=False)
    else:
        ranks = [measure(case, platform, model)]
        if case.ranks > 1:
            ranks = gathered(ranks[0], case.ranks)
    if int(os.environ.get("RANK", "0")) == 0:
        (folder / f"{name}.json").write_text(json.dumps([asdict(rank) for rank in ranks]))


def gathered(own: Measured, count: int) -> list[Measured]:
    """Return what all ranks have measured, over a group of its own: the backend's have been closed."""
    import torch.distributed as dist

    ranks: list[Any] = [None] * count
    dist.init_process_group("gloo")
    dist.all_gather_object(ranks, own)
    dist.destroy_process_group()
    return ranks


def start(names: list[str], options: argparse.Namespace, folder: Path) -> dict[str, list[Measured]]:
    """Run the processes of cases, and collect what each of their ranks has measured."""
    ranks = CASES[names[0]].ranks if options.platform == "cuda" else 1
    arguments = ["--platform", options.platform, "--worker", str(folder)]
    arguments += [word for name in names for word in ("--case", name)]
    completed = subprocess.run(
        command("memory", arguments, ranks), env=environment(), capture_output=True, text=True, timeout=options.timeout
    )
    if completed.returncode:
        raise SystemExit(f"{names}: exit code {completed.returncode}\n{completed.stderr[-6000:]}")
    return {name: [Measured(**rank) for rank in json.loads((folder / f"{name}.json").read_text())] for name in names}


def report(name: str, expected: Estimate, ranks: list[Measured]) -> bool:
    """Print a row; returns whether the estimate is good enough."""
    largest = max(ranks, key=lambda rank: rank.peak)
    miss = expected.tensors / largest.peak - 1
    good = LOWEST <= miss <= HIGHEST
    items = ", ".join(f"{item} {size / 2**20:.1f}" for item, size in expected.items.items())
    reserved = f"{largest.reserved / 2**20:.1f}" if largest.reserved else "-"
    figures = f"{expected.tensors / 2**20:.1f} | {largest.peak / 2**20:.1f} | {miss:+.1%}{'' if good else ' **'}"
    print(f"| {name} | {figures} | {reserved} | {items} |", flush=True)
    return good


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", action="append", choices=list(CASES), help="only these; may be repeated")
    parser.add_argument("--ranks", type=int, help="only cases of so many ranks; on CUDA 1 unless given")
    parser.add_argument("--parallel", type=int, default=3, help="CUDA: cases at the same time (default: 3)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a process (default: 300)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    on_gpu, names = options.platform == "cuda", options.case or list(CASES)
    if options.worker:
        for name in names:
            worker(name, options.platform, options.worker)
        return {}, True
    ranks = options.ranks or (1 if on_gpu and not options.case else None)
    names = [name for name in names if ranks in (None, CASES[name].ranks)]
    good, rows = True, {}
    with tempfile.TemporaryDirectory(prefix="measure_memory_") as temporary:
        folder = Path(temporary)
        for model in {CASES[name].model for name in names}:
            write_model(model, options.platform, folder / model)
        print("| case | estimate MiB | measured MiB | estimate is off by | reserved MiB | the estimate |")
        print("|---|---|---|---|---|---|")
        # On a CPU the cases of an engine share a process.
        engines = dict.fromkeys(CASES[name].engine for name in names)
        by_engine = [[name for name in names if CASES[name].engine == engine] for engine in engines]
        groups = [[name] for name in names] if on_gpu else by_engine
        with ThreadPoolExecutor(options.parallel if on_gpu else 1) as pool:
            for group in pool.map(lambda group: start(group, options, folder), groups):
                for name, measured in group.items():
                    expected = estimate_of(CASES[name], options.platform, folder / CASES[name].model)
                    good &= report(name, expected, measured)
                    rows[name] = {"items": expected.items, "ranks": [asdict(rank) for rank in measured]}
    print(f"{'every' if good else 'not every'} estimate is within {LOWEST:+.0%} to {HIGHEST:+.0%}")
    return rows, good
