"""Measure loading and exporting the weights of a Hugging Face directory, compared with the disk's speed for the same bytes.

    python scripts/bench.py files load                          # Qwen3-4B shapes, one GPU
    python scripts/bench.py files export --folder /data         # on this disk; default: the system's temporary directory
    python scripts/bench.py files load --tiny --platform cpu    # checks the script, not speed

``load``, each method in a separate process that has imported everything before the clock starts, with a cold page cache:

    reads            the files by 8 threads, bypassing the page cache if the file system can; at the beginning and at the end
    MegatronBackend  its loading: parameters filled with NaN, read, checked for NaN and for unexpected tensors
    mcore-bridge     ``bridge.load_weights`` into its Megatron model on the device, nothing else
    transformers     ``from_pretrained`` onto the device, including model creation (on the meta device)

``export``:

    writes           the same number of bytes by 8 threads, one file each, fsync included
    export           ``MegatronBackend.export_hf``, and fsync of its files

The first method of each list is the reference for the others. Seconds; smaller is better.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.checkpoint import BLOCK, THREADS, drop_pages, size_of, write_files
from bench.train import QWEN3_1_7B, TINY, Work, build_bridge_model, environment, versions, write_checkpoint

QWEN3_4B = {
    **QWEN3_1_7B, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
}  # fmt: skip
WAYS = {
    "load": ("reads", "MegatronBackend", "mcore-bridge", "transformers", "reads"),
    "export": ("writes", "export", "writes"),
}


def blocks(sizes: dict[Path, int]) -> list[tuple[Path, int]]:
    """(file, offset) of every block."""
    return [(path, offset) for path, size in sizes.items() for offset in range(0, size, BLOCK)]


def reads(folder: Path) -> float:
    """Seconds for all bytes of the files, by threads."""
    paths = sorted(folder.glob("*.safetensors"))
    descriptors = {path: opened(path) for path in paths}
    buffers = [mmap.mmap(-1, BLOCK) for _ in range(THREADS)]  # of whole pages, as O_DIRECT wants them

    def share(number: int) -> None:
        for path, offset in blocks({path: path.stat().st_size for path in paths})[number::THREADS]:
            os.preadv(descriptors[path], [buffers[number]], offset)

    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(share, range(THREADS)))
    seconds = time.perf_counter() - start
    for descriptor in descriptors.values():
        os.close(descriptor)
    return seconds


def opened(path: Path) -> int:
    """Open a file past the page cache where the file system can; its pages have been dropped in any case."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDONLY)


def megatron_backend(work: Work, model: Path) -> Any:
    import megascend

    precision: Any = work.precision
    platform: Any = work.platform
    return megascend.MegatronBackend(model, precision=precision, platform=platform, self_check=False)


def load_by_backend(work: Work, model: Path, synchronize: Callable[[], None]) -> float:
    import megascend

    megascend.bootstrap(work.platform).load_megatron()
    from megascend.engines.megatron import weights

    seconds, load = [], weights.load

    def timed(*arguments: Any) -> None:
        drop_pages(model)  # building the model has read headers only, but of any file
        synchronize()
        start = time.perf_counter()
        load(*arguments)
        synchronize()
        seconds.append(time.perf_counter() - start)

    with patch.object(weights, "load", timed):
        megatron_backend(work, model).close()
    return seconds[0]


def load_by_bridge(work: Work, model: Path, synchronize: Callable[[], None]) -> float:
    """Megatron's groups, mcore-bridge's model, and its loader; the bare loop of bench_train reads a model this way."""
    import torch

    if work.platform == "cpu":
        import megascend

        megascend.bootstrap("cpu").load_megatron()
    import megatron.core.parallel_state as mpu
    import torch.distributed as dist
    from mcore_bridge.bridge import gpt_bridge
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    dist.init_process_group("nccl" if work.platform == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel()
    model_parallel_cuda_manual_seed(work.seed)
    seconds, load = [], gpt_bridge.GPTBridge.load_weights

    def timed(*arguments: Any, **options: Any) -> None:
        drop_pages(model)
        synchronize()
        start = time.perf_counter()
        load(*arguments, **options)
        synchronize()
        seconds.append(time.perf_counter() - start)

    dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
    with patch.object(gpt_bridge.GPTBridge, "load_weights", timed):
        build_bridge_model(model, bf16=work.precision == "bf16", params_dtype=dtype)
    return seconds[0]


def load_by_transformers(work: Work, model: Path, synchronize: Callable[[], None]) -> float:
    import torch
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    placement: dict[str, Any] = {"device_map": {"": 0}} if work.platform == "cuda" else {}
    dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
    torch.zeros(1, device="cuda" if placement else "cpu")  # the device's context
    drop_pages(model)
    start = time.perf_counter()
    Qwen3ForCausalLM.from_pretrained(model, dtype=dtype, **placement)
    synchronize()
    return time.perf_counter() - start


def export(work: Work, model: Path, synchronize: Callable[[], None]) -> float:
    backend = megatron_backend(work, model)
    target = model.parent / "exported"
    synchronize()
    start = time.perf_counter()
    backend.export_hf(target)
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    backend.close()
    same = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    if abs(same - size_of_weights(model)) > 2**20:
        raise SystemExit(f"export: {same} bytes, the model has {size_of_weights(model)}")
    return seconds


def size_of_weights(model: Path) -> int:
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def execute(method: str, work: Work, model: Path) -> float:
    """Run one method in this process; return its seconds."""
    if method == "reads":
        return reads(model)
    if method == "writes":
        return write_files(model.parent, size_of_weights(model))
    if method == "model":
        write_checkpoint(work, model)
        for path in model.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # pages that are not on the disk yet cannot be dropped
        return 0.0
    import torch

    synchronize = torch.cuda.synchronize if work.platform == "cuda" else lambda: None
    ways: dict[str, Callable[[Work, Path, Callable[[], None]], float]] = {
        "MegatronBackend": load_by_backend,
        "mcore-bridge": load_by_bridge,
        "transformers": load_by_transformers,
        "export": export,
    }
    return ways[method](work, model, synchronize)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WAYS)
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--folder", type=Path, help="where files are; default: the system's temporary directory")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--execute", nargs=3, metavar=("WAY", "MODEL", "RESULT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = dict(TINY if arguments.tiny else QWEN3_4B)
    if arguments.layers:
        shape["num_hidden_layers"] = arguments.layers
    work = Work(shape, arguments.platform, "bf16", 0, 0, 0, 0, 1e-5, 1234)
    if arguments.execute:
        method, model, result = arguments.execute
        Path(result).write_text(json.dumps(execute(method, work, Path(model))))
        return 0
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-files-", dir=arguments.folder) as folder:
        model, result = Path(folder) / "model", Path(folder) / "seconds.json"
        model.mkdir()
        for method in ("model", *WAYS[arguments.what]):
            if method != "model":
                drop_pages(model)
            command = [sys.executable, __file__, *sys.argv[1:], "--execute", method, str(model), str(result)]
            subprocess.run(command, check=True, env=environment())
            if method != "model":
                seconds.setdefault(method, []).append(json.loads(result.read_text()))
                print(f"{method}: {seconds[method][-1]:.3f} s", flush=True)
        size = size_of(model)
    for method, times in seconds.items():
        print(f"{method:<16} {min(times):8.3f} s  {size / min(times) / 2**30:6.2f} GiB/s of {size / 2**30:.2f} GiB")
    if arguments.json:
        arguments.json.write_text(json.dumps({"versions": versions(), "bytes": size, "seconds": seconds}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
