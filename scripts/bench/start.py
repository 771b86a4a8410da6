"""Measure start-up: seconds of ``MegatronBackend(...)``, and of ``megascend train`` to its first step.

    python scripts/bench.py start                      # one GPU
    python scripts/bench.py start --platform cpu

The model has 45 thousand parameters, so that reading and computing are negligible. Each runs in a new process, in order:

    imports       of a program that builds a ``MegatronBackend``: the start of Python, and the time within imports
    ready         the time of ``MegatronBackend(...)`` without imports
    first step    from starting ``megascend train`` until its first line of metrics.jsonl; and until the program ends
    torchrun      the same as one rank under torchrun
    phases        of each of these, from its events.jsonl: wall and processor seconds; ``leaving`` is the time after the last
                  event

An untimed first run lets Python store the bytecode of its imports, as pip does on installation: without it
(``pip install --no-compile``, PYTHONDONTWRITEBYTECODE) each start compiles peft, Megatron-Core, mcore-bridge and megascend.

``MEGASCEND_CACHE`` stores the self-check's verdict on the model between runs; here it is recomputed each time, as in a user's
first run, and ``kept`` is ``megascend train`` with the verdict of the previous run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.runner import environment

COMMON = ("platform",)

READY = """
import builtins, importlib, json, sys, time
began = float(sys.argv[3])
spent, depth = 0.0, 0

def timed(original):
    def call(*arguments, **options):
        global spent, depth
        depth, start = depth + 1, time.time()
        try:
            return original(*arguments, **options)
        finally:
            depth -= 1
            if depth == 0:
                spent += time.time() - start
    return call

builtins.__import__ = timed(builtins.__import__)
importlib.import_module = timed(importlib.import_module)
starting = time.time() - began
import megascend
backend = megascend.MegatronBackend(sys.argv[1], platform=sys.argv[2])
whole = time.time() - began
print(json.dumps({"imports_s": starting + spent, "ready_s": whole - starting - spent}))
backend.close()
"""
"""A program as users write it. Work during an import counts as import time, even inside the constructor."""

DEADLINE_S = 300.0
"""Deadline of each program."""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--no-python", sys.executable]


def ready(model: Path, platform: str, env: dict[str, str]) -> dict[str, float]:
    """Return ``imports_s`` and ``ready_s``."""
    command = [sys.executable, "-c", READY, str(model), platform, str(time.time())]
    completed = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE_S)
    return json.loads(completed.stdout.splitlines()[-1])


def first_step(launcher: list[str], config: Path, output: Path, env: dict[str, str]) -> tuple[float, float]:
    """Return the seconds to the first step and to the end of the program."""
    command = [sys.executable, *launcher, "-m", "megascend", "train", str(config), "--set", f"output={output}"]
    metrics, first = output / "metrics.jsonl", None
    start = time.perf_counter()
    process = subprocess.Popen(command, env=env, stdout=sys.stderr)
    try:
        while process.poll() is None and time.perf_counter() - start < DEADLINE_S:
            if first is None and metrics.is_file() and "\n" in metrics.read_text():
                first = time.perf_counter() - start
            time.sleep(0.02)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
    if process.returncode != 0 or first is None:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}, first step after {first} s")
    return first, time.perf_counter() - start


def phases(output: Path, ended: float) -> list[tuple[str, float, float | None]]:
    """Return (phase, seconds, processor seconds) of the run in ``output``, whose program ended at ``ended`` (time.time())."""
    events = {event["event"]: event for event in map(json.loads, (output / "events.jsonl").read_text().splitlines())}
    start, finished = events["first_step"], events["finished"]
    startup = [(name, seconds, start["processor_s"][name]) for name, seconds in start["seconds"].items()]
    return [
        *startup,
        ("other steps, export, plot", finished["time"] - start["time"], None),
        ("leaving", ended - finished["time"], None),
    ]


def run(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    figures: dict[str, Any] = {"cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(prefix="bench-start-") as temporary:
        folder = Path(temporary)
        env = environment() | {"MEGASCEND_CACHE": str(folder / "cache-ready")}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        env["TRITON_CACHE_DIR"] = str(folder / "triton")  # the first run's kernels are new, whatever ran here before
        model, config = folder / "model", folder / "run.yaml"
        make = [sys.executable, "-m", "megascend", "new-model", str(model), "--hidden", "32", "--layers", "2"]
        subprocess.run(make, env=env, stdout=sys.stderr, check=True, timeout=DEADLINE_S)
        line = {"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]}
        (folder / "chat.jsonl").write_text(16 * (json.dumps(line) + "\n"))
        data = f"data: {{path: {folder / 'chat.jsonl'}, global_batch_size: 4}}"
        config.write_text(f"model: {model}\noutput: out\nsteps: 2\nplatform: {options.platform}\n{data}\n")
        ready(model, options.platform, env)
        show(figures, ready(model, options.platform, env | {"MEGASCEND_CACHE": str(folder / "cache-again")}))
        ways = {"first_step": ([], "new"), "kept": ([], "new"), "torchrun": (TORCHRUN, "other")}
        for mode, (launcher, cache) in ways.items():
            mode_env = env | {"MEGASCEND_CACHE": str(folder / f"cache-{cache}")}
            step_times = first_step(launcher, config, folder / mode, mode_env)
            ended = time.time()
            show(figures, {f"{mode}_s": step_times[0], f"{mode}_end_s": step_times[1]})
            for name, seconds, processor in phases(folder / mode, ended):
                figures[f"{mode}: {name}"] = seconds
                used = "" if processor is None else f", {processor:.2f} of the processors"
                print(f"    {name:<26} {seconds:7.2f}{used}", flush=True)
    return figures, True


def show(figures: dict[str, Any], measured: dict[str, float]) -> None:
    """Record and print results at once: a later part may exceed the caller's deadline."""
    figures |= measured
    for name, seconds in measured.items():
        print(f"{name:<18} {seconds:7.2f}", flush=True)
