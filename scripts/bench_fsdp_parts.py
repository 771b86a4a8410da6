"""Benchmark parts of a layer of engine fsdp, forward and backward on a CUDA GPU in bf16, each against the code it replaces.

    python scripts/bench_fsdp_parts.py

attention: packed samples in one kernel, and one ``scaled_dot_product_attention`` call a sample; 32 heads, 4 KV heads, size 128.
experts: our grouped experts and transformers' ``grouped_mm``, at Qwen3-30B-A3B's shapes; equal loads and random ones.

Median of ten runs, in milliseconds; error: relative 2-norm of all gradients between the two.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], list[Tensor]]


def milliseconds(run: Run) -> float:
    """Median of ten, after three."""
    times = []
    for turn in range(13):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if turn >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def report(name: str, fused: Run, reference: Run) -> None:
    """Print one line of the table."""
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(fused(), reference(), strict=True))
    torch.cuda.reset_peak_memory_stats()
    fused_ms = milliseconds(fused)
    gib = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    reference_ms = milliseconds(reference)
    print(
        f"{name:<34} {fused_ms:9.2f} {reference_ms:9.2f} {reference_ms / fused_ms:7.2f} x   peak {gib:5.1f} and "
        f"{torch.cuda.max_memory_allocated() / 2**30:5.1f} GiB   error {error:.1e}",
        flush=True,
    )


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor) -> Run:
    """Compute ``function`` of ``inputs`` and their gradients."""

    def run() -> list[Tensor]:
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream.view_as(out))]

    return run


def attention(lengths: tuple[int, ...]) -> None:
    from megascend.engines.fsdp import attention as engine

    device, total = torch.device("cuda"), sum(lengths)
    inputs = [
        torch.randn(1, total, heads, 128, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for heads in (32, 4, 4)
    ]
    upstream = torch.randn(1, total, 32, 128, device=device, dtype=torch.bfloat16)
    kernel = engine.sample_lengths(lengths, None, device, torch.bfloat16, compiled=True)  # long samples, too
    calls = engine.SampleLengths(lengths, starts=kernel.starts, longest=kernel.longest)
    module = torch.nn.Module()

    def run_of(lengths: engine.SampleLengths) -> Run:
        def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return engine.attention(module, query, key, value, None, sample_lengths=lengths)[0]

        return with_gradients(function, inputs, upstream)

    report(f"attention, {len(lengths)} samples of {lengths[0]}", run_of(kernel), run_of(calls))


def experts(
    equal: bool, tokens: int = 16384, hidden: int = 2048, inner: int = 768, count: int = 128, k: int = 8
) -> None:
    from transformers.integrations import moe

    from megascend.engines.fsdp import transformers_api

    def normal(*size: int) -> Tensor:
        return (0.02 * torch.randn(size, device="cuda")).bfloat16().requires_grad_()

    up, down, states = normal(count, 2 * inner, hidden), normal(count, hidden, inner), normal(tokens, hidden)
    scores = torch.rand(tokens, count, device="cuda")
    if not equal:
        scores += torch.rand(count, device="cuda")
    weights, index = scores.softmax(-1).topk(k)
    shares = weights.bfloat16().requires_grad_()

    upstream = normal(tokens, hidden).detach()

    def run_of(function: Callable[..., Tensor]) -> Run:
        def computed(up: Tensor, down: Tensor, states: Tensor, shares: Tensor) -> Tensor:
            module: Any = SimpleNamespace(
                gate_up_proj=up, down_proj=down, num_experts=count, has_gate=True, has_bias=False, is_transposed=False,
                is_concatenated=True, has_post_expert_norm=False, _is_expert_parallel=False, act_fn=torch.nn.functional.silu,
            )  # fmt: skip
            module._apply_gate = lambda rows: moe._default_apply_gate(module, rows)
            return function(module, states, index, shares)

        return with_gradients(computed, [up, down, states, shares], upstream)

    grouped_mm = moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    report(
        f"experts, {'even' if equal else 'uneven'} loads",
        run_of(transformers_api.experts_products()),
        run_of(grouped_mm),
    )


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("this measures a CUDA GPU, and there is none")
    torch.manual_seed(1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ms: ours, the other, the other by ours")
    for lengths in ((4096,) * 4, (1024,) * 16, (256,) * 64, (64,) * 256, (8192, 4096, 2048, 1024, 512, 256, 128, 128)):
        attention(lengths)
    experts(True)
    experts(False)
