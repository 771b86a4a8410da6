"""Run `megascend rl` asynchronously and in turns, and compare the trainer's idle share and speed.

    python scripts/bench.py rl examples/rl/sort_digits.yaml --steps 20
    python scripts/bench.py rl RUN.yaml --set 'engines=[vllm]' --steps 40 --json figures.json       # engine and trainer on GPUs

Both runs have the same file, model, prompts and seeds; only rollout.max_lag differs: that of the file (or --max-lag) and 0, with
which the engines sample only while the trainer waits. The steps of --warm-up are left out: the first one always waits. Figures:

- idle: share of the time in which the trainer waited for rollouts;
- sync: share of the time in which it updated the engines;
- tokens_per_s: sampled tokens that it learned from;
- step_s: mean duration of a step;
- response_tokens, stale: mean length of the trajectories, and groups that were dropped as too old. Lengths that differ make the
  two runs different work: responses change as the model learns, so compare short runs, or set optimizer.lr to 0.

Nothing is evaluated, saved, exported or drawn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megascend.config.rl import load_rl_config

QUIET = ("evaluation=null", "checkpoint.every=0", "export=false", "plot=false", "rollout.records.every=0")


def rows_of(arguments: argparse.Namespace, max_lag: int, output: Path) -> list[dict[str, Any]]:
    """Run once; return the rows of metrics.jsonl."""
    settings = [*QUIET, *arguments.set, f"steps={arguments.steps}", f"output={output}", f"rollout.max_lag={max_lag}"]
    command = [sys.executable, "-m", "megascend", "rl", str(arguments.config), "--nproc", str(arguments.nproc)]
    # Its own output goes to the terminal's errors: this program's is JSON.
    subprocess.run([*command, *(word for text in settings for word in ("--set", text))], check=True, stdout=sys.stderr)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def figures(rows: Sequence[Mapping[str, Any]], warm_up: int) -> dict[str, float]:
    """Return the figures of the steps after ``warm_up``."""
    before, measured = rows[warm_up - 1], rows[warm_up:]
    seconds = measured[-1]["seconds"] - before["seconds"]
    return {
        "idle": sum(row["wait_s"] for row in measured) / seconds,
        "sync": sum(row["sync_s"] for row in measured) / seconds,
        "tokens_per_s": sum(row["tokens"] for row in measured) / seconds,
        "step_s": seconds / len(measured),
        "response_tokens": statistics.mean(row["response_tokens"] for row in measured),
        "lag": statistics.mean(row["lag"] for row in measured),
        "stale": sum(row["stale"] for row in measured),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="run file of megascend rl")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of megascend rl")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3, help="steps that are not measured")
    parser.add_argument("--max-lag", type=int, help="of the asynchronous run; default: the file's")


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    if not 1 <= arguments.warm_up < arguments.steps:
        raise SystemExit("--warm-up must be 1 or more, and less than --steps")
    max_lag = arguments.max_lag
    if max_lag is None:
        max_lag = load_rl_config(arguments.config, arguments.set).rollout.max_lag
    if max_lag == 0:
        raise SystemExit("max_lag 0 is the run in turns: set --max-lag for the other one")
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, lag in (("asynchronous", max_lag), ("in turns", 0)):
            result[name] = figures(rows_of(arguments, lag, Path(folder) / name), arguments.warm_up)
    result["speed-up"] = result["asynchronous"]["tokens_per_s"] / result["in turns"]["tokens_per_s"]
    print(json.dumps(result, indent=1))
    return result, True
