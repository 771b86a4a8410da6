"""The gated delta rule (Yang et al., "Gated Delta Networks", arXiv:2412.06464) by chunks and token by token.

A head's state S is a [key width, value width] matrix. Token t with decay ``exp(g)``, strength ``beta`` and key k, value v::

    S <- exp(g) S
    S <- S + k (beta (v - S^T k))^T
    output = S^T q / sqrt(key width)

Products are computed in fp32, or in fp64 if the inputs are. As fla's, the functions are not compiled: they depend on sequences'
lengths.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from megascend.errors import ConfigError

CHUNK = 64
"""Tokens of a chunk; the cost within one grows with its square, and chunks follow each other one by one."""


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """Divide by the root of the sum of squares over the last dimension plus ``eps``.

    Args:
        x: any shape; computed in fp32 at least.
        eps: added under the root, not to it.
        output_dtype: default: that of ``x``.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + eps)).to(output_dtype or x.dtype)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule for whole sequences, by chunks. Differentiable.

    Args:
        q: queries, [batch, tokens, key heads, key width]; a key head serves consecutive value heads.
        k: keys, as ``q``.
        v: values, [batch, tokens, value heads, value width].
        g: logarithm of the decay, at most 0, [batch, tokens, value heads].
        beta: strength of a token's correction, [batch, tokens, value heads].
        scale: factor of the outputs; default: 1 / sqrt(key width).
        initial_state: fp32, [sequences, value heads, key width, value width]; default: zeros.
        output_final_state: return the states after the last tokens as well, as ``initial_state``.
        use_qk_l2norm_in_kernel: apply :func:`l2norm` to queries and keys first.
        cu_seqlens: starts of packed sequences and the end of the last, int [sequences + 1]; the batch is 1 then. A sequence is
            computed by itself, so that others cannot change its outputs by a bit.

    Returns:
        outputs, as ``v`` and in its dtype, and the final states or None.
    """
    return _uncompiled(
        _chunked, (q, k, v, g, beta), scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule token by token, as a sampler does. Arguments are those of :func:`chunk_gated_delta_rule`."""
    return _uncompiled(
        _recurrent, (q, k, v, g, beta), scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def exact_in_fp32(kernel: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the chunked delta rule that calls ``kernel``, or the reference above if the queries are in fp32.

    The kernels of flash-linear-attention multiply fp32 in TF32: log-probabilities of a small model were off by 4e-3 on an H200.
    """

    @functools.wraps(kernel)
    def by_dtype(q: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return (chunk_gated_delta_rule if q.dtype == torch.float32 else kernel)(q, *args, **kwargs)

    return by_dtype


def _by_sequence(
    rule: Callable[..., tuple[Tensor, Tensor]],
    inputs: tuple[Tensor, ...],
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    normalise: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Prepare the inputs, and call ``rule`` for each packed sequence or for the whole batch."""
    q, k, v, g, beta = inputs
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    repeats = v.shape[2] // k.shape[2]
    if normalise:
        q, k = l2norm(q, output_dtype=dtype), l2norm(k, output_dtype=dtype)
    factor = k.shape[-1] ** -0.5 if scale is None else scale
    # [batch, heads, tokens, width]
    q, k = (x.to(dtype).repeat_interleave(repeats, dim=2).transpose(1, 2) for x in (q, k))
    wide_v, g, beta = (x.to(dtype).transpose(1, 2) for x in (v, g, beta))
    q = q * factor
    if cu_seqlens is None:
        starts = [0, v.shape[1]]
    else:
        starts = cu_seqlens.tolist()
        if v.shape[0] != 1 or starts[0] != 0 or starts[-1] != v.shape[1]:
            raise ConfigError(
                f"cu_seqlens from {starts[0]} to {starts[-1]} do not describe {v.shape[0]} x {v.shape[1]} tokens: packed "
                "sequences are one row, which they cover"
            )
    outputs, states = [], []
    for number, (start, end) in enumerate(itertools.pairwise(starts)):
        rows = slice(None) if cu_seqlens is None else slice(number, number + 1)
        shape = (v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
        state = v.new_zeros(shape, dtype=dtype) if initial_state is None else initial_state[rows].to(dtype)
        parts = (x[:, :, start:end] for x in (q, k, wide_v, g, beta))
        output, state = rule(*parts, state)
        outputs.append(output)
        states.append(state)
    final = torch.cat(states).to(torch.promote_types(dtype, torch.float32)) if output_final_state else None
    # Contiguous, as the kernels' outputs: models view them.
    return torch.cat(outputs, dim=2).transpose(1, 2).to(v.dtype).contiguous(), final


# Not torch.compiler.disable, which imports the compiler: every bootstrap would, and it sets variables of the environment.
_uncompiled: Any = _disable_dynamo(_by_sequence)


def _chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one batch of sequences; all tensors are [batch, heads, tokens, ...]."""
    tokens = q.shape[2]
    if tokens == 0:
        return v, state
    # Tokens after the end have no strength and no decay, and so change nothing.
    padding = -tokens % CHUNK if tokens > CHUNK else 0
    size = CHUNK if tokens > CHUNK else tokens
    q, k, v = (_chunks(torch.nn.functional.pad(x, (0, 0, 0, padding)), size) for x in (q, k, v))
    g, beta = (_chunks(torch.nn.functional.pad(x, (0, padding)), size) for x in (g, beta))
    # All exponents below are sums of g over consecutive tokens, at most 0: no factor exceeds 1, however strong the decay.
    decay = g.cumsum(dim=-1)  # from the chunk's start, inclusive
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    # exp() of the other half would overflow, and its gradient would be 0 * inf.
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~later, -torch.inf).exp()
    correction = beta.unsqueeze(-1) * between * (k @ k.transpose(-1, -2))
    # What a chunk's tokens write solves a unit lower triangular system: each sees what those before it have written.
    system = correction.tril(-1) + torch.eye(size, dtype=q.dtype, device=q.device)
    seen_state = k * (beta * decay.exp()).unsqueeze(-1)
    solved = torch.linalg.solve_triangular(
        system, torch.cat([v * beta.unsqueeze(-1), seen_state], dim=-1), upper=False, unitriangular=True
    )
    writes, erasures = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = (q @ k.transpose(-1, -2)) * between
    from_state = q * decay.exp().unsqueeze(-1)
    to_end = (decay[..., -1:] - decay).exp().unsqueeze(-1) * k
    outputs = []
    # Only the state passes from chunk to chunk; everything above is computed for all chunks at once.
    for chunk in range(q.shape[2]):
        values = writes[:, :, chunk] - erasures[:, :, chunk] @ state
        outputs.append(from_state[:, :, chunk] @ state + scores[:, :, chunk] @ values)
        chunk_decay = decay[:, :, chunk, -1, None, None].exp()
        state = chunk_decay * state + to_end[:, :, chunk].transpose(-1, -2) @ values
    return torch.cat(outputs, dim=2)[:, :, :tokens], state


def _chunks(x: Tensor, size: int) -> Tensor:
    """Divide the tokens, dimension 2, into chunks of ``size``."""
    return x.unflatten(2, (-1, size))


def _recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one batch of sequences; all tensors are [batch, heads, tokens, ...]."""
    outputs = []
    for token in range(q.shape[2]):
        key = k[:, :, token].unsqueeze(-1)
        state = state * g[:, :, token, None, None].exp()
        error = v[:, :, token] - (state * key).sum(dim=-2)
        state = state + key * (beta[:, :, token].unsqueeze(-1) * error).unsqueeze(-2)
        outputs.append((state * q[:, :, token].unsqueeze(-1)).sum(dim=-2))
    return (torch.stack(outputs, dim=2) if outputs else v), state
