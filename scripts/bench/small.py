"""Measure small LoRA steps: the cost of one request, eager and as replayed CUDA graphs.

    python scripts/bench.py small                              # Qwen3-1.7B shapes, one GPU
    python scripts/bench.py small --model 30b-a3b --layers 6   # adapters on all experts
    python scripts/bench.py small --tiny --platform cpu        # the same program on a CPU: checks it, not speed

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
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from bench.lora import TOLERANCE, make_backend, precision_of
from bench.models import add_model, samples, shape_of
from bench.runner import TESTS, repeated, synchronize

COMMON = ("platform", "tiny", "warmup", "steps", "seed")
DEFAULTS: dict[str, Any] = {
    "model": "1.7b",
    "warmup": 3,
    "steps": 10,
    "tokens": [256, 1024, 4096],
    "mixed": ["4x256", "8x1024"],
}
TINY: dict[str, Any] = {"model": "tiny", "warmup": 1, "steps": 2, "tokens": [24, 100], "mixed": ["3x16"]}


class Bench:
    """A backend, and what is measured on it."""

    def __init__(self, backend: Any, options: argparse.Namespace) -> None:
        self.backend, self.options = backend, options
        self.on_gpu = options.platform == "cuda"

    def samples(self, count: int, tokens: int) -> list[Any]:
        return samples(count, tokens, self.backend.vocab_size, self.options.seed)

    def add(self, name: str, rank: int | None = None) -> None:
        import megascend

        self.backend.add_adapter(name, megascend.Lora(rank=rank or self.options.rank))

    def device_ms(self, run: Callable[[], Any]) -> tuple[float, int]:
        """Return (milliseconds of all kernels and copies of one call, their number)."""
        if not self.on_gpu:
            return float("nan"), 0
        import torch

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            run()
            torch.cuda.synchronize()
        events = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        return sum(event.time_range.elapsed_us() for event in events) / 1000, len(events)

    def steps(self, batch: list[Any], adapter: str | None) -> dict[str, Any]:
        """Measure steps on a batch, whose first losses and norms are recorded."""
        first: list[float] = []

        def step() -> None:
            result = self.backend.forward_backward(batch, adapter=adapter)
            first.extend([result.loss, self.backend.optimizer_step(adapter).grad_norm])

        figures: dict[str, Any] = {"step": repeated(step, self.options), "first": first[:6]}
        figures["device"], figures["kernels"] = self.device_ms(step)
        return figures

    def request(self, tokens: int) -> dict[str, Any]:
        """Measure one sample of one adapter."""
        self.add("one")
        batch, backend = self.samples(1, tokens), self.backend
        figures = self.steps(batch, "one")
        figures["forward_backward"] = repeated(lambda: backend.forward_backward(batch, adapter="one"), self.options)
        backend.discard_gradients("one")
        figures["forward"] = repeated(lambda: backend.forward(batch, adapter="one"), self.options)
        for sample in batch:
            sample.old_logprobs, sample.advantages = 0 * sample.weights - 5, sample.weights
        figures["ppo"] = repeated(lambda: backend.forward_backward(batch, "ppo", adapter="one"), self.options)
        backend.remove_adapter("one")
        return figures

    def mixed(self, tenants: int, tokens: int) -> dict[str, Any]:
        """Measure one sample of each of several adapters."""
        batch = self.samples(tenants, tokens)
        for number, sample in enumerate(batch):
            sample.adapter = f"tenant-{number}"
            self.add(sample.adapter)
        figures = self.steps(batch, None)
        for sample in batch:
            self.backend.remove_adapter(sample.adapter)
        return figures

    def service(self, requests: int, tenants: int, longest: int) -> dict[str, Any]:
        """Run requests of random lengths through the queue, with tenants that leave and return."""
        import megascend

        generator = random.Random(self.options.seed)
        names = [f"tenant-{number}" for number in range(tenants)]
        for name in names:
            self.add(name, generator.choice((8, self.options.rank)))
        queue = megascend.AdapterQueue(self.backend, max_batch_tokens=longest)
        lengths = [int(longest ** generator.uniform(0.5, 1.0)) for _ in range(requests)]
        reserved, left, waiting = [], 0, []
        synchronize(self.options.platform)
        start = time.perf_counter()
        for number, length in enumerate(lengths):
            name = generator.choice(names)
            waiting.append((queue.forward_backward(name, self.samples(1, length)), queue.optimizer_step(name)))
            if len(waiting) == generator.randint(1, tenants) or number == requests - 1 or len(waiting) > tenants:
                for losses, outcome in waiting:
                    losses.result()
                    outcome.result()
                waiting = []
            if number % max(1, requests // 10) == requests // 10 - 1:
                reserved.append(self.reserved())
            if number and number % max(2, requests // 5) == 0:  # a tenant leaves, another one comes
                queue.drain()
                self.backend.remove_adapter(names[left])
                names[left] = f"{names[left]}-again"
                self.add(names[left])
                left += 1
        synchronize(self.options.platform)
        took = time.perf_counter() - start
        for name in names:
            self.backend.remove_adapter(name)
        return {
            "requests": requests,
            "tokens_per_s": sum(lengths) / took,
            "ms_per_request": 1000 * took / requests,
            "reserved_gib": reserved,
        }

    def reserved(self) -> float:
        """Return the GiB that torch holds on the device."""
        if not self.on_gpu:
            return float("nan")
        import torch

        return torch.cuda.memory_reserved() / 2**30


def measure(options: argparse.Namespace, *, graphs: bool) -> dict[str, Any]:
    """Measure all parts on one backend."""
    import megascend

    settings = megascend.CudaGraphs(max_tokens=options.max_tokens)
    on_gpu = options.platform == "cuda"
    backend = make_backend(options, "megatron", 64, options.max_tokens, settings if graphs and on_gpu else None)
    if graphs and not on_gpu:  # a stand-in that runs the work again
        sys.path.append(TESTS)
        from support.graphed_steps import CaptureOnCpu, gradients_of

        backend.engine.use_cuda_graphs(settings, CaptureOnCpu(lambda: gradients_of(backend)))
    bench = Bench(backend, options)
    figures: dict[str, Any] = {"request": {tokens: bench.request(tokens) for tokens in options.tokens}}
    figures["mixed"] = {size: bench.mixed(*map(int, size.split("x"))) for size in options.mixed}
    if options.requests:
        figures["service"] = bench.service(options.requests, options.tenants, max(options.tokens))
    figures["reserved_gib"] = bench.reserved()
    figures["report"] = asdict(backend.cuda_graphs) if graphs else None
    backend.close()
    return figures


def largest_difference(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest relative difference of first losses and gradient norms."""
    return max(
        abs(value - reference) / abs(reference)
        for part in ("request", "mixed")
        for size, figures in expected[part].items()
        for value, reference in zip(actual[part][size]["first"], figures["first"], strict=True)
    )


def report(plain: dict[str, Any], graphed: dict[str, Any]) -> None:
    """Print the tables."""
    columns = f"{'eager ms':>9} {'graph ms':>9} {'ratio':>7} {'device':>9} {'kernels':>8} {'graph dev':>9}"
    print(f"\n{'':10} {'tokens':>8} {'':<17} {columns}")
    for part, keys in (("request", ("step", "forward_backward", "ppo", "forward")), ("mixed", ("step",))):
        for size, eager in plain[part].items():
            for key in keys:
                graphs = graphed[part][size]
                eager_ms, graph_ms = statistics.median(eager[key]), statistics.median(graphs[key])
                also = f"{eager['device']:9.1f} {eager['kernels']:8d} {graphs['device']:9.1f}" if key == "step" else ""
                print(
                    f"{part:<10} {size!s:>8} {key:<17} {eager_ms:9.1f} {graph_ms:9.1f} {eager_ms / graph_ms:7.2f} {also}"
                )
    for name, figures in (("eager", plain), ("graphs", graphed)):
        if service := figures.get("service"):
            reserved = " ".join(f"{value:.1f}" for value in service["reserved_gib"])
            print(
                f"service    {name:<7} {service['requests']} requests: {service['ms_per_request']:.1f} ms each, ",
                end="",
            )
            print(f"{service['tokens_per_s']:.0f} tokens/s; reserved GiB {reserved}")
    print(
        f"graphs: {graphed['report']}; reserved {plain['reserved_gib']:.1f}, {graphed['reserved_gib']:.1f} GiB with them"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--tokens", type=int, nargs="+", help="of a request; default: 256 1024 4096")
    parser.add_argument("--mixed", nargs="*", metavar="TENANTSxTOKENS", help="default: 4x256 8x1024")
    parser.add_argument("--requests", type=int, default=200, help="of the service; 0: none")
    parser.add_argument("--tenants", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=8192, help="of a micro batch, captured or not")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    plain, graphed = measure(options, graphs=False), measure(options, graphs=True)
    report(plain, graphed)
    difference = largest_difference(graphed, plain)
    agree = difference <= TOLERANCE[precision_of(options)]
    print(f"first losses and gradient norms differ by {difference:.1e} at most: they {'agree' if agree else 'DIFFER'}")
    return {"shape": shape_of(options), "eager": plain, "graphs": graphed}, agree
