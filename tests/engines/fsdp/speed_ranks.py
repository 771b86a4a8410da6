"""Compiled layers of the FSDP engine, for a test: run as a script, so that nothing of Megatron is in its process.

    python speed_ranks.py JOB RESULT

JOB and RESULT as of ranks.py. The kernel for packed samples, which CPUs do not have, is replaced by plain products of matrices,
so that layers are compiled here as they are on CUDA.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch._dynamo.utils
from torch import Tensor

import megascend
from megascend.engines.fsdp import compilation
from megascend.testing import run_distributed
from megascend.testing.parity import LR, MAX_GRAD_NORM, WEIGHT_DECAY, causal_samples, token_lists
from megascend.training.kernels import varlen


def scores(query: Tensor, key: Tensor, starts: Tensor, scale: float, window: int) -> Tensor:
    """Compute [heads, tokens, tokens], minus infinity where a token does not attend to another."""
    positions = torch.arange(len(query))
    sample = torch.bucketize(positions, starts[1:].long(), right=True)
    distance = positions[:, None] - positions
    observed = (sample[:, None] == sample) & (distance >= 0) & (distance < (window or len(query)))
    return (torch.einsum("qhd,khd->hqk", query, key) * scale).masked_fill(~observed, -torch.inf)


def shared(states: Tensor, heads: int) -> Tensor:
    """Repeat keys or values for every query head."""
    return states.repeat_interleave(heads // states.shape[1], dim=1)


@varlen.varlen_attention.register_kernel("cpu")
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: Tensor,
    scale: float,
    window: int,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    assert sinks is None, "these models have none"
    key, value = shared(key, query.shape[1]), shared(value, query.shape[1])
    logits = scores(query, key, starts, scale, window)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), value).contiguous(), logits.logsumexp(-1)


@varlen.varlen_attention_backward.register_kernel("cpu")
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads = query.shape[1], key.shape[1]
    keys, values = shared(key, heads), shared(value, heads)
    weights = (scores(query, keys, starts, scale, window) - log_sums[..., None]).exp()
    weights_grad = torch.einsum("qhd,khd->hqk", grad, values) - (grad * out).sum(-1).t()[..., None]
    scores_grad = weights * weights_grad * scale
    query_grad = torch.einsum("hqk,khd->qhd", scores_grad, keys)
    key_grad = torch.einsum("hqk,qhd->khd", scores_grad, query).unflatten(1, (kv_heads, -1)).sum(2)
    value_grad = torch.einsum("hqk,qhd->khd", weights, grad).unflatten(1, (kv_heads, -1)).sum(2)
    return query_grad.contiguous(), key_grad, value_grad


def trajectory(checkpoint: str, world_size: int, backend: str, steps: int, **options: Any) -> dict[str, Any]:
    """Return losses, norms and compiled graphs so far of rank 0, after every step."""

    def on_rank() -> dict[str, Any]:
        adam = megascend.Adam(lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM)
        settings: dict[str, Any] = {"precision": "fp32", "optimizer": adam, "platform": "cpu", "timeout_s": 300}
        batching = megascend.Batching(micro_batch_tokens=64)
        compilation.BACKEND, varlen.available = backend, lambda device, dtype: True
        results: dict[str, Any] = {"losses": [], "norms": [], "graphs": []}
        with megascend.FsdpBackend(checkpoint, batching=batching, **settings | options) as trained:
            samples = trained.shard(causal_samples(token_lists()))
            for _ in range(steps):
                results["losses"].append(trained.forward_backward(samples).loss)
                results["norms"].append(trained.optimizer_step().grad_norm)
                results["graphs"].append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        results["breaks"] = dict(torch._dynamo.utils.counters["graph_break"])
        return results

    return run_distributed(on_rank, world_size, init=False, timeout_s=600)[0]


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    results = [globals()[name](*args, **options) for name, args, options in torch.load(sys.argv[1], weights_only=False)]
    torch.save(results, sys.argv[2])
