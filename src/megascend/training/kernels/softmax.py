"""The softmax of one chunk of logits: statistics of a vocabulary shard, and the gradient from statistics of all shards.

On CUDA Triton kernels compute both (:mod:`megascend.training.kernels.softmax_triton`); each reads the logits once and needs no
fp32 copy of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

ShardStatistics = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Maximum, sum of exp(x - max), target's logit or 0, and sum of exp(x - max) * (x - max) of one shard."""


@dataclass(frozen=True)
class Statistics:
    """Statistics of the softmax of n rows; all tensors are fp32 [n].

    Attributes:
        log_sum: log of the sum of exponentials over the whole vocabulary.
        target: logit of the target.
        entropy: entropy in nats, or None if it was not requested.
    """

    log_sum: Tensor
    target: Tensor
    entropy: Tensor | None

    @property
    def logprobs(self) -> Tensor:
        """Return the log-probability of the target."""
        return self.target - self.log_sum


@dataclass(frozen=True)
class VocabShard:
    """The vocabulary rows of one rank, and the cap of their logits.

    Attributes:
        start: first token id of this rank's rows.
        rows: rows of real tokens; the rows after them in the weight are padding and excluded from the softmax.
        group: the tensor parallel group, or None if this rank has all of the vocabulary.
        cap: logits are cap * tanh(product / cap) of the projection's product (Gemma's soft cap), None: the product.
    """

    start: int
    rows: int
    group: dist.ProcessGroup | None = None
    cap: float | None = None

    @classmethod
    def for_rank(
        cls,
        vocab_size: int,
        local_rows: int,
        rank: int,
        group: dist.ProcessGroup | None,
        cap: float | None = None,
    ) -> VocabShard:
        """Build the shard of tensor parallel ``rank``, where every rank's weight has ``local_rows`` rows."""
        start = rank * local_rows
        return cls(start, max(0, min(local_rows, vocab_size - start)), group, cap)

    def local(self, targets: Tensor) -> Tensor:
        """Return the column of every target in this shard's logits, -1 if the target is in another shard."""
        local = targets - self.start
        return torch.where((local >= 0) & (local < self.rows), local, -1)


def statistics(logits: Tensor, local_targets: Tensor, shard: VocabShard, entropy: bool) -> Statistics:
    """Compute statistics over the whole vocabulary from this shard's ``logits`` [n, rows], which are unchanged.

    The shards' maxima and sums are combined as in Megatron-LM's vocab-parallel cross entropy (Shoeybi et al. 2019,
    section 3): two small all-reduces over the tensor parallel group.
    """
    compute = _shard_statistics
    if _has_kernels(logits):
        from megascend.training.kernels import softmax_triton

        compute = softmax_triton.shard_statistics
    maximum, total, target, weighted = compute(logits, local_targets, entropy)
    if shard.group is not None:
        # all_reduce works in place, and this shard's maximum is still needed.
        overall = maximum.clone()
        dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=shard.group)
        # A shard of padding only has maximum -inf and total 0: without the condition its terms would be NaN.
        shift = torch.where(total > 0, maximum - overall, 0.0)
        scale = shift.exp()
        if weighted is not None:
            # Moved to the common maximum M: sum of e^(x - M) (x - M).
            weighted = scale * (weighted + shift * total)
        parts = [scale * total, target] + ([weighted] if weighted is not None else [])
        reduced = torch.stack(parts)
        dist.all_reduce(reduced, group=shard.group)
        maximum, total, target = overall, reduced[0], reduced[1]
        weighted = reduced[2] if weighted is not None else None
    # entropy = log of the sum of e^(x - max), minus the mean of x - max.
    log_total = total.log()
    return Statistics(maximum + log_total, target, None if weighted is None else log_total - weighted / total)


def gradient_(
    logits: Tensor, local_targets: Tensor, softmax: Statistics, scale: Tensor, entropy_scale: Tensor | None
) -> None:
    """Replace ``logits`` [n, rows] by the gradient of ``sum(-scale * logprob + entropy_scale * entropy)``.

    With p the probabilities, d logprob / d logit = onehot - p and d entropy / d logit = -p (log p + entropy).
    """
    compute = _gradient_
    if _has_kernels(logits):
        from megascend.training.kernels import softmax_triton

        compute = softmax_triton.gradient_
    if logits.shape[1]:
        compute(logits, local_targets, softmax.log_sum, scale, softmax.entropy, entropy_scale)


def propagate_cap_(gradient: Tensor, tanh: Tensor | None) -> None:
    """Replace the gradient of capped logits by that of the product, with tanh(product / cap); None: there is no cap."""
    if tanh is not None:
        torch.ops.aten.tanh_backward.grad_input(gradient, tanh.to(gradient.dtype), grad_input=gradient)


def set_columns_(logits: Tensor, local_ids: Tensor, values: Tensor) -> None:
    """Write ``values`` [n, slots] into the columns ``local_ids`` of ``logits`` [n, rows], where they are not -1.

    Slots of a row with one column must have one value.
    """
    if not logits.shape[1]:
        return
    # Every slot writes something, since choosing those that do would wait for the device: the others repeat what the row's
    # first slot writes, or, where there is none, what column 0 holds.
    first = (local_ids >= 0).int().argmax(1, keepdim=True)
    column = local_ids.gather(1, first)
    value = torch.where(column >= 0, values.to(logits.dtype).gather(1, first), logits[:, :1])
    used = local_ids >= 0
    logits.scatter_(
        1, torch.where(used, local_ids, column.clamp_min(0)), torch.where(used, values.to(logits.dtype), value)
    )


def _has_kernels(logits: Tensor) -> bool:
    return logits.device.type == "cuda" and logits.shape[1] > 0


def _shard_statistics(logits: Tensor, local_targets: Tensor, entropy: bool) -> ShardStatistics:
    count, rows = logits.shape
    # All of this rank's vocabulary is padding.
    if rows == 0:
        zeros = torch.zeros(count, dtype=torch.float32, device=logits.device)
        return zeros - torch.inf, zeros, zeros, zeros if entropy else None
    x = logits.float()
    maximum = x.amax(-1)
    target_logits = x.gather(1, local_targets.clamp_min(0)[:, None])[:, 0]
    target = torch.where(local_targets >= 0, target_logits, 0.0)
    shifted = x - maximum[:, None]
    exponentials = shifted.exp()
    weighted = (exponentials * shifted).sum(-1) if entropy else None
    return maximum, exponentials.sum(-1), target, weighted


def _gradient_(
    logits: Tensor,
    local_targets: Tensor,
    log_sum: Tensor,
    scale: Tensor,
    entropy: Tensor | None,
    entropy_scale: Tensor | None,
) -> None:
    log_p = logits.float() - log_sum[:, None]
    factor = scale[:, None]
    if entropy_scale is not None and entropy is not None:
        factor = factor - entropy_scale[:, None] * (log_p + entropy[:, None])
    gradient = log_p.exp_().mul_(factor)
    # Targets of other shards add 0, to column 0.
    amount = torch.where(local_targets >= 0, -scale, 0.0)
    gradient.scatter_add_(1, local_targets.clamp_min(0)[:, None], amount[:, None])
    logits.copy_(gradient)
