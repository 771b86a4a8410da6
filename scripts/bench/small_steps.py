"""Measure small LoRA steps: the cost of one request, eager and as replayed CUDA graphs.

    python scripts/bench.py small_steps                              # Qwen3-1.7B shapes, one GPU
    python scripts/bench.py small_steps --tiny --platform cpu        # the same script on a CPU: checks the script, not speed

Three parts, all in one process on the same device, first without graphs and then with them (``batching.cuda_graphs``):

    request    one sample of one adapter: forward_backward, optimizer_step and forward, timed separately; median, with the
               device idle before and after. ``device`` is the device time of a step, from torch's profiler
    mixed      one sample of each of several adapters in one forward_backward, one optimizer_step of all
    service    many requests of random lengths from several tenants through ``AdapterQueue``, one step after each; the
               memory reserved after each tenth of them, and the captures

The exit code is 1 if losses or gradient norms with graphs differ from those without by more than rounding.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.lora import make_samples
from bench.train import QWEN3_1_7B, QWEN3_30B_A3B, TINY, TINY_EXPERTS, Work, versions, write_checkpoint

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))  # for its package support

TOLERANCE = {"bf16": 2e-2, "fp32": 1e-5}
"""Largest relative difference of first losses and gradient norms."""


class Bench:
    """A backend, and what is measured on it."""

    def __init__(self, backend: Any, work: Work, rank: int) -> None:
        self.backend, self.work, self.rank = backend, work, rank
        self.on_gpu = work.platform == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()

    def timed(self, run: Callable[[], Any]) -> list[float]:
        """Milliseconds of every timed call, after warm-up."""
        ms = []
        for number in range(self.work.warmup + self.work.steps):
            self.synchronize()
            start = time.perf_counter()
            run()
            self.synchronize()
            if number >= self.work.warmup:
                ms.append(1000 * (time.perf_counter() - start))
        return ms

    def device_ms(self, run: Callable[[], Any]) -> tuple[float, int]:
        """(milliseconds of all kernels and copies of one call, their number)."""
        if not self.on_gpu:
            return float("nan"), 0
        import torch

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            run()
            torch.cuda.synchronize()
        events = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        return sum(event.time_range.elapsed_us() for event in events) / 1000, len(events)

    def request(self, tokens: int) -> dict[str, Any]:
        """Build one sample of one adapter."""
        import megascend

        self.backend.add_adapter("one", megascend.Lora(rank=self.rank))
        samples = make_samples(self.work, 1, tokens)
        figures: dict[str, Any] = {}

        def step() -> None:
            result = self.backend.forward_backward(samples, adapter="one")
            outcome = self.backend.optimizer_step("one")
            figures.setdefault("first", []).extend([result.loss, outcome.grad_norm])

        figures["step"] = self.timed(step)
        figures["first"] = figures["first"][:6]
        figures["device"], figures["kernels"] = self.device_ms(step)
        figures["forward_backward"] = self.timed(lambda: self.backend.forward_backward(samples, adapter="one"))
        self.backend.discard_gradients("one")
        figures["forward"] = self.timed(lambda: self.backend.forward(samples, adapter="one"))
        for sample in samples:
            sample.old_logprobs, sample.advantages = 0 * sample.weights - 5, sample.weights
        figures["ppo"] = self.timed(lambda: self.backend.forward_backward(samples, "ppo", adapter="one"))
        self.backend.remove_adapter("one")
        return figures

    def mixed(self, tenants: int, tokens: int) -> dict[str, Any]:
        """Build one sample of each of several adapters."""
        import megascend

        samples = make_samples(self.work, tenants, tokens)
        for number, sample in enumerate(samples):
            sample.adapter = f"tenant-{number}"
            self.backend.add_adapter(sample.adapter, megascend.Lora(rank=self.rank))
        figures: dict[str, Any] = {}

        def step() -> None:
            result = self.backend.forward_backward(samples)
            outcome = self.backend.optimizer_step()
            figures.setdefault("first", []).extend([result.loss, outcome.grad_norm])

        figures["step"] = self.timed(step)
        figures["first"] = figures["first"][:6]
        figures["device"], figures["kernels"] = self.device_ms(step)
        for sample in samples:
            self.backend.remove_adapter(sample.adapter)
        return figures

    def service(self, requests: int, tenants: int, longest: int) -> dict[str, Any]:
        """Run requests of random lengths through the queue, with tenants that leave and return."""
        import megascend

        generator = random.Random(self.work.seed)
        names = [f"tenant-{number}" for number in range(tenants)]
        for name in names:
            self.backend.add_adapter(name, megascend.Lora(rank=generator.choice((8, self.rank))))
        queue = megascend.AdapterQueue(self.backend, max_batch_tokens=longest)
        lengths = [int(longest ** generator.uniform(0.5, 1.0)) for _ in range(requests)]
        reserved, seconds, observed, waiting = [], [], 0, []
        self.synchronize()
        start = time.perf_counter()
        for number, length in enumerate(lengths):
            name = generator.choice(names)
            sample = make_samples(self.work, 1, length)
            waiting.append((queue.forward_backward(name, sample), queue.optimizer_step(name)))
            if len(waiting) == generator.randint(1, tenants) or number == requests - 1 or len(waiting) > tenants:
                for losses, outcome in waiting:
                    losses.result()
                    outcome.result()
                waiting = []
            if number % max(1, requests // 10) == requests // 10 - 1:
                self.synchronize()
                seconds.append(time.perf_counter() - start)
                reserved.append(self.reserved())
            if number and number % max(2, requests // 5) == 0:  # a tenant leaves, another one comes
                queue.drain()
                self.backend.remove_adapter(names[observed])
                names[observed] = f"{names[observed]}-again"
                self.backend.add_adapter(names[observed], megascend.Lora(rank=self.rank))
                observed += 1
        self.synchronize()
        took = time.perf_counter() - start
        for name in names:
            self.backend.remove_adapter(name)
        return {
            "requests": requests,
            "tokens": sum(lengths),
            "seconds": took,
            "tokens_per_s": sum(lengths) / took,
            "ms_per_request": 1000 * took / requests,
            "after_tenths": seconds,
            "reserved_gib": reserved,
        }

    def reserved(self) -> float:
        """GiB that torch holds on the device."""
        if not self.on_gpu:
            return float("nan")
        import torch

        return torch.cuda.memory_reserved() / 2**30


def measure(work: Work, folder: str, arguments: argparse.Namespace, graphs: bool) -> dict[str, Any]:
    """Measure all parts on one backend."""
    import megascend

    settings = megascend.CudaGraphs(max_tokens=arguments.max_tokens)
    backend = megascend.MegatronBackend(
        model=folder,
        precision=work.precision,  # type: ignore[reportArgumentType]
        optimizer=megascend.Adam(lr=work.lr),
        adapters=megascend.Adapters(max_count=64),
        batching=megascend.Batching(
            micro_batch_tokens=arguments.max_tokens,
            cuda_graphs=settings if graphs and work.platform == "cuda" else None,
        ),
        seed=work.seed,
    )
    if graphs and work.platform != "cuda":
        stand_in(backend, settings)
    bench = Bench(backend, work, arguments.rank)
    figures: dict[str, Any] = {"request": {}, "mixed": {}}
    for tokens in arguments.tokens:
        figures["request"][tokens] = bench.request(tokens)
    for size in arguments.mixed:
        tenants, tokens = map(int, size.split("x"))
        figures["mixed"][size] = bench.mixed(tenants, tokens)
    if arguments.requests:
        figures["service"] = bench.service(arguments.requests, arguments.tenants, max(arguments.tokens))
    figures["reserved_gib"] = bench.reserved()
    figures["report"] = asdict(backend.cuda_graphs) if graphs else None
    backend.close()
    return figures


def stand_in(backend: Any, settings: Any) -> None:
    """Replace CUDA graphs by their stand-in on a CPU."""
    from support.graphed_steps import CaptureOnCpu, gradients_of

    backend.engine.use_cuda_graphs(settings, CaptureOnCpu(lambda: gradients_of(backend)))


def largest_difference(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest relative difference of first losses and gradient norms."""
    largest = 0.0
    for part in ("request", "mixed"):
        for size, figures in expected[part].items():
            for value, reference in zip(actual[part][size]["first"], figures["first"], strict=True):
                largest = max(largest, abs(value - reference) / abs(reference))
    return largest


def report(plain: dict[str, Any], graphed: dict[str, Any]) -> None:
    """Print the tables."""

    def row(label: str, size: Any, part: str, key: str) -> None:
        eager_ms, graph_ms = (statistics.median(figures[part][size][key]) for figures in (plain, graphed))
        device, kernels = plain[part][size]["device"], plain[part][size]["kernels"]
        also = f"{device:9.1f} {kernels:8d} {graphed[part][size]['device']:9.1f}" if key == "step" else ""
        print(f"{label:<10} {size!s:>8} {key:<17} {eager_ms:9.1f} {graph_ms:9.1f} {eager_ms / graph_ms:7.2f} {also}")

    columns = f"{'eager ms':>9} {'graph ms':>9} {'ratio':>7} {'device':>9} {'kernels':>8} {'graph dev':>9}"
    print(f"\n{'':10} {'tokens':>8} {'':<17} {columns}")
    for size in plain["request"]:
        for key in ("step", "forward_backward", "ppo", "forward"):
            row("request", size, "request", key)
    for size in plain["mixed"]:
        row("mixed", size, "mixed", "step")
    for name, figures in (("eager", plain), ("graphs", graphed)):
        if "service" in figures:
            service = figures["service"]
            print(
                f"service    {name:<7} {service['requests']} requests: {service['ms_per_request']:.1f} ms each, "
                f"{service['tokens_per_s']:.0f} tokens/s; reserved GiB "
                f"{' '.join(f'{value:.1f}' for value in service['reserved_gib'])}"
            )
    print(
        f"graphs: {graphed['report']}; reserved {plain['reserved_gib']:.1f} GiB without, {graphed['reserved_gib']:.1f} with"
    )


def shape_of(*, tiny: bool, moe: bool) -> dict[str, int]:
    """Return the model's sizes by the names of transformers' config."""
    if moe:
        return TINY | TINY_EXPERTS if tiny else QWEN3_30B_A3B | {"num_hidden_layers": 6}
    return TINY if tiny else QWEN3_1_7B


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model and requests for a CPU")
    parser.add_argument(
        "--moe", action="store_true", help="Qwen3-30B-A3B shapes with 6 layers, adapters on all experts"
    )
    parser.add_argument("--tokens", type=int, nargs="+", help="of a request; default: 256 1024 4096")
    parser.add_argument("--mixed", nargs="*", metavar="TENANTSxTOKENS", help="default: 4x256 8x1024")
    parser.add_argument("--requests", type=int, default=200, help="of the service; 0: none")
    parser.add_argument("--tenants", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=8192, help="of a micro batch, captured or not")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, help="timed ones; default: 10, tiny: 2")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    arguments.tokens = arguments.tokens or ([24, 100] if arguments.tiny else [256, 1024, 4096])
    if arguments.mixed is None:
        arguments.mixed = ["3x16"] if arguments.tiny else ["4x256", "8x1024"]

    import megascend

    work = Work(
        shape=shape_of(tiny=arguments.tiny, moe=arguments.moe),
        platform=arguments.platform,
        precision="fp32" if arguments.platform == "cpu" else "bf16",
        sequences=0,
        length=0,
        warmup=arguments.warmup,
        steps=arguments.steps or (2 if arguments.tiny else 10),
        lr=1e-4,
        seed=arguments.seed,
    )
    megascend.bootstrap(work.platform)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(work, Path(folder))
        plain = measure(work, folder, arguments, graphs=False)
        graphed = measure(work, folder, arguments, graphs=True)
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    print(f"rank {arguments.rank} on all linear layers, {work.precision}, {work.steps} timed steps, shape {work.shape}")
    report(plain, graphed)
    difference = largest_difference(graphed, plain)
    agree = difference <= TOLERANCE[work.precision]
    print(f"first losses and gradient norms differ by {difference:.1e} at most: they {'agree' if agree else 'DIFFER'}")
    if arguments.json:
        report_data = {"versions": versions(), "work": asdict(work), "eager": plain, "graphs": graphed}
        arguments.json.write_text(json.dumps(report_data, indent=1))
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
