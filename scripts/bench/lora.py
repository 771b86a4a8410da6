"""Benchmark many LoRA tenants on one model: in turn, mixed in one batch, and one adapter with the whole batch as a bound.

    python scripts/bench.py lora                              # Qwen3-1.7B shapes, 8 x 1024 and 32 x 512, one GPU
    python scripts/bench.py lora --graphs                     # the same as CUDA graphs (batching.cuda_graphs)
    python scripts/bench.py lora --engine fsdp                # the same on transformers' layers under FSDP2
    python scripts/bench.py lora --moe --size 8x4096          # Qwen3-30B-A3B shapes, 6 layers, adapters of all experts
    python scripts/bench.py lora --tiny --platform cpu        # the same script on a CPU, in a minute

A step trains every tenant on one sample, with rank 16 on all linear layers:

    (a) in turn    forward_backward and optimizer_step for each tenant in turn, as trainers do that switch adapters
    (b) mixed      one forward_backward of all tenants' samples, one optimizer_step of all
    (c) single     one adapter trained on all samples: the upper bound, the same base model work without tenants

All in one process on the same device. Warm-up steps come first; then every step is timed with the device idle before and
after it, alternating between the three modes, so that they see the same clocks. ``peak`` is the peak device memory of a mode,
adapters and their optimizers included. The table is printed last; the exit code is 1 if a tenant's first loss or gradient
norm differs between (a) and (b), so that a figure is never reported for different work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.train import QWEN3_1_7B, QWEN3_30B_A3B, TINY, TINY_EXPERTS, Work, versions, write_checkpoint

TOLERANCE = {"bf16": 2e-2, "fp32": 1e-5}
"""Largest relative difference of a tenant's first loss and gradient norm between (a) and (b)."""

WAYS = {"a": "in turn", "b": "mixed", "c": "single"}


@dataclass
class Figures:
    """One way of one size: milliseconds of the timed steps, and the first step's loss and gradient norm by tenant."""

    ms: list[float] = field(default_factory=list)
    first: dict[str, tuple[float, float]] = field(default_factory=dict)
    peak_gib: float = 0.0


class Bench:
    """A backend and the three ways to train on it."""

    def __init__(self, backend: Any, work: Work, rank: int) -> None:
        self.backend, self.work, self.rank = backend, work, rank
        self.on_gpu = work.platform == "cuda"

    def measure(self, tenants: int, length: int) -> dict[str, Figures]:
        """Measure all three ways of training ``tenants`` with one sample of ``length`` tokens each."""
        import megascend

        samples = make_samples(self.work, tenants, length)
        names = [f"tenant-{number}" for number in range(tenants)]
        figures = {mode: Figures() for mode in WAYS}
        lora = megascend.Lora(rank=self.rank, alpha=2 * self.rank)
        ways: dict[str, Callable[[], dict[str, tuple[float, float]]]] = {
            "a": lambda: self.in_turn(names, samples),
            "b": lambda: self.mixed(names, samples),
            "c": lambda: self.single(samples),
        }
        for mode, adapters in (("a", names), ("b", names), ("c", ["single"])):
            for name in adapters:
                self.backend.add_adapter(name, lora)
            self.synchronize(reset_peak=True)
            figures[mode].first = ways[mode]()
            for _ in range(self.work.warmup - 1):
                ways[mode]()
            self.synchronize()
            figures[mode].peak_gib = self.peak()
            for name in adapters:
                self.backend.remove_adapter(name)
        for name in [*names, "single"]:
            self.backend.add_adapter(name, lora)
        for step in range(self.work.steps + 1):
            for mode, run in ways.items():
                self.synchronize()
                start = time.perf_counter()
                run()
                self.synchronize()
                if step:  # the first round allocates
                    figures[mode].ms.append(1000 * (time.perf_counter() - start))
        for name in [*names, "single"]:
            self.backend.remove_adapter(name)
        return figures

    def in_turn(self, names: list[str], samples: list[Any]) -> dict[str, tuple[float, float]]:
        """Run (a); return each tenant's loss and gradient norm."""
        results = {}
        for name, sample in zip(names, samples, strict=True):
            result = self.backend.forward_backward([sample], adapter=name)
            step = self.backend.optimizer_step(name)
            results[name] = (result.loss, step.grad_norm)
        return results

    def mixed(self, names: list[str], samples: list[Any]) -> dict[str, tuple[float, float]]:
        """(b): likewise."""
        for name, sample in zip(names, samples, strict=True):
            sample.adapter = name
        result = self.backend.forward_backward(samples)
        step = self.backend.optimizer_step()
        for sample in samples:
            sample.adapter = None
        return {name: (result.adapters[name].loss, step.adapters[name].grad_norm) for name in names}

    def single(self, samples: list[Any]) -> dict[str, tuple[float, float]]:
        """(c): the one adapter's."""
        result = self.backend.forward_backward(samples, adapter="single")
        return {"single": (result.loss, self.backend.optimizer_step("single").grad_norm)}

    def synchronize(self, reset_peak: bool = False) -> None:
        """Wait for the device."""
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()
            if reset_peak:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float:
        """GiB allocated at most since the last reset."""
        if not self.on_gpu:
            return float("nan")
        import torch

        return torch.cuda.max_memory_allocated() / 2**30

    def profile(self, tenants: int, length: int, folder: Path) -> None:
        """Tables of one more step of each way under torch's profiler."""
        import torch

        import megascend

        samples = make_samples(self.work, tenants, length)
        names = [f"tenant-{number}" for number in range(tenants)]
        for name in [*names, "single"]:
            self.backend.add_adapter(name, megascend.Lora(rank=self.rank))
        folder.mkdir(parents=True, exist_ok=True)
        for mode, run in (
            ("a", lambda: self.in_turn(names[:1], samples[:1])),
            ("b", lambda: self.mixed(names, samples)),
            ("c", lambda: self.single(samples)),
        ):
            run()
            with torch.profiler.profile() as trace:
                run()
                self.synchronize()
            sort = "self_device_time_total" if self.on_gpu else "self_cpu_time_total"
            events = trace.key_averages()
            text = events.table(sort_by=sort, row_limit=40, max_name_column_width=70)
            text += events.table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=70)
            (folder / f"profile-{mode}-{tenants}.txt").write_text(text)
        for name in [*names, "single"]:
            self.backend.remove_adapter(name)


def make_samples(work: Work, count: int, length: int) -> list[Any]:
    """Random tokens, small ids more frequent."""
    import torch

    import megascend

    generator = torch.Generator().manual_seed(work.seed)
    uniform = torch.rand(count, length + 1, generator=generator, dtype=torch.float64)
    return [megascend.Sample.causal(row) for row in (work.shape["vocab_size"] * uniform**3).long()]


def disagreement(figures: dict[str, Figures], bound: float) -> str:
    """Return the first tenant whose numbers differ between (a) and (b), or an empty string."""
    for name, expected in figures["a"].first.items():
        actual = figures["b"].first[name]
        for quantity, expected_value, actual_value in zip(("loss", "grad norm"), expected, actual, strict=True):
            if not abs(expected_value - actual_value) <= bound * abs(expected_value):
                return f"{name}: {quantity} {actual_value:.6g} mixed, {expected_value:.6g} alone (bound {bound:.0e})"
    return ""


def report(work: Work, sizes: list[tuple[int, int]], all_figures: list[dict[str, Figures]], rank: int) -> bool:
    """Print the table; returns whether mixed and separate training agree."""
    agree = True
    print(f"\nrank {rank} on all linear layers, {work.precision}, {work.steps} timed steps, shape {work.shape}")
    print(
        f"{'tenants':>8} {'tokens':>7} {'way':<12} {'tokens/s':>9} {'ms median':>10} {'min':>8} {'max':>8} {'peak GiB':>9}"
    )
    for (tenants, length), figures in zip(sizes, all_figures, strict=True):
        speed = {}
        for mode, name in WAYS.items():
            mode_figures = figures[mode]
            speed[mode] = tenants * length / statistics.median(mode_figures.ms) * 1000
            print(
                f"{tenants:8d} {length:7d} ({mode}) {name:<8} {speed[mode]:9.0f} {statistics.median(mode_figures.ms):10.1f} "
                f"{min(mode_figures.ms):8.1f} {max(mode_figures.ms):8.1f} {mode_figures.peak_gib:9.1f}"
            )
        difference = disagreement(figures, TOLERANCE[work.precision])
        agree &= not difference
        verdict = f"numbers DIFFER: {difference}" if difference else "numbers agree"
        print(f"{'':8} (b) / (a) {speed['b'] / speed['a']:.2f}, (b) / (c) {speed['b'] / speed['c']:.3f}; {verdict}")
    return agree


def shape_from(arguments: argparse.Namespace) -> dict[str, int]:
    """Return the model's sizes by the names of transformers' config."""
    if arguments.tiny:
        return TINY | (TINY_EXPERTS if arguments.moe else {})
    return QWEN3_30B_A3B | {"num_hidden_layers": 6} if arguments.moe else QWEN3_1_7B


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--engine", choices=("megatron", "fsdp"), default="megatron")
    parser.add_argument("--tiny", action="store_true", help="a model and batches for a CPU")
    parser.add_argument("--moe", action="store_true", help="experts: 30B-A3B shapes, 6 layers; with --tiny 8 of them")
    parser.add_argument("--size", action="append", metavar="TENANTSxTOKENS", help="default: 8x1024 and 32x512")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--warmup", type=int, help="default: 3, tiny: 1")
    parser.add_argument("--steps", type=int, help="timed steps of each way; default: 8, tiny: 2")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--graphs", action="store_true", help="micro batches as CUDA graphs, in all three ways")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--profile", type=Path, help="folder for operator tables of one more step of every way")
    arguments = parser.parse_args()

    import megascend
    from megascend.backends import make_backend

    sizes = [
        tuple(map(int, size.split("x")))
        for size in arguments.size or (["3x16"] if arguments.tiny else ["8x1024", "32x512"])
    ]
    work = Work(
        shape=shape_from(arguments),
        platform=arguments.platform,
        precision="fp32" if arguments.platform == "cpu" else "bf16",
        sequences=0,
        length=0,
        warmup=arguments.warmup or (1 if arguments.tiny else 3),
        steps=arguments.steps or (2 if arguments.tiny else 8),
        lr=1e-4,
        seed=arguments.seed,
    )
    megascend.bootstrap(work.platform, engine=arguments.engine)
    graphs = megascend.CudaGraphs(max_tokens=arguments.micro_batch_tokens) if arguments.graphs else None
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(work, Path(folder))
        backend = make_backend(
            arguments.engine,
            model=folder,
            precision=work.precision,
            optimizer=megascend.Adam(lr=work.lr),
            adapters=megascend.Adapters(max_count=1 + max(tenants for tenants, _ in sizes)),
            batching=megascend.Batching(micro_batch_tokens=arguments.micro_batch_tokens, cuda_graphs=graphs),
            seed=work.seed,
        )
    bench = Bench(backend, work, arguments.rank)
    figures = [bench.measure(*size) for size in sizes]
    if arguments.profile:
        for size in sizes:
            bench.profile(*size, arguments.profile)
    print(f"CUDA graphs: {graphs}")
    print(f"engine {arguments.engine}", *(f"{name} {version}" for name, version in versions().items()), sep=", ")
    agree = report(work, sizes, figures, arguments.rank)
    if arguments.json:
        rows = [
            {"size": size, **{mode: asdict(mode_figures) for mode, mode_figures in size_figures.items()}}
            for size, size_figures in zip(sizes, figures, strict=True)
        ]
        report_data = {"engine": arguments.engine, "versions": versions()}
        arguments.json.write_text(json.dumps(report_data | {"work": asdict(work), "sizes": rows}, indent=1))
    backend.close()
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
