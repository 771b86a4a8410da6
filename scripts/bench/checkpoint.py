"""Measure how long a checkpoint stalls training, and how fast it is written and read compared with the disk.

    python scripts/bench.py checkpoint                                 # Qwen3-1.7B shapes, one GPU
    python scripts/bench.py checkpoint --model small --platform cpu    # 0.1 billion parameters, on a CPU
    torchrun --nproc-per-node 2 scripts/bench.py checkpoint --folder SHARED    # several ranks: figures are rank 0's

One process trains the whole model with AdamW and saves it in turn

    sync     ``save(wait=True)``: training stalls until the checkpoint is complete
    async    ``save()``: training stalls for the copy off the device and continues while the checkpoint is written

Optimizer steps are timed with the device idle before and after, both undisturbed and while a checkpoint is being
written. The disk is measured in the same directory by writing and reading one plain file, and by writing as much to 8 files
at once, fsync included; before anything is read, the file's pages are dropped from the page cache. The table is printed last.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.disk import drop_pages, read_file, size_of, write_file, write_files
from bench.models import add_model, samples, shape_of, write_checkpoint
from bench.runner import timed

COMMON = ("platform", "tiny", "seed")
DEFAULTS = {"model": "1.7b", "length": 4096}
TINY = {"model": "tiny", "length": 128}
PLAIN = 8 * 2**30
"""Bytes of the plain file, unless the checkpoint is smaller; its times are reported for the checkpoint's size."""


def seconds(run: Callable[[], Any]) -> float:
    return timed(run)[0] / 1000


def measure(backend: Any, batch: list[Any], folder: Path, saves: int, syncs: int) -> dict[str, Any]:
    """Measure all figures, in seconds and bytes; print each at once, as a run on a rented machine may be cut short."""

    def train() -> None:
        backend.forward_backward(backend.shard(batch))
        backend.optimizer_step()
        backend.platform.synchronize()

    figures: dict[str, Any] = {}
    backend.prepare_saves()
    train()
    figures["step_s"] = show("step", statistics.median(seconds(train) for _ in range(5)))
    figures |= {"async_stall_s": [], "async_complete_s": [], "step_beside_s": []}
    for number in range(saves):
        path = folder / f"async-{number % 2}"
        start = time.perf_counter()
        stall, pending = timed(lambda path=path: backend.save(path))
        figures["async_stall_s"].append(show("async stall", stall / 1000))
        while backend.any_rank(not pending.done)[0]:
            figures["step_beside_s"].append(seconds(train))
        pending.wait()
        figures["async_complete_s"].append(show("async complete", time.perf_counter() - start))
        shutil.rmtree(folder / f"async-{1 - number % 2}", ignore_errors=True)
    for path in folder.glob("async-*"):
        shutil.rmtree(path)
    saved = folder / "sync"
    figures["sync_s"] = [show("sync", seconds(lambda: backend.save(saved, wait=True))) for _ in range(syncs)]
    figures["bytes"] = size = size_of(saved)
    drop_pages(saved)
    figures["load_s"] = show("load", seconds(lambda: backend.load(saved)))
    shutil.rmtree(saved)
    plain, file = min(size, PLAIN), folder / "plain"
    figures["disk_write_s"] = show("disk write", seconds(lambda: write_file(file, plain)) * size / plain)
    figures["disk_writes_s"] = show("disk write, 8 files", write_files(folder, plain) * size / plain)
    drop_pages(file)
    figures["disk_read_s"] = show("disk read", seconds(lambda: read_file(file)) * size / plain)
    return figures


def show(label: str, value: float) -> float:
    """Print seconds and return them."""
    print(f"{label}: {value:.3f} s", file=sys.stderr, flush=True)
    return value


def report(figures: dict[str, Any]) -> None:
    """Print the table."""
    gib = figures["bytes"] / 2**30
    first, *later = figures["async_stall_s"]
    beside = figures["step_beside_s"]
    print(f"checkpoint {gib:.2f} GiB")
    for name, value in (
        ("sync: training stands still", min(figures["sync_s"])),
        ("async: stands still, first", first),
        ("async: stands still, later", min(later or [first])),
        ("async: complete after", min(figures["async_complete_s"])),
        ("load, digests verified", figures["load_s"]),
        ("disk: plain file written", figures["disk_write_s"]),
        ("disk: 8 files at once", figures["disk_writes_s"]),
        ("disk: plain file read", figures["disk_read_s"]),
    ):
        print(f"{name:<28} {value:8.3f} s  {gib / value:6.2f} GiB/s")
    print(f"{'step, nothing beside':<28} {figures['step_s'] * 1e3:8.1f} ms")
    print(f"{'step, while writing':<28} {statistics.median(beside) * 1e3 if beside else float('nan'):8.1f} ms")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--length", type=int, help="tokens of each of four sequences a step; default: 4096, tiny: 128")
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="default: bf16, on a CPU fp32")
    parser.add_argument("--saves", type=int, default=4, help="asynchronous saves")
    parser.add_argument("--syncs", type=int, default=2, help="synchronous saves")
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary directory")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    import megascend

    precision: Any = options.precision or ("fp32" if options.platform == "cpu" else "bf16")
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ and options.folder is None:
        raise SystemExit("several ranks need one directory that all of them see: --folder")
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.folder) as temporary:
        folder = options.folder if "RANK" in os.environ else Path(temporary)
        model, complete = folder / "model", folder / "complete"
        if rank == 0 and not complete.exists():
            write_checkpoint(shape_of(options), model, precision=precision, seed=options.seed)
            complete.touch()
        while not complete.exists():
            time.sleep(0.5)
        with megascend.MegatronBackend(
            model=model,
            precision=precision,
            optimizer=megascend.Adam(lr=1e-5),
            batching=megascend.Batching(micro_batch_tokens=options.length),
            platform=options.platform,
        ) as backend:
            batch = samples(4, options.length, 256, options.seed)
            figures = measure(backend, batch, folder, options.saves, options.syncs)
    if rank == 0:
        report(figures)
    return figures, True
