"""Check and time kernels that reduce the memory traffic of a training step, in one table.

    python scripts/bench_kernels.py                  # one CUDA GPU, under a minute; --only head|qk|swiglu
    python scripts/bench_kernels.py --device cpu     # the plain PyTorch variants at toy sizes: checks this script

Shapes are Qwen3-1.7B's. Every variant runs forward and backward on the same inputs. ``error`` is the largest relative
2-norm difference of its results (outputs and all gradients) from the same arithmetic in fp32; ``GiB`` is the peak above
what was allocated before; ``GB moved`` is the least traffic the part needs (inputs read once, outputs written once).

- head: output projection and cross entropy. ``logits`` keeps [tokens, vocabulary] as Megatron-Core does, with PyTorch's
  or Transformer Engine's cross entropy. ``chunks`` takes a chunk of tokens at a time, forms the gradient of the logits
  in place while they exist, and adds the weight gradient to an fp32 buffer in the GEMM.
- qk: splitting the projection, RMSNorm of queries and keys, rotary embedding. ``plain`` is what mcore-bridge runs,
  ``te`` has Transformer Engine's kernels, ``triton`` is one kernel each way.
- swiglu: ``plain`` is megatron-core's unfused MLP activation, ``fused`` its ``bias_activation_fusion``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

Results = dict[str, torch.Tensor]
ERROR_BOUND = 2e-2
"""Relative; bf16 results against fp32 arithmetic on the same bf16 inputs."""


@dataclass(frozen=True)
class Sizes:
    """Tokens of a micro batch and the model's shapes."""

    tokens: int = 8192
    hidden: int = 2048
    vocab: int = 151936
    ffn: int = 6144
    heads: int = 16
    groups: int = 8
    head_dim: int = 128
    length: int = 4096


TOY = Sizes(tokens=64, hidden=32, vocab=320, ffn=48, heads=4, groups=2, head_dim=16, length=32)


# --- kernels ----------------------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def _softmax_gradient(logits, targets, weights, losses, stride, vocab, BLOCK: tl.constexpr):
        """Process one row: loss, then logits <- weight * (softmax - onehot) in place. The second read hits the L2 cache."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        target = tl.load(targets + row)
        weight = tl.load(weights + row)
        target_logit = tl.load(logits + target).to(tl.float32)  # before the loop, whose reductions are barriers
        maximum = float("-inf")
        total = 0.0
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(logits + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(maximum, tl.max(x, axis=0))
            total = total * tl.exp(maximum - larger) + tl.sum(tl.exp(x - larger), axis=0)
            maximum = larger
        log_sum = maximum + tl.log(total)
        tl.store(losses + row, log_sum - target_logit)
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < vocab
            x = tl.load(logits + columns, mask=inside, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - log_sum)
            gradient = tl.where(columns == target, gradient - 1.0, gradient) * weight
            tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=inside)

    @triton.jit
    def _norm_rotate(x, out, weight, cos, sin, offset, eps, HALF: tl.constexpr):
        """RMSNorm and rotation of the rows at ``x + offset`` into ``out``, by halves: they turn into each other."""
        column = tl.arange(0, HALF)
        first = tl.load(x + offset[:, None] + column[None, :]).to(tl.float32)
        second = tl.load(x + offset[:, None] + HALF + column[None, :]).to(tl.float32)
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        first = first * scale * tl.load(weight + column).to(tl.float32)[None, :]
        second = second * scale * tl.load(weight + HALF + column).to(tl.float32)[None, :]
        tl.store(out + column[None, :], (first * cos - second * sin).to(out.dtype.element_ty))
        tl.store(out + HALF + column[None, :], (second * cos + first * sin).to(out.dtype.element_ty))

    @triton.jit
    def _qkv_forward(
        mixed, q, k, v, q_weight, k_weight, cosines, sines, length, batch, eps,
        HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr,
    ):  # fmt: skip
        """Process one token: mixed [groups, (heads / groups + 2) * dim] -> q [heads, dim], k and v [groups, dim]."""
        token = tl.program_id(0).to(tl.int64)
        HALF: tl.constexpr = DIM // 2
        PER: tl.constexpr = HEADS // GROUPS
        ROW: tl.constexpr = (PER + 2) * DIM
        position = (token // batch) % length
        column = tl.arange(0, HALF)
        cos = tl.load(cosines + position * HALF + column)[None, :]
        sin = tl.load(sines + position * HALF + column)[None, :]
        mixed += token * GROUPS * ROW
        head = tl.arange(0, HEADS)
        group = tl.arange(0, GROUPS)
        q_offset = (head // PER) * ROW + (head % PER) * DIM
        k_offset = group * ROW + PER * DIM
        _norm_rotate(mixed, q + (token * HEADS + head)[:, None] * DIM, q_weight, cos, sin, q_offset, eps, HALF)
        _norm_rotate(mixed, k + (token * GROUPS + group)[:, None] * DIM, k_weight, cos, sin, k_offset, eps, HALF)
        wide = tl.arange(0, DIM)
        value = tl.load(mixed + (k_offset + DIM)[:, None] + wide[None, :])
        tl.store(v + (token * GROUPS + group)[:, None] * DIM + wide[None, :], value)

    @triton.jit
    def _norm_rotate_back(x, dx, grad, weight, cos, sin, offset, eps, HALF: tl.constexpr):
        """Gradient of ``_norm_rotate``: writes dx at the same offsets, returns the weight's gradient in halves."""
        column = tl.arange(0, HALF)
        first = tl.load(x + offset[:, None] + column[None, :]).to(tl.float32)
        second = tl.load(x + offset[:, None] + HALF + column[None, :]).to(tl.float32)
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        g1 = tl.load(grad + column[None, :]).to(tl.float32)
        g2 = tl.load(grad + HALF + column[None, :]).to(tl.float32)
        d1 = g1 * cos + g2 * sin
        d2 = g2 * cos - g1 * sin
        first *= scale
        second *= scale
        w1 = d1 * tl.load(weight + column).to(tl.float32)[None, :]
        w2 = d2 * tl.load(weight + HALF + column).to(tl.float32)[None, :]
        mean = ((tl.sum(w1 * first, 1) + tl.sum(w2 * second, 1)) / (2 * HALF))[:, None]
        kind = dx.dtype.element_ty
        tl.store(dx + offset[:, None] + column[None, :], (scale * (w1 - first * mean)).to(kind))
        tl.store(dx + offset[:, None] + HALF + column[None, :], (scale * (w2 - second * mean)).to(kind))
        return tl.sum(d1 * first, 0), tl.sum(d2 * second, 0)

    @triton.jit
    def _qkv_backward(
        mixed, dmixed, dq, dk, dv, q_weight, k_weight, cosines, sines, q_partial, k_partial, tokens, length, batch, eps,
        HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr,
    ):  # fmt: skip
        """Process a share of the tokens and one row of the partial sums of the weights' gradients."""
        program = tl.program_id(0)
        HALF: tl.constexpr = DIM // 2
        PER: tl.constexpr = HEADS // GROUPS
        ROW: tl.constexpr = (PER + 2) * DIM
        column = tl.arange(0, HALF)
        head = tl.arange(0, HEADS)
        group = tl.arange(0, GROUPS)
        q_offset = (head // PER) * ROW + (head % PER) * DIM
        k_offset = group * ROW + PER * DIM
        wide = tl.arange(0, DIM)
        q1 = tl.zeros([HALF], tl.float32)
        q2 = tl.zeros([HALF], tl.float32)
        k1 = tl.zeros([HALF], tl.float32)
        k2 = tl.zeros([HALF], tl.float32)
        programs = tl.num_programs(0)
        for turn in range(tl.cdiv(tokens - program, programs)):
            token = (program + turn * programs).to(tl.int64)
            position = (token // batch) % length
            cos = tl.load(cosines + position * HALF + column)[None, :]
            sin = tl.load(sines + position * HALF + column)[None, :]
            x = mixed + token * GROUPS * ROW
            dx = dmixed + token * GROUPS * ROW
            q_grad = dq + (token * HEADS + head)[:, None] * DIM
            k_grad = dk + (token * GROUPS + group)[:, None] * DIM
            first, second = _norm_rotate_back(x, dx, q_grad, q_weight, cos, sin, q_offset, eps, HALF)
            q1 += first
            q2 += second
            first, second = _norm_rotate_back(x, dx, k_grad, k_weight, cos, sin, k_offset, eps, HALF)
            k1 += first
            k2 += second
            value = tl.load(dv + (token * GROUPS + group)[:, None] * DIM + wide[None, :])
            tl.store(dx + (k_offset + DIM)[:, None] + wide[None, :], value)
        tl.store(q_partial + program * DIM + column, q1)
        tl.store(q_partial + program * DIM + HALF + column, q2)
        tl.store(k_partial + program * DIM + column, k1)
        tl.store(k_partial + program * DIM + HALF + column, k2)


# --- output projection and cross entropy ------------------------------------------------------------------------------


def add_weight_gradient(main_grad: torch.Tensor, dlogits: torch.Tensor, hidden: torch.Tensor) -> None:
    """main_grad (fp32) += dlogits^T hidden, accumulated inside the GEMM where Transformer Engine is there."""
    try:
        from transformer_engine.pytorch.cpp_extensions import general_gemm
    except ImportError:
        main_grad += (dlogits.t() @ hidden).float()
        return
    general_gemm(hidden, dlogits, out_dtype=torch.float32, layout="NT", out=main_grad, accumulate=True, grad=True)


def head_logits(cross_entropy: Callable[..., torch.Tensor]) -> Callable[..., Results]:
    """Compute all logits at once, gradients by autograd, the weight's gradient added to the fp32 buffer afterwards."""

    def run(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> Results:
        main_grad = buffer_like(weight)
        hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        losses = cross_entropy(hidden @ weight.t(), targets)
        (losses * weights).sum().backward()
        main_grad.add_(weight.grad)
        return {"losses": losses.detach(), "d hidden": hidden.grad, "d weight": main_grad}

    return run


def head_chunks(chunk: int, softmax_gradient: Callable[..., torch.Tensor]) -> Callable[..., Results]:
    """Compute the loss a chunk of tokens at a time: no logits outlive their chunk, and nothing is saved for the backward pass."""

    def run(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> Results:
        main_grad = buffer_like(weight)
        d_hidden = torch.empty_like(hidden)
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        logits = torch.empty(min(chunk, len(hidden)), len(weight), dtype=hidden.dtype, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            part = slice(start, min(start + chunk, len(hidden)))
            rows = logits[: part.stop - start]
            torch.mm(hidden[part], weight.t(), out=rows)
            losses[part] = softmax_gradient(rows, targets[part], weights[part])
            torch.mm(rows, weight, out=d_hidden[part])
            add_weight_gradient(main_grad, rows, hidden[part])
        return {"losses": losses, "d hidden": d_hidden, "d weight": main_grad}

    return run


MAIN_GRADS: dict[tuple[int, ...], torch.Tensor] = {}


def buffer_like(weight: torch.Tensor) -> torch.Tensor:
    """Return the fp32 gradient buffer, which exists in every step; zeroed outside the timed part of a real step."""
    key = tuple(weight.shape)
    if key not in MAIN_GRADS:
        MAIN_GRADS[key] = torch.zeros(key, dtype=torch.float32, device=weight.device)
    return MAIN_GRADS[key].zero_()


def softmax_gradient_torch(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute it in plain PyTorch, with an fp32 copy of the chunk."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    losses = -log_p.gather(1, targets[:, None])[:, 0]
    gradient = log_p.exp_()
    gradient.scatter_add_(1, targets[:, None], torch.full_like(losses, -1.0)[:, None])
    logits.copy_(gradient.mul_(weights[:, None]))
    return losses


def softmax_gradient_triton(block: int, warps: int) -> Callable[..., torch.Tensor]:
    """Compute it in one kernel."""

    def run(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        _softmax_gradient[(len(logits),)](
            logits, targets, weights, losses, logits.stride(0), logits.shape[1], BLOCK=block, num_warps=warps
        )
        return losses

    return run


def te_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Call Transformer Engine's cross entropy as megatron-core does for "te"; logits are [sequence, batch, vocabulary]."""
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    return parallel_cross_entropy(logits[:, None], targets[:, None], 0.0, False, None)[:, 0]


def torch_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="none")


# --- queries and keys -------------------------------------------------------------------------------------------------


def rope_table(sizes: Sizes, device: str) -> torch.Tensor:
    """Angles [length, 1, 1, head_dim], both halves alike, as megatron-core's RotaryEmbedding gives them."""
    exponent = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32, device=device) / sizes.head_dim
    angles = torch.outer(torch.arange(sizes.length, dtype=torch.float32, device=device), 1e6**-exponent)
    return torch.cat((angles, angles), dim=-1)[:, None, None]


def rotate_plain(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Compute mcore-bridge's unfused path."""
    width = angles.shape[-1]
    x, rest = x[..., :width], x[..., width:]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = torch.chunk(x, 2, dim=-1)
    x = x * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((x, rest), dim=-1)


def split_qkv(mixed: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[s, b, groups * (heads / groups + 2) * dim] to q [s, b, heads, dim], k and v [s, b, groups, dim]."""
    per, dim = sizes.heads // sizes.groups, sizes.head_dim
    mixed = mixed.view(*mixed.shape[:2], sizes.groups, (per + 2) * dim)
    q, k, v = torch.split(mixed, [per * dim, dim, dim], dim=3)
    return q.reshape(*q.shape[:2], sizes.heads, dim), k, v


class FusedQkv(torch.autograd.Function):
    """Split, normalise and rotate in one kernel; keeps nothing but the projection's output."""

    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, *rest: Any):
        cosines, sines, sizes = rest
        s, b, _ = mixed.shape
        q = mixed.new_empty(s, b, sizes.heads, sizes.head_dim)
        k = mixed.new_empty(s, b, sizes.groups, sizes.head_dim)
        v = torch.empty_like(k)
        shape = {"HEADS": sizes.heads, "GROUPS": sizes.groups, "DIM": sizes.head_dim}
        _qkv_forward[(s * b,)](
            mixed, q, k, v, q_weight, k_weight, cosines, sines, sizes.length, b, 1e-6, **shape, num_warps=4
        )
        ctx.save_for_backward(mixed, q_weight, k_weight, cosines, sines)
        ctx.sizes, ctx.shape = sizes, shape
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor):  # type: ignore[override]
        mixed, q_weight, k_weight, cosines, sines = ctx.saved_tensors
        s, b, _ = mixed.shape
        programs = 8 * torch.cuda.get_device_properties(mixed.device).multi_processor_count
        q_partial = torch.empty(programs, ctx.sizes.head_dim, dtype=torch.float32, device=mixed.device)
        k_partial = torch.empty_like(q_partial)
        dmixed = torch.empty_like(mixed)
        _qkv_backward[(programs,)](
            mixed, dmixed, dq.contiguous(), dk.contiguous(), dv.contiguous(), q_weight, k_weight, cosines, sines,
            q_partial, k_partial, s * b, ctx.sizes.length, b, 1e-6, **ctx.shape, num_warps=4,
        )  # fmt: skip
        return dmixed, q_partial.sum(0).to(q_weight.dtype), k_partial.sum(0).to(k_weight.dtype), None, None, None


def qk_variant(kind: str, sizes: Sizes) -> Callable[..., Results]:
    """Forward and backward of one way of making queries, keys and values."""

    modules: list[torch.nn.Module] = []

    def run(mixed: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, angles: torch.Tensor, *grads: Any):
        mixed = mixed.detach().requires_grad_()
        weights = [weight.detach().requires_grad_() for weight in (q_weight, k_weight)]
        if kind == "triton":
            half = angles[:, 0, 0, : sizes.head_dim // 2]
            outputs = FusedQkv.apply(mixed, *weights, half.cos().contiguous(), half.sin().contiguous(), sizes)
        else:
            in_te = mixed.is_cuda and mixed.dtype == torch.bfloat16
            if in_te:
                modules[:] = modules or te_norms(weights)
                weights = [module.weight for module in modules]
                for weight in weights:
                    weight.grad = None
            q, k, v = split_qkv(mixed, sizes)
            pairs = zip((q, k), weights, modules if in_te else (None, None), strict=True)
            q, k = (rms_norm(x, weight, module) for x, weight, module in pairs)
            if kind == "te":
                from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

                q, k = (apply_rotary_pos_emb(x, angles, tensor_format="sbhd", fused=True) for x in (q, k))
            else:
                q, k = (rotate_plain(x, angles) for x in (q, k))
            outputs = (q, k, v.contiguous())  # fused attention wants three tensors of one layout
        torch.autograd.backward(outputs, grads)
        names = ("q", "k", "v")
        result = {name: out.detach() for name, out in zip(names, outputs, strict=True)}
        return result | {"d mixed": mixed.grad, "d q norm": weights[0].grad, "d k norm": weights[1].grad}

    return run


def rms_norm(x: torch.Tensor, weight: torch.Tensor, te_module: torch.nn.Module | None) -> torch.Tensor:
    """Apply Transformer Engine's kernel if a module of it is given, else PyTorch."""
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6) if te_module is None else te_module(x)


def te_norms(weights: list[torch.Tensor]) -> list[torch.nn.Module]:
    """Build Transformer Engine's RMSNorm modules with these weights."""
    from transformer_engine.pytorch import RMSNorm

    modules = []
    for weight in weights:
        module = RMSNorm(len(weight), eps=1e-6, params_dtype=weight.dtype, device=weight.device)
        module.weight.data.copy_(weight)
        modules.append(module)
    return modules


# --- activation -------------------------------------------------------------------------------------------------------


def swiglu_variant(kind: str) -> Callable[..., Results]:
    """SiLU(gate) * up of [tokens, 2 * ffn], forward and backward."""

    def activate(x: torch.Tensor) -> torch.Tensor:
        if kind == "fused":
            from megatron.core.fusions.fused_bias_swiglu import SwiGLUFunction

            return SwiGLUFunction.apply(x, False, False)
        gate, up = torch.chunk(x, 2, dim=-1)
        return F.silu(gate) * (up + 0.0)  # megatron-core 0.16 adds glu_linear_offset, zero or not

    def run(x: torch.Tensor, grad: torch.Tensor) -> Results:
        x = x.detach().requires_grad_()
        out = activate(x)
        out.backward(grad)
        return {"out": out.detach(), "d x": x.grad}

    return run


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(run: Callable[..., Results], inputs: tuple[Any, ...], repeats: int) -> tuple[float, float, Results]:
    """Median milliseconds, peak GiB above the start, and the results."""
    cuda = inputs[0].is_cuda
    for _ in range(2):
        results = run(*inputs)
    del results
    times = []
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    for _ in range(repeats):
        if cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            results = run(*inputs)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            results = run(*inputs)
            times.append(1000 * (time.perf_counter() - begin))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else 0.0
    return statistics.median(times), peak, results


def error(results: Results, exact: Results) -> tuple[float, str]:
    """Return the largest relative 2-norm difference and its name. NaN counts as infinite."""
    largest, name = 0.0, ""
    for key, expected in exact.items():
        gap = ((results[key].float() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
        if not gap <= largest:
            largest, name = (gap if gap == gap else float("inf")), key
    return largest, name


def in_fp32(run: Callable[..., Results], inputs: tuple[Any, ...]) -> Results:
    """Return the results of ``run`` on fp32 copies of the inputs, without TF32. Copied, since buffers are reused."""
    wide = tuple(x.float() if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs)
    return {key: value.float().clone() for key, value in run(*wide).items()}


def parts(sizes: Sizes, device: str) -> dict[str, tuple[tuple[Any, ...], float, dict[str, Callable[..., Results]]]]:
    """Build for every part: inputs, least GB moved, and variants, the first of them the arithmetic to compare with."""
    dtype = torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)

    def randn(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, generator=generator, device=device) * scale).to(dtype)

    cuda = device == "cuda"
    t = sizes.tokens
    targets = torch.randint(0, sizes.vocab, (t,), generator=generator, device=device)
    weights = torch.full((t,), 1.0, device=device)
    head: dict[str, Callable[..., Results]] = {"logits torch": head_logits(torch_cross_entropy)}
    if cuda:
        head["logits te"] = head_logits(te_cross_entropy)
    for chunk in (2048, 4096, 8192) if cuda else (24,):
        head[f"chunks {chunk} torch"] = head_chunks(chunk, softmax_gradient_torch)
        if cuda and triton is not None:
            head[f"chunks {chunk} triton"] = head_chunks(chunk, softmax_gradient_triton(8192, 8))
    if cuda and triton is not None:
        head["chunks 4096 triton block 4096 x 4"] = head_chunks(4096, softmax_gradient_triton(4096, 4))
        head["chunks 4096 triton block 16384 x 16"] = head_chunks(4096, softmax_gradient_triton(16384, 16))
    head_inputs = (randn(t, sizes.hidden), randn(sizes.vocab, sizes.hidden, scale=0.02), targets, weights)
    head_moved = (4 * t * sizes.hidden + 4 * sizes.vocab * sizes.hidden + 8 * sizes.vocab * sizes.hidden) / 1e9

    batch = max(1, t // sizes.length)
    q_size, k_size = (
        (sizes.length, batch, sizes.heads, sizes.head_dim),
        (
            sizes.length,
            batch,
            sizes.groups,
            sizes.head_dim,
        ),
    )
    width = (sizes.heads + 2 * sizes.groups) * sizes.head_dim
    qk_inputs = (
        randn(sizes.length, batch, width),
        1 + randn(sizes.head_dim, scale=0.1),
        1 + randn(sizes.head_dim, scale=0.1),
        rope_table(sizes, device),
        randn(*q_size),
        randn(*k_size),
        randn(*k_size),
    )
    kinds = ["plain", "te", "triton"] if cuda and triton is not None else ["plain"]
    qk: dict[str, Callable[..., Results]] = {kind: qk_variant(kind, sizes) for kind in kinds}

    swiglu_inputs = (randn(t, 2 * sizes.ffn), randn(t, sizes.ffn))
    swiglu = {kind: swiglu_variant(kind) for kind in (("plain", "fused") if cuda else ("plain",))}
    return {
        "head": (head_inputs, head_moved, head),
        "qk": (qk_inputs, t * width * 2 * 5 / 1e9, qk),
        "swiglu": (swiglu_inputs, t * sizes.ffn * 2 * 8 / 1e9, swiglu),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=("head", "qk", "swiglu"))
    parser.add_argument("--tokens", type=int, help="tokens of a micro batch; default 8192")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    sizes = TOY if arguments.device == "cpu" else Sizes(tokens=arguments.tokens or Sizes.tokens)
    torch.backends.cuda.matmul.allow_tf32 = False
    rows, bad = [], 0
    for part, (inputs, moved, variants) in parts(sizes, arguments.device).items():
        if arguments.only not in (None, part):
            continue
        exact = in_fp32(next(iter(variants.values())), inputs)
        for name, run in variants.items():
            try:
                milliseconds, peak, results = measure(run, inputs, arguments.repeats)
            except Exception as failure:  # noqa: BLE001 - one variant that does not run must not cost the others
                rows.append((part, name, "", "", "", "", f"FAILED {type(failure).__name__}: {str(failure)[:300]}"))
                bad += 1
                continue
            error_value, worst_name = error(results, exact)
            bad += not error_value <= ERROR_BOUND
            flag = "" if error_value <= ERROR_BOUND else "  BEYOND THE BOUND"
            figures = (f"{milliseconds:.3f}", f"{peak:.2f}", f"{moved:.2f}", f"{error_value:.1e}")
            rows.append((part, name, *figures, worst_name + flag))
            del results
    header = ("part", "variant", "ms", "GiB", "GB moved", "error", "of")
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(6)]
    print(
        f"{torch.cuda.get_device_name() if arguments.device == 'cuda' else 'CPU'}, torch {torch.__version__}, {sizes}"
    )
    for row in [header, *rows]:
        print(*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[6], sep="  ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
