"""Causal attention of all samples of a packed row in one kernel: torch's flash attention with cumulative lengths.

On CUDA, in bf16 and fp16. The operator is private in torch, ``aten::_flash_attention_forward``; the part used here is the same in
torch 2.11 and 2.13, unlike ``torch.nn.attention.varlen``, which wraps it. It is wrapped in a custom operator, so that
``torch.compile`` and selective recomputation see one operator, and the longest sample is a tensor on the host, by whose value a
compiled layer is not specialised.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WIDEST_HEAD = 256
WIDTH_MULTIPLE = 8
OLDEST_CAPABILITY = (8, 0)


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Check whether the device has the kernel for tensors of ``dtype``."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.backends.cuda.is_flash_attention_available() and (
        torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY
    )


def fits(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Check whether the kernel supports heads of this width; it is correct only without dropout."""
    width = query.shape[-1]
    return dropout == 0 and width <= WIDEST_HEAD and width % WIDTH_MULTIPLE == 0 and value.shape[-1] == width


@torch.library.custom_op("megascend::varlen_attention", mutates_args=(), device_types="cuda")
def varlen_attention(
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
    """Compute causal attention within samples, whose queries are their last tokens.

    Args:
        query: [queries, heads, head dim], one sample after the other; ``key`` and ``value`` may have fewer heads.
        starts: int32 [samples + 1], the start of each sample's queries, and their number.
        key_starts: int32 [samples + 1], the same of its keys.
        longest: int64 [2] on the CPU: most queries and most keys of a sample.
        window: tokens that each token attends to, itself included; 0: all before it.
        sinks: [heads], a logit of each head that takes part in the softmax and has no value; None: the plain softmax.

    Returns:
        [queries, heads, head dim], and float32 [heads, queries]: logsumexp, with the sinks.
    """
    # In order: starts of queries and keys, longest of both, dropout, causal (from the bottom right), debug mask.
    outputs = torch.ops.aten._flash_attention_forward(
        query, key, value, starts, key_starts, *longest.tolist(), 0.0, True, False, scale=scale, **_window(window)
    )
    out, log_sums = outputs[:2]
    if sinks is None:
        return out, log_sums
    with_sinks = torch.logaddexp(log_sums, sinks.float()[:, None])
    # In place: the product is rounded once, from the factor in fp32.
    return out.mul_(torch.exp(log_sums - with_sinks).t()[..., None]), with_sinks


@torch.library.custom_op("megascend::varlen_attention_backward", mutates_args=(), device_types="cuda")
def varlen_attention_backward(
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
    """Compute the gradients of query, key and value.

    With sinks it is the same computation: the kernel takes the probabilities from ``log_sums``, and the mean gradient that the
    softmax subtracts from ``out``. Both have the sinks in them.
    """
    # The operator requires a random state, and does not read it without dropout.
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return torch.ops.aten._flash_attention_backward(
        grad.contiguous(),
        query,
        key,
        value,
        out,
        log_sums,
        starts,
        key_starts,
        *longest.tolist(),
        0.0,
        True,
        no_dropout,
        no_dropout.new_empty(()),
        scale=scale,
        **_window(window),
    )


def _window(window: int) -> dict[str, int]:
    """Convert a window to the kernel's arguments, which do not count the token itself."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


@varlen_attention.register_fake
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
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@varlen_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, key_starts, longest, ctx.scale, ctx.window, sinks = inputs
    # The backward kernel recomputes the probabilities from the output and logsumexp.
    ctx.save_for_backward(query, key, value, *output, starts, key_starts, longest, sinks)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    *saved, sinks = ctx.saved_tensors
    grads = torch.ops.megascend.varlen_attention_backward(grad, *saved, ctx.scale, ctx.window)
    sinks_grad = None
    if sinks is not None:
        out, log_sums = saved[3:5]
        probabilities = torch.exp(sinks.float()[:, None] - log_sums)
        # A sink's value is 0, so that its probability's gradient is minus the mean that the softmax subtracts.
        sinks_grad = -(probabilities * (grad.float() * out.float()).sum(-1).t()).sum(-1).to(sinks.dtype)
    return *grads, None, None, None, None, None, sinks_grad


varlen_attention.register_autograd(_backward, setup_context=_setup)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: Tensor,
    scaling: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Call :func:`varlen_attention` on [1, heads, tokens, head dim], and return the same shape."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    mixed, _ = torch.ops.megascend.varlen_attention(q, k, v, starts, key_starts, longest, scale, window or 0, sinks)
    return mixed.transpose(0, 1)[None]
