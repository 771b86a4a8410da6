"""Measure the cost of gathering weights from their shards: ``named_weights`` and mcore-bridge's ``export_weights``.

    python scripts/bench_weights.py                      # on a CPU: about 100 MB in fp32
    python scripts/bench_weights.py --platform cuda      # about 1.3 GB in bf16, which stay on the devices; as many layouts as fit

One process, TP2, PP2 and EP2, a random model; the receiver is the main rank, then every rank. Tensors are dropped on arrival.
For every rank: bytes received from other ranks (of a whole tensor for a broadcast, of the others' shards
for a gather), peak allocated memory, and seconds (median of three). The table has sums over ranks for bytes, the
largest rank for memory, and the slowest for time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megascend
from megascend import Parallel
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 6144, "head_dim": 128}
ON_CUDA = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 12,
    "vocab_size": 32768,
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
LAYOUTS = {
    "one process": (1, Parallel(), "qwen3", {}),
    "TP2": (2, Parallel(tensor=2), "qwen3", {}),
    "PP2": (2, Parallel(pipeline=2), "qwen3", {}),
    "EP2": (2, Parallel(expert=2), "qwen3_moe", {"moe_intermediate_size": 512}),
}
TIMES = 3


class Live(TorchDispatchMode):
    """``peak``: the most bytes alive at once of what operations under it have allocated."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self.now = self.peak = 0

    def exclude(self, tensors: list[torch.Tensor]) -> None:
        """Exclude the storage of tensors that exist already."""
        # Kept alive, since the set holds weak references.
        self._excluded = [tensor.untyped_storage() for tensor in tensors]
        self._seen.update(self._excluded)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if storage not in self._seen:
                    self._seen.add(storage)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _free(self, size: int) -> None:
        self.now -= size


@contextmanager
def counted(received: list[int]) -> Iterator[None]:
    """Add what this rank receives in tensors of torch.distributed to ``received[0]``."""
    originals = {name: getattr(dist, name) for name in ("broadcast", "all_gather", "all_gather_into_tensor", "irecv")}

    def broadcast(tensor: torch.Tensor, src: int = 0, **options: Any) -> Any:
        received[0] += tensor.nbytes if src != dist.get_rank() else 0
        return originals["broadcast"](tensor, src=src, **options)

    def all_gather(output: list[torch.Tensor], tensor: torch.Tensor, **options: Any) -> Any:
        received[0] += tensor.nbytes * (len(output) - 1)
        return originals["all_gather"](output, tensor, **options)

    def all_gather_into_tensor(output: torch.Tensor, tensor: torch.Tensor, **options: Any) -> Any:
        received[0] += output.nbytes - tensor.nbytes
        return originals["all_gather_into_tensor"](output, tensor, **options)

    def exchange(operations: list[dist.P2POp]) -> Any:
        received[0] += sum(entry.tensor.nbytes for entry in operations if entry.op is originals["irecv"])
        return batch(operations)

    batch = dist.batch_isend_irecv
    dist.broadcast, dist.all_gather = broadcast, all_gather
    dist.all_gather_into_tensor, dist.batch_isend_irecv = all_gather_into_tensor, exchange
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
        dist.batch_isend_irecv = batch


def measure(make: Callable[[], Any], engine: Any) -> tuple[int, int, float]:
    """(bytes received, peak bytes, seconds) of this rank."""

    def consume() -> float:
        dist.barrier()
        start = time.perf_counter()
        for _, tensor in make():
            del tensor
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter() - start

    received, live = [0], Live()
    live.exclude([tensor for chunk in engine.bare_chunks for tensor in (*chunk.parameters(), *chunk.buffers())])
    with counted(received), live:
        consume()
    return received[0], live.peak, statistics.median(consume() for _ in range(TIMES))


def on_rank(checkpoint: Path, parallel: Parallel, platform: str) -> dict[str, tuple[int, int, float]]:
    from megascend.backends import MegatronBackend

    megascend.bootstrap(platform).load_megatron()
    precision = "fp32" if platform == "cpu" else "bf16"
    engine: Any = MegatronBackend(checkpoint, parallel, precision=precision, platform=platform, self_check=False).engine
    device = "cpu" if platform == "cpu" else f"cuda:{torch.cuda.current_device()}"

    def upstream(main: bool) -> Any:
        return engine.config.bridge.export_weights(
            list(engine.bare_chunks), target_device=device, only_master_rank=main, disable_tqdm=True, _is_saving=True
        )

    return {
        "main rank, export_weights": measure(lambda: upstream(True), engine),
        "main rank, named_weights": measure(lambda: engine.named_weights(receivers="main", device=device), engine),
        "all ranks, export_weights": measure(lambda: upstream(False), engine),
        "all ranks, named_weights": measure(lambda: engine.named_weights(device=device), engine),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu")
    platform = parser.parse_args().platform
    common = SIZES if platform == "cpu" else ON_CUDA
    if platform == "cpu":
        megascend.bootstrap(platform).load_megatron()  # once; a GPU must not be in use when ranks are forked
    print(
        "| layout | receivers, function | model MB | received MB, all ranks | peak MB, rank 0 | peak MB, others | seconds |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, (world_size, parallel, arch, sizes) in LAYOUTS.items():
            if platform == "cuda" and world_size > torch.cuda.device_count():
                print(f"{name}: {world_size} devices are needed, and there are {torch.cuda.device_count()}")
                continue
            checkpoint = case_checkpoint(Path(folder), arch, **common, **sizes)
            size = (checkpoint / "model.safetensors").stat().st_size / 1e6
            ranks = run_distributed(on_rank, world_size, checkpoint, parallel, platform, init=False, timeout_s=280)
            for stage in ranks[0]:
                received, peaks, seconds = zip(*(rank[stage] for rank in ranks), strict=True)
                other_peaks = f"{max(peaks[1:]) / 1e6:.1f}" if world_size > 1 else ""
                print(
                    f"| {name} | {stage} | {size:.0f} | {sum(received) / 1e6:.1f} | {peaks[0] / 1e6:.1f} | {other_peaks} "
                    f"| {max(seconds):.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
