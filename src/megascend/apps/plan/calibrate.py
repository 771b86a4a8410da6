"""Measure a device for :mod:`megascend.apps.plan.hardware`: products, attention, memory, and links between ranks.

    python -m megascend plan --calibrate FILE
    torchrun --nproc-per-node 2 -m megascend.apps.plan.calibrate FILE     # links too

Needs torch alone; attention is Transformer Engine's where that is installed. Every duration is the device's own: on CUDA a
graph of many calls is replayed between two events, without the host's launches. Operands lie at other addresses in every call,
as weights do in a step, and large products run before, until the device is at the clock that it keeps under load.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

FORMAT = 1
SECOND = 1e6
"""Microseconds; durations in the file are microseconds."""
MIB = 2**20


@dataclass(frozen=True)
class Grid:
    """Sizes that are measured.

    Attributes:
        rows: tokens of a product; ``widths``: its inputs and outputs.
        groups: (experts, rows of each, inputs, outputs) of grouped products.
        attention: (length, query heads, key heads, head dimension of keys, of values).
        memory: bytes that an element-wise operation moves.
        messages: bytes of a collective's larger side on a rank.
        sustained_s: seconds of large products before anything is measured.
        budget_s: device seconds of one measurement.
    """

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    groups: tuple[tuple[int, int, int, int], ...]
    attention: tuple[tuple[int, int, int, int, int], ...]
    memory: tuple[int, ...]
    messages: tuple[int, ...]
    sustained_s: float
    budget_s: float


FULL = Grid(
    rows=(128, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    widths=(256, 512, 1024, 2048, 4096, 6144, 8192, 12288, 16384),
    groups=tuple(
        (experts, rows, inputs, outputs)
        for experts in (4, 8, 16, 32, 128)
        for rows in (64, 128, 256, 512, 1024, 2048, 4096)
        for inputs, outputs in ((2048, 1536), (768, 2048), (4096, 3072), (7168, 4096), (2048, 7168))
        if experts * rows <= 2**17 and experts * inputs * outputs <= 2**30
    ),
    attention=tuple(
        (length, heads, groups, keys, values)
        for length in (512, 1024, 2048, 4096, 8192, 16384, 32768)
        for heads, groups, keys, values in (
            (32, 8, 128, 128),
            (16, 2, 256, 256),
            (8, 1, 128, 128),
            (64, 8, 64, 64),
            (16, 16, 192, 128),
        )
    ),
    memory=tuple(2**power for power in range(16, 32)),
    messages=tuple(2**power for power in range(14, 31, 2)),
    sustained_s=3.0,
    budget_s=0.004,
)
TOY = Grid(
    rows=(16, 64),
    widths=(32, 64),
    groups=((2, 16, 32, 64),),
    attention=((32, 4, 2, 16, 16), (32, 4, 4, 24, 16)),
    memory=(2**12, 2**16),
    messages=(2**10, 2**14),
    sustained_s=0.0,
    budget_s=0.002,
)
"""For tests of this program on a CPU; its figures mean nothing."""


class Device:
    """Times calls on one device; ``pool`` is a buffer of random numbers from which operands are taken."""

    def __init__(self, kind: str, pool_elements: int) -> None:
        self.kind = kind
        self.module: Any = getattr(torch, kind)
        index = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device(kind) if kind == "cpu" else torch.device(kind, index)
        if kind != "cpu":
            self.module.set_device(index)
        # One stream and one pool of memory for all graphs: each stream has a workspace of its own for products, and memory of a
        # graph that is gone is not given to those of another pool.
        self.stream: Any = self.module.Stream() if kind == "cuda" else None
        self.graph_pool: Any = None
        self._graph: Any = None  # the last one; a pool whose last graph is gone takes no further graph
        # The power that products draw, and so the clock, depends on the numbers: zeros are too fast.
        self.pool = torch.empty(pool_elements, dtype=torch.bfloat16, device=self.device).normal_()

    def operand(self, offset: int, *shape: int) -> torch.Tensor:
        """Return a tensor from the pool; ``offset`` is reduced so that it fits."""
        count = 1
        for size in shape:
            count *= size
        start = offset % max(1, self.pool.numel() - count + 1)
        return self.pool[start // 8 * 8 :][:count].view(shape)

    def synchronize(self) -> None:
        if self.kind != "cpu":
            self.module.synchronize()

    def seconds(self, function: Callable[[int], object], budget_s: float, *, graph: bool = True) -> float:
        """Return the mean device seconds of ``function``, which is passed the number of the call."""
        function(0)
        self.synchronize()
        start = time.perf_counter()
        for call in range(2):
            function(call)
        self.synchronize()
        calls = max(2, min(200, int(budget_s / max(1e-6, (time.perf_counter() - start) / 2))))
        if self.kind == "cuda" and graph:
            return self._graph_seconds(function, calls)
        start = time.perf_counter()
        if self.kind == "cpu":
            for call in range(calls):
                function(call)
            return (time.perf_counter() - start) / calls
        begin, end = (self.module.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for call in range(calls):
            function(call)
        end.record()
        self.synchronize()
        return begin.elapsed_time(end) / 1000 / calls

    def _graph_seconds(self, function: Callable[[int], object], calls: int) -> float:
        # Not by torch.cuda.graph, which collects garbage each time: there are thousands of graphs.
        if self._graph is None:  # after a capture that failed, too
            self.graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            function(0)
            torch.cuda.synchronize()
            graph.capture_begin(pool=self.graph_pool)
            try:
                for call in range(calls):
                    function(call)
            finally:
                graph.capture_end()
            graph.replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        seconds = begin.elapsed_time(end) / 1000 / calls
        if self._graph is not None:
            self._graph.reset()
        self._graph = graph
        return seconds


def calibrate(device: Device, grid: Grid, only: Sequence[str] = ()) -> dict[str, Any]:
    """Measure everything that one device can tell, or ``only`` some tables; one that fails is reported, and missing."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "device": device_name(device),
        "memory": device.module.get_device_properties(device.device).total_memory if device.kind != "cpu" else None,
        "versions": versions(),
        "gradients of weights": "added to fp32" if accumulates(device) else "in bf16",
    }
    tables: dict[str, Callable[[Device, Grid], Any]] = {
        "sustained": sustained_products,
        "products": products,
        "grouped": grouped_products,
        "attention": attention,
        "element-wise": element_wise,
    }
    if unknown := sorted(set(only) - tables.keys()):
        raise SystemExit(f"--only: no table {', '.join(unknown)}; there are {', '.join(tables)}")
    for name in only or tables:
        start = time.perf_counter()
        if device.kind == "cuda":
            torch.cuda.empty_cache()
        try:
            content[name] = tables[name](device, grid)
        # Kernels of torch, Transformer Engine, torch_npu and Triton fail with errors of any class. The other tables took device
        # time and are worth keeping; the caller ends with an error that names the missing ones.
        except Exception as error:  # noqa: BLE001
            print(f"{name} was not measured: {type(error).__name__}: {error}", flush=True)
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    content["missing"] = [name for name in only or tables if name not in content]
    return content


def device_name(device: Device) -> str:
    if device.kind == "cpu":
        return "cpu"
    return str(device.module.get_device_name(device.device))


def versions() -> dict[str, str]:
    """Return versions of the packages whose kernels were measured."""
    from importlib import metadata

    installed = {"torch": str(torch.__version__)}
    for package in ("transformer-engine", "torch-npu", "triton"):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def sustained_products(device: Device, grid: Grid) -> dict[str, float]:
    """Run large products for a while; return FLOP/s in the first tenth of a second and at the end."""
    size = 8192 if grid is FULL else 64
    a, b = device.operand(0, size, size), device.operand(size * size, size, size)
    rates = []
    deadline = time.perf_counter() + grid.sustained_s
    while not rates or time.perf_counter() < deadline:
        duration = device.seconds(lambda _: a @ b.t(), 0.1, graph=False)
        rates.append(2 * size**3 / duration)
    return {"first": rates[0], "last": sum(rates[-3:]) / len(rates[-3:])}


def products(device: Device, grid: Grid) -> list[list[float]]:
    """Measure rows of [tokens, inputs, outputs, forward, gradient of the input, gradient of the weight], in microseconds.

    The weight's gradient is added to an fp32 buffer, as Megatron's fused accumulation does, where torch can.
    """
    adds = accumulates(device)
    return [
        [tokens, inputs, outputs, *_product_us(device, grid, tokens, inputs, outputs, adds=adds)]
        for tokens, inputs, outputs in itertools.product(grid.rows, grid.widths, grid.widths)
        if inputs * outputs <= 2**29 and tokens * max(inputs, outputs) <= 2**29
    ]


def _product_us(device: Device, grid: Grid, tokens: int, inputs: int, outputs: int, *, adds: bool) -> Iterator[float]:
    left, right = _operands(device, grid)
    buffer = torch.zeros(outputs, inputs, dtype=torch.float32, device=device.device)

    def weight_gradient(call: int) -> object:
        a, b = left(call, tokens, outputs).t(), right(call, tokens, inputs)
        return add_product(buffer, a, b) if adds else a @ b

    passes = (
        lambda call: left(call, tokens, inputs) @ right(call, outputs, inputs).t(),
        lambda call: left(call, tokens, outputs) @ right(call, outputs, inputs),
        weight_gradient,
    )
    return (round(device.seconds(function, grid.budget_s) * SECOND, 2) for function in passes)


def _operands(device: Device, grid: Grid) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """Return functions of (call, *shape) for the two operands of a product, which differ from call to call."""
    stride = 2**26 if grid is FULL else 2**10
    return (
        lambda call, *shape: device.operand(call * stride, *shape),
        lambda call, *shape: device.operand((call * 7 + 3) * stride, *shape),
    )


def add_product(buffer: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add a product of bf16 matrices to an fp32 buffer."""
    if buffer.device.type == "cuda":
        return torch.addmm(buffer, a, b, out_dtype=torch.float32, out=buffer)
    return buffer.add_(a @ b)


def accumulates(device: Device) -> bool:
    """Check whether torch adds a product to an fp32 buffer here; else products for weights are measured without the addition."""
    buffer = torch.zeros(64, 64, device=device.device)
    a, b = device.operand(0, 64, 64), device.operand(4096, 64, 64)
    try:
        add_product(buffer, a.t(), b)
    except (RuntimeError, TypeError) as error:
        print(f"products that add to fp32: {str(error).splitlines()[0]:.120}", flush=True)
        return False
    return torch.allclose(buffer, a.float().t() @ b.float(), rtol=0.1, atol=1.0)


def grouped_products(device: Device, grid: Grid) -> list[list[float]]:
    """Measure rows of [experts, rows of each, inputs, outputs, forward, gradient of the input, of the weight], in microseconds.

    By ``torch._grouped_mm`` where the device has it, else by one product for each expert.
    """
    return [[*group, *_grouped_us(device, grid, *group)] for group in grid.groups]


def _grouped_us(device: Device, grid: Grid, experts: int, rows: int, inputs: int, outputs: int) -> Iterator[float]:
    left, right = _operands(device, grid)
    ends = torch.arange(1, experts + 1, device=device.device, dtype=torch.int32) * rows
    total, weight = experts * rows, (experts, outputs, inputs)
    passes = (
        lambda call: grouped(left(call, total, inputs), right(call, *weight).transpose(1, 2), ends),
        lambda call: grouped(left(call, total, outputs), right(call, *weight), ends),
        lambda call: grouped(left(call, total, outputs).t(), right(call, total, inputs), ends),
    )
    # Without a graph: torch's grouped product refuses to be captured in some versions.
    return (round(device.seconds(function, grid.budget_s, graph=False) * SECOND, 2) for function in passes)


def grouped(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply the groups of rows of ``a`` (of columns, for a matrix ``b``) that end at ``ends``."""
    if a.device.type == "cuda":
        return torch._grouped_mm(a, b, ends)  # type: ignore[attr-defined]
    step = int(ends[0])
    parts = range(ends.numel())
    if b.dim() == 3:
        return torch.cat([a[part * step :][:step] @ b[part] for part in parts])
    return torch.stack([a[:, part * step :][:, :step] @ b[part * step :][:step] for part in parts])


def attention(device: Device, grid: Grid) -> list[list[float]]:
    """Measure rows of [length, heads, key heads, head dimension of keys, of values, forward, backward], in microseconds.

    Durations are of one causal sample, measured with so many samples that the host is not what limits them. Transformer Engine's
    attention where it is installed, else torch's.
    """
    rows = []
    kernel = attention_kernel(device)
    for length, heads, groups, keys, values in grid.attention:
        samples = max(1, (65536 if grid is FULL else 32) // length)
        q, k, v = (
            torch.randn(samples, length, count, width, device=device.device, dtype=torch.bfloat16).requires_grad_()
            for count, width in ((heads, keys), (groups, keys), (groups, values))
        )
        try:
            output = kernel(q, k, v)
            gradient = torch.randn_like(output)
            passes = (
                lambda _, q=q, k=k, v=v: kernel(q, k, v),
                lambda _, q=q, k=k, v=v, gradient=gradient: kernel(q, k, v).backward(gradient),
            )
            forward, passes_s = (device.seconds(function, grid.budget_s, graph=False) for function in passes)
        except RuntimeError as error:
            print(f"attention {length} x {heads}/{groups} x {keys}/{values}: {str(error).splitlines()[0]:.120}")
            continue
        durations = (round(duration * SECOND / samples, 2) for duration in (forward, passes_s - forward))
        rows.append([length, heads, groups, keys, values, *durations])
    return rows


def attention_kernel(device: Device) -> Callable[..., torch.Tensor]:
    """Return causal attention of [samples, length, heads, width]."""
    if device.kind == "cuda":
        try:
            from transformer_engine.pytorch import DotProductAttention  # type: ignore[reportMissingImports]
        except ImportError:
            pass
        else:
            layers: dict[tuple[int, ...], Any] = {}

            def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                key = (q.shape[2], k.shape[2], q.shape[3], v.shape[3])
                if key not in layers:
                    widths = q.shape[3] if q.shape[3] == v.shape[3] else (q.shape[3], v.shape[3])
                    layers[key] = DotProductAttention(
                        q.shape[2],
                        widths,
                        k.shape[2],
                        qkv_format="bshd",
                        attn_mask_type="causal",
                        attention_dropout=0.0,
                    )
                return layers[key](q, k, v)

            return fused

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return plain


def element_wise(device: Device, grid: Grid) -> list[list[float]]:
    """Measure rows of [bytes moved, microseconds] of a copy; half of the bytes are read."""
    rows = []
    for moved in grid.memory:
        elements = moved // 4
        source = device.pool[: 8 * elements] if 8 * elements <= device.pool.numel() else device.pool
        target = torch.empty(elements, dtype=torch.bfloat16, device=device.device)
        seconds = device.seconds(functools.partial(_copy_part, source, target), grid.budget_s)
        rows.append([moved, round(seconds * SECOND, 3)])
    return rows


def _copy_part(source: torch.Tensor, target: torch.Tensor, call: int) -> None:
    """Copy another part of ``source`` in each call."""
    size = target.numel()
    target.copy_(source[call % max(1, source.numel() // size) * size :][:size])


# --- links between ranks ---


def links(device: Device, grid: Grid) -> list[dict[str, Any]]:
    """Measure collectives of all ranks by size: bytes of the larger side on a rank, and microseconds."""
    return [row for size in grid.messages for row in _links_of_size(device, size)]


def _links_of_size(device: Device, size: int) -> Iterator[dict[str, Any]]:
    import torch.distributed as dist

    ranks, rank = dist.get_world_size(), dist.get_rank()
    elements = size // 2 // ranks * ranks
    large = device.pool[:elements]
    other = torch.empty_like(large)
    small = device.pool[-(elements // ranks) :]
    received = torch.empty_like(small)

    def exchange() -> None:
        peer, before = (rank + 1) % ranks, (rank - 1) % ranks
        operations = [dist.P2POp(dist.isend, large, peer), dist.P2POp(dist.irecv, other, before)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    kinds: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(other),
        "all_gather": lambda: dist.all_gather_into_tensor(other, small),
        "send": exchange,
    }
    if device.kind != "cpu":  # Gloo has neither
        kinds["reduce_scatter"] = lambda: dist.reduce_scatter_tensor(received, large)
        kinds["all_to_all"] = lambda: dist.all_to_all_single(other, large)
    for kind, function in kinds.items():
        for _ in range(5):
            function()
        dist.barrier()
        # All ranks make the same number of calls.
        microseconds = _mean_us(device, function, 50 if size < 64 * MIB else 10)
        yield {"kind": kind, "ranks": ranks, "bytes": 2 * elements, "us": microseconds}


def _mean_us(device: Device, function: Callable[[], object], calls: int) -> float:
    """Return the mean microseconds of a call, by the host's clock."""
    device.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    device.synchronize()
    return round((time.perf_counter() - start) / calls * SECOND, 2)


def accelerator() -> str:
    """Return the type of this machine's devices, ``cpu`` without one."""
    if torch.cuda.is_available():
        return "cuda"
    npu: Any = getattr(torch, "npu", None)
    return "npu" if npu is not None and npu.is_available() else "cpu"


def measure(path: Path, *, kind: str | None = None, toy: bool = False, only: Sequence[str] = ()) -> dict[str, Any]:
    """Measure this rank's device, with several ranks their links too, and write the file on the first rank."""
    kind = kind or accelerator()
    grid = TOY if toy or kind == "cpu" else FULL
    device = Device(kind, 2**30 if grid is FULL else 2**16)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    collectives: list[dict[str, Any]] = []
    if ranks > 1:
        import torch.distributed as dist

        backend = {"cuda": "nccl", "npu": "hccl"}.get(kind, "gloo")
        dist.init_process_group(backend, device_id=device.device if kind == "cuda" else None)
        collectives = links(device, grid)
        rank = dist.get_rank()
        dist.barrier()
        dist.destroy_process_group()
        if rank > 0:
            return {}
    content = calibrate(device, grid, only) | {"collectives": collectives, "toy": grid is TOY}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(compact(content) + "\n", encoding="utf-8")
    return content


def compact(content: dict[str, Any]) -> str:
    """Return JSON with one line for each row of a table."""
    lines = []
    for name, value in content.items():
        if isinstance(value, list):
            rows = ",\n  ".join(json.dumps(row) for row in value)
            lines.append(f" {json.dumps(name)}: [\n  {rows}\n ]" if value else f" {json.dumps(name)}: []")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program under torchrun, where the command line does not start ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", choices=("cuda", "npu", "cpu"), help="default: the one that is here")
    parser.add_argument("--only", nargs="+", default=(), metavar="TABLE", help="measure these tables, not all")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    content = measure(options.file, kind=options.device, only=options.only)
    if content:
        print(f"{options.file}: {content['device']}, {time.perf_counter() - start:.0f} s")
        if content["missing"]:
            raise SystemExit(f"not measured: {', '.join(content['missing'])}")


if __name__ == "__main__":
    main()
