"""Fused output projections of a model and its teacher, and the divergence of their distributions over the whole vocabulary.

Both projections are applied to one chunk of tokens at a time, so that a chunk's logits of each [chunk, vocabulary / TP] are the
largest tensors: neither model's logits of a micro batch exist, in the forward or in the backward pass, which recomputes them
from hidden states. Sums over the vocabulary are over all shards.

With p of the student, q of the teacher and m = beta q + (1 - beta) p, the gradient with respect to the student's logits is

- of KL(q || p): p - q
- of KL(p || q): p (log p - log q - KL(p || q))
- of beta KL(q || m) + (1 - beta) KL(p || m): (1 - beta) p (log p - log m - KL(p || m))
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megascend.training.kernels.linear_logprobs import Gradients, chunks
from megascend.training.kernels.low_rank import LowRank
from megascend.training.kernels.softmax import VocabShard, propagate_cap_

CHUNK_BYTES = 2**28
"""Upper bound on one fp32 copy of a chunk's logits, of which there are up to seven: 440 tokens with 152 thousand rows."""

DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True, eq=False)
class TeacherDivergence:
    """Divergence from a teacher whose last hidden states are known.

    Attributes:
        kind: ``forward_kl``: KL(teacher || student); ``reverse_kl``: KL(student || teacher); ``jsd``: the generalised
            Jensen-Shannon divergence (Agarwal et al. 2024, eq. 1), beta KL(teacher || m) + (1 - beta) KL(student || m).
        weight: [rows, teacher's h], the teacher's output layer: the rows of this rank's vocabulary shard, without padding. None
            on ranks that compute no loss (earlier pipeline stages).
        beta: weight of the teacher in m, above 0 and below 1; for ``jsd``.
        cap: of the teacher's logits, as in :class:`megascend.training.kernels.softmax.VocabShard`.
    """

    kind: DivergenceKind
    weight: Tensor | None
    beta: float = 0.5
    cap: float | None = None

    def describe(self) -> str:
        """Describe what must be equal on all ranks."""
        return f"{self.kind}, beta={self.beta:g}" if self.kind == "jsd" else self.kind


@dataclass(frozen=True)
class _Chunk:
    """Logits of both models at this shard's rows, fp32 (float64 for float64) [tokens, rows], and the student's tanh of chunks."""

    tokens: slice
    student: Tensor
    teacher: Tensor
    tanh: Tensor | None


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        down: Tensor | None,
        targets: Tensor,
        states: Tensor,
        divergence: TeacherDivergence,
        shard: VocabShard,
        direct: bool,
        lora_delta: LowRank | None,
    ):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        count, local_targets = len(hidden), shard.local(targets)
        log_sums = torch.empty(2, count, dtype=dtype, device=hidden.device)
        # The target's log-probability, and one or two sums over the vocabulary, of which the last has a part in the gradient.
        sums = torch.zeros(3 if divergence.kind == "jsd" else 2, count, dtype=dtype, device=hidden.device)
        rows = weight[: shard.rows]
        for part in _chunks(hidden, rows, states, divergence, down, lora_delta, shard.cap):
            for number, logits in enumerate((part.student, part.teacher)):
                log_sums[number, part.tokens] = _log_sum(logits, shard)
                logits.sub_(log_sums[number, part.tokens, None])
            student, teacher = part.student, part.teacher
            local = local_targets[part.tokens]
            if student.shape[1]:
                selected = student.gather(1, local.clamp_min(0)[:, None])[:, 0]
                sums[0, part.tokens] = torch.where(local >= 0, selected, 0.0)
            for number, value in enumerate(_terms(divergence, student, teacher), 1):
                sums[number, part.tokens] = value
        if shard.group is not None:
            dist.all_reduce(sums, group=shard.group)
        value = sums[1]
        if divergence.kind == "jsd":
            value = divergence.beta * sums[1] + (1 - divergence.beta) * sums[2]
        ctx.save_for_backward(hidden, weight, down, local_targets, states, log_sums, sums[-1])
        ctx.divergence, ctx.shard, ctx.direct, ctx.lora_delta = divergence, shard, direct, lora_delta
        # Copies: both are views of ``sums``, a row of which is saved for the backward pass.
        return sums[0].clone(), value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        grad_logprobs, grad_divergence = grads
        assert grad_logprobs is not None, "autograd makes zeros of outputs that are not used"
        assert grad_divergence is not None
        hidden, weight, down, local_targets, states, log_sums, own_sum = ctx.saved_tensors
        divergence, shard = ctx.divergence, ctx.shard
        gradients = Gradients(ctx.needs_input_grad, hidden, weight, down, shard, ctx.direct, ctx.lora_delta)
        for part in _chunks(hidden, weight[: shard.rows], states, divergence, down, ctx.lora_delta, shard.cap):
            tokens = part.tokens
            student = part.student.sub_(log_sums[0, tokens, None])
            teacher = part.teacher.sub_(log_sums[1, tokens, None])
            probabilities = student.exp()
            if divergence.kind == "forward_kl":
                gradient = probabilities - teacher.exp_()
            else:
                factor = 1.0
                if divergence.kind == "jsd":
                    factor, teacher = 1 - divergence.beta, _mixture(divergence, student, teacher)
                gradient = student.sub_(teacher).sub_(own_sum[tokens, None]).mul_(probabilities).mul_(factor)
            factors = grad_divergence[tokens, None]
            # Not 0 times infinity: a teacher may overflow at a token that is not learned.
            gradient.mul_(factors).masked_fill_(factors == 0, 0.0)
            scale = grad_logprobs[tokens]
            gradient.addcmul_(probabilities, scale[:, None], value=-1)
            if gradient.shape[1]:
                # Targets of other shards add 0, to column 0.
                amount = torch.where(local_targets[tokens] >= 0, scale, 0.0)
                gradient.scatter_add_(1, local_targets[tokens].clamp_min(0)[:, None], amount[:, None])
            propagate_cap_(gradient, part.tanh)
            gradients.add(gradient.to(hidden.dtype), tokens)
        return *gradients.for_autograd(), None, None, None, None, None, None


def _chunks(
    hidden: Tensor,
    rows: Tensor,
    states: Tensor,
    divergence: TeacherDivergence,
    down: Tensor | None,
    lora_delta: LowRank | None,
    cap: float | None,
) -> Iterator[_Chunk]:
    """Yield the logits of both models, a chunk of tokens at a time; the consumer may change the logits."""
    assert divergence.weight is not None, "the loss is computed on ranks with the teacher's output layer"
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    # Chunks of 128 tokens at least: the width of a matrix product.
    size = max(128, CHUNK_BYTES // (dtype.itemsize * max(len(rows), 1)) // 128 * 128)
    for tokens, logits, tanh in chunks(hidden, rows, down, lora_delta, size=size, cap=cap):
        teacher = torch.mm(states[tokens], divergence.weight.t())
        if divergence.cap is not None:
            teacher.div_(divergence.cap).tanh_().mul_(divergence.cap)
        # A copy of the student's: the buffer of its chunks is reused.
        yield _Chunk(tokens, logits.to(dtype, copy=True), teacher.to(dtype), tanh)


def _log_sum(logits: Tensor, shard: VocabShard) -> Tensor:
    """Return the log of the sum of exponentials over the whole vocabulary [n] from this shard's ``logits`` [n, rows]."""
    # A shard of padding only has no rows.
    maximum = logits.amax(1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
    if shard.group is not None:
        # Before the exponentials: all shards must subtract the same maximum, or their sums could not be added.
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=shard.group)
    total = (logits - maximum[:, None]).exp_().sum(1)
    if shard.group is not None:
        dist.all_reduce(total, group=shard.group)
    return maximum + total.log()


def _terms(divergence: TeacherDivergence, student: Tensor, teacher: Tensor) -> list[Tensor]:
    """Return this shard's part of the divergence [n], for ``jsd`` of KL(teacher || m) and of KL(student || m).

    Args:
        student, teacher: log-probabilities [n, rows].
    """
    if divergence.kind == "forward_kl":
        return [_kl(teacher, student)]
    if divergence.kind == "reverse_kl":
        return [_kl(student, teacher)]
    mixture = _mixture(divergence, student, teacher)
    return [_kl(teacher, mixture), _kl(student, mixture)]


def _kl(first: Tensor, second: Tensor) -> Tensor:
    return (first - second).mul_(first.exp()).sum(1)


def _mixture(divergence: TeacherDivergence, student: Tensor, teacher: Tensor) -> Tensor:
    """Return log m of log-probabilities."""
    return torch.logaddexp(teacher + math.log(divergence.beta), student + math.log1p(-divergence.beta))


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabShard,
    states: Tensor,
    divergence: TeacherDivergence,
    direct_weight_gradient: bool = False,
    down: Tensor | None = None,
    lora_delta: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each target, and the divergence of each distribution from the teacher's.

    Args:
        hidden, weight, targets, shard, direct_weight_gradient, down, lora_delta: as for
            :func:`megascend.training.kernels.linear_logprobs.linear_logprobs`.
        states: [n, teacher's h], the teacher's last hidden states, in the dtype of its output layer; equal on all ranks of the
            tensor parallel group. Without gradient.
        divergence: kind, and the teacher's output layer.

    Returns:
        fp32 [n] each (float64 for float64), with gradients with respect to ``hidden``, ``weight`` and ``down``.
    """
    return _LinearDivergence.apply(
        hidden, weight, down, targets, states, divergence, shard, direct_weight_gradient, lora_delta
    )
