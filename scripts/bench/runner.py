"""Run the suite or one benchmark: what all of them share of options, environment, timing and stored figures.

A benchmark is a module with ``run(options)``, which prints its table and returns (figures, agree): ``agree`` is False if the
variants that it compares did not compute the same, and becomes exit code 1. It may have ``add_options(parser)``, ``COMMON``, the
names of the shared options that it takes, and ``DEFAULTS`` and ``TINY``, values of options without and with ``--tiny``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
TESTS = str(SCRIPTS.parent / "tests")
"""For its package ``support``."""
NAMES = (
    "checkpoint",
    "engine",
    "files",
    "lora",
    "memory",
    "plan",
    "prefixes",
    "rl",
    "serve",
    "small",
    "start",
    "train",
    "trainer_push",
)
PACKAGES = ("torch", "megatron-core", "mcore-bridge", "transformer-engine", "transformers", "triton")
COMMON: dict[str, dict[str, Any]] = {
    "platform": {"choices": ("cuda", "cpu"), "default": "cuda"},
    "tiny": {"action": "store_true", "help": "sizes for a CPU: checks the benchmark, not speed"},
    "warmup": {"type": int, "help": "steps that are not timed"},
    "steps": {"type": int, "help": "steps that are timed"},
    "seed": {"type": int, "default": 1234},
}

DEVICE = """
import json, os, sys
import torch
on_gpu = sys.argv[1] == "cuda"
name = torch.cuda.get_device_name() if on_gpu else "CPU"
memory = torch.cuda.get_device_properties(0).total_memory if on_gpu else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
print(json.dumps([name, memory / 2**30, torch.cuda.device_count() if on_gpu else 8]))
"""


def this_device(platform: str) -> tuple[str, float, int]:
    """Query (name, GiB of memory, devices) in another process: this one holds no device while others measure.

    A CPU counts as eight devices: ranks are processes there.

    Raises:
        SystemExit: the device is not available.
    """
    command = [sys.executable, "-c", DEVICE, platform]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if completed.returncode != 0:
        raise SystemExit(f"--platform {platform}: {completed.stderr.strip().splitlines()[-1]}")
    name, memory_gib, count = json.loads(completed.stdout.splitlines()[-1])
    return name, memory_gib, count


def versions() -> dict[str, str]:
    """Return the versions of packages that affect speed."""
    installed = {
        distribution.metadata["Name"].lower().replace("_", "-"): distribution.version
        for distribution in metadata.distributions()
    }
    return {package: installed.get(package, "none") for package in PACKAGES}


def environment() -> dict[str, str]:
    """Return the environment of every program that is measured."""
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}


def command(name: str, arguments: Sequence[str], ranks: int = 1) -> list[str]:
    """Return the command of a benchmark's own process, or of its ranks under torchrun."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--"] if ranks > 1 else []
    )
    return [sys.executable, *launcher, str(SCRIPTS / "bench.py"), name, *arguments]


def synchronize(platform: str) -> None:
    """Wait for the device."""
    if platform == "cuda":
        import torch

        torch.cuda.synchronize()


def timed(run: Callable[[], Any], platform: str = "cpu") -> tuple[float, Any]:
    """Return the milliseconds of a call, with the device idle before and after, and its result."""
    synchronize(platform)
    start = time.perf_counter()
    result = run()
    synchronize(platform)
    return 1000 * (time.perf_counter() - start), result


def repeated(run: Callable[[], Any], options: argparse.Namespace) -> list[float]:
    """Return the milliseconds of every timed call, after those to warm up."""
    return [timed(run, options.platform)[0] for _ in range(options.warmup + options.steps)][options.warmup :]


def peak_gib(platform: str) -> float:
    """Return the peak of the device's memory in GiB, on a CPU that of the process."""
    if platform == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0].startswith("-"):
        from bench import suite

        suite.end_on_sigterm()
        return suite.main(arguments)
    name, *rest = arguments
    if name not in NAMES:
        raise SystemExit(f"no benchmark {name}: there are {', '.join(NAMES)}")
    bench: Any = import_module(f"bench.{name}")
    options = parse(bench, rest)
    figures, agree = bench.run(options)
    if options.json and os.environ.get("RANK", "0") == "0":
        device = {"device": this_device(options.platform)[0]} if "platform" in options else {}
        write(options.json, {**device, "versions": versions(), **figures})
    return 0 if agree else 1


def parse(bench: Any, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of a benchmark, and fill in the defaults of its size."""
    parser = argparse.ArgumentParser(
        prog=f"bench.py {bench.__name__.rpartition('.')[2]}",
        description=bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in getattr(bench, "COMMON", ()):
        parser.add_argument(f"--{name}", **COMMON[name])
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    if hasattr(bench, "add_options"):
        bench.add_options(parser)
    options = parser.parse_args(arguments)
    options.arguments = list(arguments)
    tiny = getattr(bench, "TINY", {}) if getattr(options, "tiny", False) else {}
    for name, value in (getattr(bench, "DEFAULTS", {}) | tiny).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def write(path: Path, figures: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
