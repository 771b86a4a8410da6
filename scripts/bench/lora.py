"""Benchmark many LoRA tenants on one model: in turn, mixed in one batch, and one adapter with the whole batch as a bound.

    python scripts/bench.py lora                                       # Qwen3-1.7B shapes, 8 x 1024 and 32 x 512, one GPU
    python scripts/bench.py lora --graphs                              # the same as CUDA graphs (batching.cuda_graphs)
    python scripts/bench.py lora --engine fsdp                         # the same on transformers' layers under FSDP2
    python scripts/bench.py lora --model 30b-a3b --layers 6 --size 8x4096     # adapters of all experts
    python scripts/bench.py lora --tiny --platform cpu                 # the same program on a CPU, in a minute

A step trains every tenant on one sample, with rank 16 on all linear layers:

    (a) in turn    forward_backward and optimizer_step for each tenant in turn, as trainers do that switch adapters
    (b) mixed      one forward_backward of all tenants' samples, one optimizer_step of all
    (c) single     one adapter trained on all samples: the upper bound, the same base model work without tenants

All in one process on the same device. Warm-up steps come first; then every step is timed with the device idle before and
after it, alternating between the three modes, so that they see the same clocks. The exit code is 1 if a tenant's first loss or
gradient norm differs between (a) and (b), so that a figure is never reported for different work.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.models import add_model, samples, shape_of, write_checkpoint
from bench.runner import peak_gib, timed

COMMON = ("platform", "tiny", "warmup", "steps", "seed")
DEFAULTS = {"model": "1.7b", "size": ["8x1024", "32x512"], "warmup": 3, "steps": 8}
TINY = {"model": "tiny", "size": ["3x16"], "warmup": 1, "steps": 2}

TOLERANCE = {"bf16": 2e-2, "fp32": 1e-5}
"""Largest relative difference of a tenant's first loss and gradient norm between (a) and (b)."""

WAYS = {"a": "in turn", "b": "mixed", "c": "single"}
Numbers = dict[str, tuple[float, float]]
"""Loss and gradient norm by tenant."""


@dataclass
class Figures:
    """One way of one size: milliseconds of the timed steps, and the first step's loss and gradient norm by tenant."""

    ms: list[float] = field(default_factory=list)
    first: Numbers = field(default_factory=dict)
    peak_gib: float = 0.0


def precision_of(options: argparse.Namespace) -> str:
    return "fp32" if options.platform == "cpu" else "bf16"


def make_backend(options: argparse.Namespace, engine: str, adapters: int, tokens: int, graphs: Any = None) -> Any:
    """Build a backend of a random model that trains adapters."""
    import megascend

    megascend.bootstrap(options.platform, engine=engine)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(shape_of(options), Path(folder), precision=precision_of(options), seed=options.seed)
        return megascend.make_backend(
            engine,
            model=folder,
            precision=precision_of(options),
            optimizer=megascend.Adam(lr=1e-4),
            adapters=megascend.Adapters(max_count=adapters),
            batching=megascend.Batching(micro_batch_tokens=tokens, cuda_graphs=graphs),
            seed=options.seed,
        )


class Ways:
    """The three ways to train ``tenants`` with one sample of ``length`` tokens each."""

    def __init__(self, backend: Any, tenants: int, length: int, options: argparse.Namespace) -> None:
        self.backend, self.rank = backend, options.rank
        self.samples = samples(tenants, length, backend.vocab_size, options.seed)
        self.names = [f"tenant-{number}" for number in range(tenants)]
        self.calls: dict[str, Callable[[], Numbers]] = {"a": self.in_turn, "b": self.mixed, "c": self.single}
        self.adapters = {"a": self.names, "b": self.names, "c": ["single"]}

    def add(self, names: list[str]) -> None:
        import megascend

        for name in names:
            self.backend.add_adapter(name, megascend.Lora(rank=self.rank, alpha=2 * self.rank))

    def remove(self, names: list[str]) -> None:
        for name in names:
            self.backend.remove_adapter(name)

    def in_turn(self) -> Numbers:
        numbers = {}
        for name, sample in zip(self.names, self.samples, strict=True):
            result = self.backend.forward_backward([sample], adapter=name)
            numbers[name] = (result.loss, self.backend.optimizer_step(name).grad_norm)
        return numbers

    def mixed(self) -> Numbers:
        for name, sample in zip(self.names, self.samples, strict=True):
            sample.adapter = name
        result = self.backend.forward_backward(self.samples)
        step = self.backend.optimizer_step()
        for sample in self.samples:
            sample.adapter = None
        return {name: (result.adapters[name].loss, step.adapters[name].grad_norm) for name in self.names}

    def single(self) -> Numbers:
        result = self.backend.forward_backward(self.samples, adapter="single")
        return {"single": (result.loss, self.backend.optimizer_step("single").grad_norm)}


def measure(ways: Ways, options: argparse.Namespace) -> dict[str, Figures]:
    figures = {mode: Figures() for mode in WAYS}
    for mode, call in ways.calls.items():
        ways.add(ways.adapters[mode])
        if options.platform == "cuda":
            import torch

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        figures[mode].first = call()
        for _ in range(options.warmup - 1):
            call()
        figures[mode].peak_gib = peak_gib(options.platform)
        ways.remove(ways.adapters[mode])
    everyone = [*ways.names, "single"]
    ways.add(everyone)
    for step in range(options.steps + 1):
        for mode, call in ways.calls.items():
            ms, _ = timed(call, options.platform)
            if step:  # the first round allocates
                figures[mode].ms.append(ms)
    ways.remove(everyone)
    return figures


def disagreement(figures: dict[str, Figures], bound: float) -> str:
    """Return the first tenant whose numbers differ between (a) and (b), or an empty string."""
    for name, expected in figures["a"].first.items():
        actual = figures["b"].first[name]
        for quantity, expected_value, actual_value in zip(("loss", "grad norm"), expected, actual, strict=True):
            if not abs(expected_value - actual_value) <= bound * abs(expected_value):
                return f"{name}: {quantity} {actual_value:.6g} mixed, {expected_value:.6g} alone (bound {bound:.0e})"
    return ""


def report(tenants: int, length: int, figures: dict[str, Figures], bound: float) -> bool:
    """Print the rows of one size; return whether mixed and separate training agree."""
    speed = {}
    for mode, name in WAYS.items():
        ms = figures[mode].ms
        speed[mode] = tenants * length / statistics.median(ms) * 1000
        print(
            f"{tenants:8d} {length:7d} ({mode}) {name:<8} {speed[mode]:9.0f} {statistics.median(ms):10.1f} "
            f"{min(ms):8.1f} {max(ms):8.1f} {figures[mode].peak_gib:9.1f}"
        )
    difference = disagreement(figures, bound)
    verdict = f"numbers DIFFER: {difference}" if difference else "numbers agree"
    print(f"{'':8} (b) / (a) {speed['b'] / speed['a']:.2f}, (b) / (c) {speed['b'] / speed['c']:.3f}; {verdict}")
    return not difference


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--engine", choices=("megatron", "fsdp"), default="megatron")
    parser.add_argument("--size", action="append", metavar="TENANTSxTOKENS", help="default: 8x1024 and 32x512")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--graphs", action="store_true", help="micro batches as CUDA graphs, in all three ways")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    import megascend

    sizes = [(int(tenants), int(length)) for tenants, length in (size.split("x") for size in options.size)]
    tokens = options.micro_batch_tokens
    graphs = megascend.CudaGraphs(max_tokens=tokens) if options.graphs else None
    adapters = 1 + max(tenants for tenants, _ in sizes)
    rows, agree = [], True
    print(
        f"{'tenants':>8} {'tokens':>7} {'way':<12} {'tokens/s':>9} {'ms median':>10} {'min':>8} {'max':>8} {'peak GiB':>9}"
    )
    with make_backend(options, options.engine, adapters, tokens, graphs) as backend:
        for tenants, length in sizes:
            figures = measure(Ways(backend, tenants, length, options), options)
            agree &= report(tenants, length, figures, TOLERANCE[precision_of(options)])
            rows.append({"size": (tenants, length), **{mode: asdict(value) for mode, value in figures.items()}})
    return {"engine": options.engine, "graphs": options.graphs, "shape": shape_of(options), "sizes": rows}, agree
