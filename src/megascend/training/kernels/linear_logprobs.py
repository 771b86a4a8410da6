"""Fused output projection and log-probabilities of the targets, without materialising the logits of a whole micro batch.

The output projection is applied to one chunk of tokens at a time; a chunk's logits [chunk, vocabulary / TP], in the model's
dtype, are the largest tensor.

There are two backward passes:

- :func:`linear_logprobs` works for any loss. It saves hidden states and a few numbers per token, and recomputes the logits in
  the backward pass. It can also return the log-probabilities of further tokens at each position.
- :func:`linear_cross_entropy` has a fixed loss, so it computes the gradient in the forward pass, from a chunk's logits (as in
  Liger-Kernel's fused linear cross entropy): no second projection, no saved logits. The gradient of the weight is added to
  Megatron's fp32 buffer inside the matrix product where possible.

Both support adapters of the output layer: :class:`LowRank` adds ``down @ up`` to each chunk's logits, so that a frozen weight
needs neither a copy nor a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascend.training.kernels.low_rank import LowRank, add_product_
from megascend.training.kernels.softmax import (
    Statistics,
    VocabShard,
    gradient_,
    propagate_cap_,
    set_columns_,
    statistics,
)

__all__ = ["LowRank", "VocabShard", "gather_logits", "linear_cross_entropy", "linear_logprobs"]

CHUNK_BYTES = 5 * 2**28
"""Upper bound on one chunk's logits: 1.25 GiB, which is 4096 tokens with a vocabulary of 152 thousand in bf16."""


def chunk_size(rows: int, element_size: int) -> int:
    """Return the tokens of a chunk: a multiple of 128, the tile of a matrix product, with logits of at most CHUNK_BYTES."""
    return max(128, CHUNK_BYTES // (element_size * max(rows, 1)) // 128 * 128)


def chunks(
    hidden: Tensor,
    rows: Tensor,
    down: Tensor | None = None,
    lora_delta: LowRank | None = None,
    temperature: float = 1.0,
    size: int | None = None,
    cap: float | None = None,
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield every chunk of ``hidden`` [n, h] with its logits [chunk, rows] and tanh(product / cap), which reuse their buffers.

    Logits are divided by ``temperature`` before they are rounded to the model's dtype. ``size``: tokens of a chunk; default:
    :func:`chunk_size`. ``cap``: as in :class:`megascend.training.kernels.softmax.VocabShard`; the capped logits are divided.
    """
    divisor = temperature if cap is None else cap
    if down is not None and divisor != 1:
        down = down / divisor
    size = min(size or chunk_size(len(rows), hidden.element_size()), len(hidden))
    buffer = hidden.new_empty(size, len(rows))
    # The gradient needs tanh as it was before the product with the cap rounded it: 1 - tanh^2 has few bits left near 1.
    tanh_buffer = buffer.new_empty(0 if cap is None else size, len(rows))
    for start in range(0, len(hidden), size):
        part = slice(start, min(start + size, len(hidden)))
        logits = buffer[: part.stop - part.start]
        if divisor == 1:
            torch.mm(hidden[part], rows.t(), out=logits)
        else:  # with beta=0 the buffer's content has no effect
            torch.addmm(logits, hidden[part], rows.t(), beta=0, alpha=1 / divisor, out=logits)
        if lora_delta is not None and down is not None:
            lora_delta.add_(logits, down, part)
        tanh = None
        if cap is not None:
            tanh = torch.tanh(logits, out=tanh_buffer[: len(logits)])
            torch.mul(tanh, cap / temperature, out=logits)
        yield part, logits, tanh


class _WeightGradient:
    """Accumulator of the gradient of the output weight [local rows, h]."""

    def __init__(self, weight: Tensor, shard: VocabShard, direct: bool) -> None:
        self._weight, self._rows = weight, shard.rows
        # Under Megatron's DDP every parameter has an fp32 buffer main_grad. Adding to it directly saves a copy in the model's
        # dtype, its rounding, and the hook that would add it later. Overlapped reduction waits for that hook, so in that case
        # (not direct) the gradient is returned to autograd as usual.
        self.direct = direct and hasattr(weight, "main_grad")
        if self.direct:
            # Padding rows get no gradient.
            self._sum = weight.main_grad[: shard.rows]  # type: ignore[reportAttributeAccessIssue]
        else:
            dtype = torch.promote_types(weight.dtype, torch.float32)
            self._sum = torch.zeros(shard.rows, weight.shape[1], dtype=dtype, device=weight.device)

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        """Add ``grad_logits^T @ hidden``."""
        add_product_(self._sum, grad_logits.t(), hidden)

    def for_autograd(self) -> Tensor | None:
        """Return the gradient in the weight's dtype, zero for padding rows; None if it was added to ``main_grad``."""
        if self.direct:
            return None
        gradient = self._sum.to(self._weight.dtype)
        if self._rows == len(self._weight):
            return gradient
        return torch.cat([gradient, gradient.new_zeros(len(self._weight) - self._rows, self._weight.shape[1])])


class Gradients:
    """Accumulators of the required gradients of hidden states, weight and ``down``, fed with chunks of logit gradients."""

    def __init__(
        self,
        required: tuple[bool, ...],
        hidden: Tensor,
        weight: Tensor,
        down: Tensor | None,
        shard: VocabShard,
        direct: bool,
        lora_delta: LowRank | None,
    ) -> None:
        self._states, self._rows, self._down, self._lora_delta = hidden, weight[: shard.rows], down, lora_delta
        # Every chunk writes its rows.
        self.hidden = torch.empty_like(hidden) if required[0] else None
        self._weight = _WeightGradient(weight, shard, direct) if required[1] else None
        # Zeros: tokens of adapters without this target are in no segment, and are not written.
        self.down = torch.zeros_like(down) if down is not None and required[2] else None

    def add(self, grad_logits: Tensor, part: slice) -> None:
        """Add the contribution of a chunk's logit gradients."""
        if self.hidden is not None:
            torch.mm(grad_logits, self._rows, out=self.hidden[part])
        if self._weight is not None:
            self._weight.add(grad_logits, self._states[part])
        if self.down is not None and self._down is not None and self._lora_delta is not None:
            self._lora_delta.propagate(grad_logits, self._down, self.down, part)

    def for_autograd(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients in the order of the functions' first three inputs."""
        return self.hidden, None if self._weight is None else self._weight.for_autograd(), self.down


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        down: Tensor | None,
        targets: Tensor,
        candidates: Tensor | None,
        shard: VocabShard,
        entropy: bool,
        direct: bool,
        lora_delta: LowRank | None,
        temperature: float,
    ):
        rows = weight[: shard.rows]
        local_targets = shard.local(targets)
        local_candidates = None if candidates is None else shard.local(candidates)
        parts: list[Statistics] = []
        selected: list[Tensor] = []
        for part, logits, _ in chunks(hidden, rows, down, lora_delta, temperature, cap=shard.cap):
            parts.append(statistics(logits, local_targets[part], shard, entropy))
            if local_candidates is not None:
                selected.append(_selected(logits, local_candidates[part]))
        log_sum, target = (torch.cat([getattr(s, name) for s in parts]) for name in ("log_sum", "target"))
        entropies = torch.cat([s.entropy for s in parts if s.entropy is not None]) if entropy else None
        logprobs = None
        if candidates is not None:
            logits = torch.cat(selected)
            if shard.group is not None:  # every rank has the logits of its own rows, and 0 for the others
                dist.all_reduce(logits, group=shard.group)
            logprobs = torch.where(candidates >= 0, logits - log_sum[:, None], 0.0)
        ctx.save_for_backward(
            hidden,
            weight,
            down,
            targets,
            candidates,
            local_targets,
            local_candidates,
            log_sum,
            target,
            entropies,
            logprobs,
        )
        ctx.shard, ctx.direct, ctx.lora_delta, ctx.temperature = shard, direct, lora_delta, temperature
        return target - log_sum, entropies, logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        grad_logprobs, grad_entropy, grad_candidates = grads
        hidden, weight, down, targets, candidates, local_targets, local_candidates, *saved = ctx.saved_tensors
        log_sum, target, entropies, logprobs = saved
        rows = weight[: ctx.shard.rows]
        gradients = Gradients(ctx.needs_input_grad, hidden, weight, down, ctx.shard, ctx.direct, ctx.lora_delta)
        # Through the coefficients: logits are the projection divided by the temperature.
        grad_logprobs, grad_entropy, grad_candidates = (
            None if grad is None else grad / ctx.temperature for grad in (grad_logprobs, grad_entropy, grad_candidates)
        )
        scale = torch.zeros_like(log_sum) if grad_logprobs is None else -grad_logprobs
        if candidates is not None:
            assert grad_candidates is not None, "autograd makes zeros of outputs that are not used"
            # As if no token were selected, and then the selected columns, in fp32: the two parts of a column's gradient nearly
            # cancel, and 16 bits would keep the rounding of the first.
            slot_grads = _slot_gradients(scale, grad_candidates, targets, candidates)
            local_slots = torch.cat([local_targets[:, None], local_candidates], 1)
            local_targets = torch.full_like(local_targets, -1)
            scale = scale - torch.where(candidates >= 0, grad_candidates, 0.0).sum(1)
            log_p = torch.cat([(target - log_sum)[:, None], logprobs], 1)
            factor = scale[:, None]
            if grad_entropy is not None and entropies is not None:
                factor = factor - grad_entropy[:, None] * (log_p + entropies[:, None])
            slot_values = log_p.exp() * factor + slot_grads
        for part, logits, tanh in chunks(hidden, rows, down, ctx.lora_delta, ctx.temperature, cap=ctx.shard.cap):
            softmax = Statistics(log_sum[part], target[part], None if entropies is None else entropies[part])
            entropy_scale = None if grad_entropy is None else grad_entropy[part]
            gradient_(logits, local_targets[part], softmax, scale[part], entropy_scale)
            if candidates is not None:
                set_columns_(logits, local_slots[part], slot_values[part])
            propagate_cap_(logits, tanh)
            gradients.add(logits, part)
        return *gradients.for_autograd(), None, None, None, None, None, None, None


def _selected(logits: Tensor, local_ids: Tensor) -> Tensor:
    """Return the logits of the columns ``local_ids`` [n, K], fp32; 0 where they are -1."""
    if not logits.shape[1]:
        return torch.zeros(local_ids.shape, dtype=torch.float32, device=logits.device)
    return torch.where(local_ids >= 0, logits.gather(1, local_ids.clamp_min(0)).float(), 0.0)


def _slot_gradients(scale: Tensor, grad_candidates: Tensor, targets: Tensor, candidates: Tensor) -> Tensor:
    """Return the gradient that each token's own log-probability receives, [n, 1 + K]: the target's, then the candidates'.

    A target that is a candidate, too, has one column, so both slots have the sum.
    """
    grad_candidates = torch.where(candidates >= 0, grad_candidates, 0.0)
    same = candidates == targets[:, None]
    target_grad = torch.where(same, grad_candidates, 0.0).sum(1) - scale
    return torch.cat([target_grad[:, None], torch.where(same, target_grad[:, None], grad_candidates)], 1)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        down: Tensor | None,
        targets: Tensor,
        coefficients: Tensor,
        loss_grad: float,
        shard: VocabShard,
        direct: bool,
        lora_delta: LowRank | None,
        temperature: float,
    ):
        rows = weight[: shard.rows]
        local_targets = shard.local(targets)
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        gradients = Gradients(ctx.needs_input_grad, hidden, weight, down, shard, direct, lora_delta)
        scale = coefficients * (loss_grad / temperature)
        for part, logits, tanh in chunks(hidden, rows, down, lora_delta, temperature, cap=shard.cap):
            softmax = statistics(logits, local_targets[part], shard, entropy=False)
            logprobs[part] = softmax.logprobs
            gradient_(logits, local_targets[part], softmax, scale[part], None)
            propagate_cap_(logits, tanh)
            gradients.add(logits, part)
        ctx.loss_grad = loss_grad
        # Not save_for_backward, which keeps tensors until the graph is freed.
        ctx.gradients = gradients.for_autograd()
        ctx.mark_non_differentiable(logprobs)
        return -torch.where(coefficients != 0, logprobs * coefficients, 0.0).sum(), logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        # Only on the CPU: on a device the comparison would synchronize.
        if grads[0] is not None and grads[0].device.type == "cpu":
            received = float(grads[0])
            if abs(received - ctx.loss_grad) > 1e-5 * abs(ctx.loss_grad):
                raise RuntimeError(
                    f"linear_cross_entropy was called with loss_grad={ctx.loss_grad}, but received gradient {received}"
                )
        gradients, ctx.gradients = ctx.gradients, None  # frees them as soon as autograd has used them
        return *gradients, None, None, None, None, None, None, None


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabShard,
    entropy: bool = False,
    direct_weight_gradient: bool = False,
    down: Tensor | None = None,
    lora_delta: LowRank | None = None,
    candidates: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the log-probability of each target and, if requested, the entropy of each distribution and further tokens' ones.

    Args:
        hidden: [n, h], equal on all ranks of the tensor parallel group. Its gradient is this rank's part: the caller sums
            it over the group (for example with Megatron's ``copy_to_tensor_model_parallel_region``).
        weight: [local rows, h].
        targets: int64 [n].
        shard: this rank's part of the vocabulary.
        entropy: also return the entropy in nats.
        direct_weight_gradient: add the weight's gradient to ``weight.main_grad`` instead of returning it to autograd.
        down: [n, r], equal on all ranks of the group like ``hidden``; its gradient is this rank's part, too.
        lora_delta: the low-rank term that ``down`` adds to the logits; both or neither.
        candidates: int64 [n, K], further tokens of each position, each once; -1: none.
        temperature: divides the logits.

    Returns:
        fp32 [n]; fp32 [n] or None; and the candidates' log-probabilities, fp32 [n, K], 0 at -1, or None.
    """
    return _LinearLogprobs.apply(
        hidden, weight, down, targets, candidates, shard, entropy, direct_weight_gradient, lora_delta, temperature
    )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    coefficients: Tensor,
    shard: VocabShard,
    loss_grad: float = 1.0,
    direct_weight_gradient: bool = False,
    down: Tensor | None = None,
    lora_delta: LowRank | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute ``sum(-coefficients * logprobs)``, with the gradient computed in the forward pass.

    Args:
        hidden, weight, targets, shard, direct_weight_gradient, down, lora_delta, temperature: as for :func:`linear_logprobs`.
        coefficients: fp32 [n], not negative: the factor of each token's negative log-likelihood.
        loss_grad: the gradient that this sum will receive in the backward pass, which has to be known in advance.

    Returns:
        The fp32 sum, and the log-probabilities fp32 [n] without a gradient.
    """
    return _LinearCrossEntropy.apply(
        hidden, weight, down, targets, coefficients, loss_grad, shard, direct_weight_gradient, lora_delta, temperature
    )


@torch.no_grad()
def gather_logits(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabShard,
    down: Tensor | None = None,
    lora_delta: LowRank | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Return logits over the whole vocabulary, fp32 [n, padded vocabulary] on the CPU.

    ``rows``: tokens to return, int64, ascending; default: all.
    """
    ranks = 1 if shard.group is None else dist.get_world_size(shard.group)
    parts = [torch.empty(0, ranks * len(weight))]
    selected = None if rows is None else rows.cpu()
    for part, chunk, _ in chunks(hidden, weight, down, lora_delta, cap=shard.cap):
        logits = chunk
        if selected is not None:
            inside = selected[(selected >= part.start) & (selected < part.stop)] - part.start
            if not len(inside):
                continue  # on all ranks, so none misses the collective below
            logits = chunk[inside.to(chunk.device)]
        if shard.group is not None:
            # Shards have equal sizes: Megatron pads the vocabulary to a multiple of the ranks.
            shards = [torch.empty_like(logits) for _ in range(ranks)]
            dist.all_gather(shards, logits, group=shard.group)
            logits = torch.cat(shards, dim=-1)
        parts.append(logits.float().cpu().clone())  # clone: on the CPU it would be a view of the reused buffer
    return torch.cat(parts)
