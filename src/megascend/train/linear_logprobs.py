"""From hidden states to log-probabilities of the targets, without ever holding the logits of a whole micro batch.

The output projection is applied to a chunk of tokens at a time; a chunk's fp32 logits [chunk, vocabulary / TP] are the
largest thing that exists. With tensor parallelism every rank has some rows of the vocabulary, and the softmax is put
together from each rank's maximum and sum (the log-sum-exp identity), as in Megatron-LM's vocab-parallel cross entropy
(Shoeybi et al. 2019, section 3).

Two ways back:

- :func:`linear_logprobs` works for any loss. It keeps hidden states and one number per token, and computes the logits a
  second time in the backward pass.
- :func:`linear_cross_entropy` knows its loss, so it forms the gradient while a chunk's logits are at hand (the idea is
  Liger-Kernel's fused linear cross entropy): no second projection, no stored logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 512 * 2**20
"""Upper bound on the fp32 logits of one chunk, in bytes."""


@dataclass(frozen=True)
class VocabShard:
    """The rows of the vocabulary that this rank has.

    Attributes:
        start: first token id of this rank's rows.
        rows: rows that stand for real tokens; what follows in the weight is padding and takes no part in the softmax.
        group: the tensor parallel group, or None if this rank has the whole vocabulary.
    """

    start: int
    rows: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of_rank(cls, vocab_size: int, local_rows: int, rank: int, group: dist.ProcessGroup | None) -> VocabShard:
        """The shard of tensor parallel ``rank`` where every rank's weight has ``local_rows`` rows."""
        start = rank * local_rows
        return cls(start, max(0, min(local_rows, vocab_size - start)), group)

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """All-reduce ``tensor`` in place over the group, where there is one."""
        if self.group is not None:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor


@dataclass(frozen=True)
class _Softmax:
    """One chunk's projection: fp32 ``exponentials`` [c, rows] = exp(logits - max), with the sums over the vocabulary."""

    exponentials: Tensor
    sums: Tensor
    target_exponents: Tensor  # logit of the target minus the maximum, [c]
    weighted: Tensor | None  # sum of exponential * (logit - max), [c], for the entropy


def chunk_size(rows: int) -> int:
    """Tokens of one chunk, so that its logits stay under ``CHUNK_BYTES``."""
    return max(64, CHUNK_BYTES // (4 * max(rows, 1)))


def project(hidden: Tensor, weight: Tensor) -> Tensor:
    """fp32 logits [c, rows] of ``hidden`` [c, h] and ``weight`` [rows, h]."""
    return torch.nn.functional.linear(hidden, weight).float()


def _softmax(hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard, entropy: bool) -> _Softmax:
    logits = project(hidden, weight)
    if shard.rows:
        maximum = logits.amax(dim=-1)
    else:
        maximum = logits.new_full((len(logits),), float("-inf"))
    shard.reduce(maximum, dist.ReduceOp.MAX)
    shifted = logits.sub_(maximum[:, None])
    local, inside = _local_targets(targets, shard)
    if shard.rows:
        target_exponents = torch.where(inside, shifted.gather(1, local[:, None])[:, 0], 0.0)
    else:
        target_exponents = torch.zeros_like(maximum)
    if entropy:
        exponentials = shifted.exp()
        weighted = (exponentials * shifted).sum(-1)
    else:
        exponentials, weighted = shifted.exp_(), None
    parts = [exponentials.sum(-1), target_exponents] + ([weighted] if weighted is not None else [])
    reduced = shard.reduce(torch.stack(parts))
    return _Softmax(exponentials, reduced[0], reduced[1], reduced[2] if entropy else None)


def _local_targets(targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Row of every target in this shard, clamped, and whether it lies in it."""
    local = targets - shard.start
    inside = (local >= 0) & (local < shard.rows)
    return local.clamp(0, max(shard.rows - 1, 0)), inside


def _subtract_onehot(probabilities: Tensor, targets: Tensor, shard: VocabShard, amount: Tensor) -> None:
    """probabilities[i, target_i] -= amount_i where the target lies in this shard, in place."""
    if shard.rows:
        local, inside = _local_targets(targets, shard)
        probabilities.scatter_add_(1, local[:, None], torch.where(inside, -amount, 0.0)[:, None])


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard, entropy: bool):
        rows = weight[: shard.rows]
        logprobs, entropies = [], []
        for h, t in zip(hidden.split(chunk_size(shard.rows)), targets.split(chunk_size(shard.rows)), strict=True):
            softmax = _softmax(h, rows, t, shard, entropy)
            log_sum = softmax.sums.log()
            logprobs.append(softmax.target_exponents - log_sum)
            if softmax.weighted is not None:
                entropies.append(log_sum - softmax.weighted / softmax.sums)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.shard, ctx.entropy = shard, entropy
        return torch.cat(logprobs), torch.cat(entropies) if entropy else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        grad_logprobs, grad_entropy = grads
        hidden, weight, targets = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        rows = weight[: shard.rows]
        need_hidden, need_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        size = chunk_size(shard.rows)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_rows = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device) if need_weight else None
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            softmax = _softmax(hidden[part], rows, targets[part], shard, entropy=False)
            grad = softmax.exponentials.div_(softmax.sums[:, None])  # now the probabilities
            scale = torch.zeros_like(softmax.sums) if grad_logprobs is None else grad_logprobs[part]
            if grad_entropy is None:
                grad.mul_(-scale[:, None])
            else:
                # dH/dlogit = -p (log p + H); with d logprob/d logit = onehot - p.
                log_p = grad.clamp_min(torch.finfo(torch.float32).tiny).log()
                entropy = shard.reduce(-(grad * log_p).sum(-1))
                grad.mul_(-(scale[:, None] + grad_entropy[part][:, None] * (log_p + entropy[:, None])))
            _subtract_onehot(grad, targets[part], shard, -scale)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, rows, out=grad_hidden[part])
            if grad_rows is not None:
                grad_rows += torch.mm(grad.t(), hidden[part])
        return grad_hidden, _full_weight_gradient(grad_rows, weight, shard), None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, coefficients: Tensor, shard: VocabShard):
        rows = weight[: shard.rows]
        need_hidden, need_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        size = chunk_size(shard.rows)
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_rows = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device) if need_weight else None
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            softmax = _softmax(hidden[part], rows, targets[part], shard, entropy=False)
            logprobs[part] = softmax.target_exponents - softmax.sums.log()
            scale = coefficients[part]
            grad = softmax.exponentials.mul_((scale / softmax.sums)[:, None])
            _subtract_onehot(grad, targets[part], shard, scale)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, rows, out=grad_hidden[part])
            if grad_rows is not None:
                grad_rows += torch.mm(grad.t(), hidden[part])
        ctx.grad_hidden = grad_hidden
        ctx.grad_weight = _full_weight_gradient(grad_rows, weight, shard)
        ctx.mark_non_differentiable(logprobs)
        return -(logprobs * coefficients).sum(), logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        (grad_loss, _) = grads
        assert grad_loss is not None
        grad_hidden, grad_weight = ctx.grad_hidden, ctx.grad_weight
        ctx.grad_hidden = ctx.grad_weight = None
        return (
            None if grad_hidden is None else grad_hidden.mul_(grad_loss),
            None if grad_weight is None else grad_weight.mul_(grad_loss),
            None,
            None,
            None,
        )


def _full_weight_gradient(grad_rows: Tensor | None, weight: Tensor, shard: VocabShard) -> Tensor | None:
    """The gradient of the whole local weight: zero for the rows that only pad the vocabulary."""
    if grad_rows is None:
        return None
    gradient = grad_rows.to(weight.dtype)
    if shard.rows == len(weight):
        return gradient
    return torch.cat([gradient, gradient.new_zeros(len(weight) - shard.rows, weight.shape[1])])


def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, and the entropy of each distribution if asked for.

    Args:
        hidden: [n, h], equal on all ranks of the tensor parallel group. Its gradient here is this rank's part: the sum
            over the group is the caller's business (Megatron's ``copy_to_tensor_model_parallel_region`` and its like).
        weight: [local rows, h].
        targets: int64 [n].
        shard: this rank's part of the vocabulary.
        entropy: also return the entropy in nats.

    Returns:
        fp32 [n], and fp32 [n] or None.
    """
    return _LinearLogprobs.apply(hidden, weight, targets, shard, entropy)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, coefficients: Tensor, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """``sum(-coefficients * logprobs)`` with its gradient formed in the forward pass.

    Args:
        hidden, weight, targets, shard: as for :func:`linear_logprobs`.
        coefficients: fp32 [n], the factor of each token's negative log-likelihood.

    Returns:
        The fp32 sum, and the log-probabilities fp32 [n] without a gradient.
    """
    return _LinearCrossEntropy.apply(hidden, weight, targets, coefficients, shard)


@torch.no_grad()
def gather_logits(hidden: Tensor, weight: Tensor, shard: VocabShard) -> Tensor:
    """Logits over the whole vocabulary, for those who ask for them: fp32 [n, vocabulary] on the CPU."""
    size = chunk_size(shard.rows)
    chunks = []
    for part in hidden.split(size):
        logits = project(part, weight)
        if shard.group is not None:
            parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(shard.group))]
            dist.all_gather(parts, logits, group=shard.group)
            logits = torch.cat(parts, dim=-1)
        chunks.append(logits.cpu())
    return torch.cat(chunks)
