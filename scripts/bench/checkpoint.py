"""Measure how long a checkpoint stalls training, and how fast it is written and read compared with the disk.

    python scripts/bench.py checkpoint                                 # Qwen3-1.7B shapes, one GPU
    python scripts/bench.py checkpoint --size small --platform cpu     # 0.1 billion parameters, on a CPU
    torchrun --nproc-per-node 2 scripts/bench.py checkpoint            # several ranks: figures are rank 0's

One process trains the whole model with AdamW and saves it in turn

    sync     ``save(wait=True)``: training stalls until the checkpoint is complete
    async    ``save()``: training stalls for the copy off the device and continues while the checkpoint is written

Optimizer steps are timed with the device idle before and after, both undisturbed and while a checkpoint is being
written. The disk is measured in the same directory by writing and reading one plain file, and by writing as much to 8 files
at once, fsync included; before anything is read, the file's pages are dropped from the page cache. The table is printed last.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.train import QWEN3_1_7B, TINY, Work, versions, write_checkpoint

SMALL = {**TINY, "vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 10}
SMALL |= {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 64}
SIZES = {"1.7b": QWEN3_1_7B, "small": SMALL, "tiny": TINY}
BLOCK = 2**24
THREADS = 8
PLAIN = 8 * 2**30
"""Bytes of the plain file, unless the checkpoint is smaller; its times are reported for the checkpoint's size."""


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that ``function`` takes, and what it returns."""
    start = time.perf_counter()
    value = function()
    return time.perf_counter() - start, value


def write_file(path: Path, size: int) -> None:
    """Write ``size`` random bytes (a repeated block), and have them on the disk."""
    block = os.urandom(BLOCK)
    with path.open("wb") as file:
        for _ in range(-(-size // BLOCK)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def write_files(folder: Path, size: int) -> float:
    """Seconds to have ``size`` random bytes on the disk, by threads, a file each."""
    content = os.urandom(min(BLOCK, size))

    def share(number: int) -> None:
        with (folder / f"plain-{number}").open("wb") as file:
            for _ in range(max(1, round(size / len(content) / THREADS))):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())

    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(share, range(THREADS)))
    seconds = time.perf_counter() - start
    files = [folder / f"plain-{number}" for number in range(THREADS)]
    seconds *= size / sum(path.stat().st_size for path in files)
    for path in files:
        path.unlink()
    return seconds


def read_file(path: Path) -> None:
    """Read a file to its end."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(BLOCK)
        while file.readinto(buffer):
            pass


def drop_pages(path: Path) -> None:
    """Forget what the page cache has of a file, or of all files under a directory."""
    for file in [path] if path.is_file() else [entry for entry in path.rglob("*") if entry.is_file()]:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def size_of(path: Path) -> int:
    """Bytes of all files under a directory."""
    return sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())


class Bench:
    """A backend, and something to train it on."""

    def __init__(self, work: Work, model: Path) -> None:
        import torch

        import megascend

        self.backend = megascend.MegatronBackend(
            model=model,
            precision=work.precision,  # type: ignore[arg-type]
            optimizer=megascend.Adam(lr=work.lr),
            batching=megascend.Batching(micro_batch_tokens=work.length),
            platform=work.platform,  # type: ignore[arg-type]
        )
        generator = torch.Generator().manual_seed(work.seed)
        tokens = [torch.randint(0, 256, (work.length,), generator=generator).tolist() for _ in range(work.sequences)]
        self.samples = [megascend.Sample.causal(ids) for ids in tokens]

    def step(self) -> float:
        """Run one optimizer step; return its seconds, device included."""

        def run() -> None:
            self.backend.forward_backward(self.backend.shard(self.samples))
            self.backend.optimizer_step()
            self.backend.platform.synchronize()

        return timed(run)[0]

    def measure(self, folder: Path, saves: int, syncs: int) -> dict[str, Any]:
        """Measure all figures, in seconds and bytes; print each at once, as a run on a rented machine may be cut short."""
        figures: dict[str, Any] = {}
        self.backend.prepare_saves()
        self.step()
        figures["step_s"] = show("step", statistics.median(self.step() for _ in range(5)))
        figures |= {"async_stall_s": [], "async_complete_s": [], "step_beside_s": []}
        for number in range(saves):
            path = folder / f"async-{number % 2}"
            start = time.perf_counter()
            stall, pending = timed(lambda path=path: self.backend.save(path))
            figures["async_stall_s"].append(show("async stall", stall))
            while self.backend.any_rank(not pending.done)[0]:
                figures["step_beside_s"].append(self.step())
            pending.wait()
            figures["async_complete_s"].append(show("async complete", time.perf_counter() - start))
            shutil.rmtree(folder / f"async-{1 - number % 2}", ignore_errors=True)
        for path in folder.glob("async-*"):
            shutil.rmtree(path)
        figures["sync_s"] = [
            show("sync", timed(lambda: self.backend.save(folder / "sync", wait=True))[0]) for _ in range(syncs)
        ]
        figures["bytes"] = size = size_of(folder / "sync")
        drop_pages(folder / "sync")
        figures["load_s"] = show("load", timed(lambda: self.backend.load(folder / "sync"))[0])
        shutil.rmtree(folder / "sync")
        plain = min(size, PLAIN)
        figures["disk_write_s"] = show(
            "disk write", timed(lambda: write_file(folder / "plain", plain))[0] * size / plain
        )
        figures["disk_writes_s"] = show(f"disk write, {THREADS} files", write_files(folder, plain) * size / plain)
        drop_pages(folder / "plain")
        figures["disk_read_s"] = show("disk read", timed(lambda: read_file(folder / "plain"))[0] * size / plain)
        return figures


def show(label: str, seconds: float) -> float:
    """Print ``seconds`` and return them."""
    print(f"{label}: {seconds:.3f} s", file=sys.stderr, flush=True)
    return seconds


def table(figures: dict[str, Any]) -> str:
    """Format the figures as text."""
    gib = figures["bytes"] / 2**30
    first, *later = figures["async_stall_s"]
    stall, sync = min(later or [first]), min(figures["sync_s"])
    speed = lambda seconds: f"{seconds:8.3f} s  {gib / seconds:6.2f} GiB/s"  # noqa: E731
    step_during_save = statistics.median(figures["step_beside_s"]) if figures["step_beside_s"] else None
    lines = [
        f"checkpoint                  {gib:8.2f} GiB",
        f"sync: training stands still {speed(sync)}",
        f"async: stands still, first  {speed(first)}   {first / sync:.3f} of sync",
        f"async: stands still, later  {speed(stall)}   {stall / sync:.3f} of sync",
        f"async: complete after       {speed(min(figures['async_complete_s']))}",
        f"load, digests verified      {speed(figures['load_s'])}",
        f"disk: plain file written    {speed(figures['disk_write_s'])}",
        f"disk: {THREADS} files at once       {speed(figures['disk_writes_s'])}",
        f"disk: plain file read       {speed(figures['disk_read_s'])}",
        f"step, nothing beside        {figures['step_s'] * 1e3:8.1f} ms",
        f"step, while writing         {step_during_save * 1e3:8.1f} ms"
        if step_during_save
        else "step, while writing         none was in time",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1.7b")
    parser.add_argument("--platform", choices=("cuda", "cpu", "npu"), default="cuda")
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="default: bf16, on a CPU fp32")
    parser.add_argument("--saves", type=int, default=4, help="asynchronous saves")
    parser.add_argument("--syncs", type=int, default=2, help="synchronous saves")
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary directory")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()

    precision = options.precision or ("fp32" if options.platform == "cpu" else "bf16")
    length, sequences = (4096, 4) if options.size == "1.7b" else (128, 4)
    work = Work(SIZES[options.size], options.platform, precision, sequences, length, 1, 5, 1e-5, 1234)
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ and options.folder is None:
        sys.exit("several ranks need one directory that all of them see: --folder")
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.folder) as temporary:
        folder = options.folder if "RANK" in os.environ else Path(temporary)
        model = folder / "model"
        index = model / "model.safetensors.index.json"  # written last
        if rank == 0 and not index.is_file():
            model.mkdir(exist_ok=True)
            write_checkpoint(work, model)
        while not index.is_file():
            time.sleep(0.5)
        bench = Bench(work, model)
        figures = bench.measure(folder, options.saves, options.syncs)
        bench.backend.close()
    if rank == 0:
        if options.json:
            options.json.write_text(json.dumps(figures | {"versions": versions()}, indent=1))
        print(f"{options.size}, {precision}, {options.platform}")
        print(table(figures))


if __name__ == "__main__":
    main()
