"""Load-balancing loss and correction bias of Megatron's routers, over real tokens only.

Megatron computes both from every row of a rank, including padding and dummy batches, weights the loss differently from version
to version, and updates the bias even if the optimizer's step is skipped. Here routers count, for each micro batch, the real
tokens of each expert; a rank's layers share one all-reduce. Megatron's own loss and bias update are switched off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megascend.changes import patch
from megascend.config import Moe
from megascend.engines.common import load_balancing
from megascend.runtime.distributed.objects import all_reduce_numbers
from megascend.runtime.distributed.process_groups import ProcessGroups
from megascend.training.batch.micro_batch import MicroBatch

TO_BALANCE, CHOSEN = 0, 1
"""Indices of the two counts of :class:`_BalancedPass`:
by probability only, for the loss; as routed, including the correction bias."""


@dataclass
class _BalancedPass:
    """Forward pass of one micro batch through one model chunk.

    Attributes:
        real: for each router, [rows], tokens that this rank's rows stand for: 0 for padding and in a dummy batch. The router of a
            head for multi-token prediction has one less of every sample, whose last token it does not predict from.
        tokens: for each router, real tokens of the micro batch on all ranks.
        counts: fp32 [2, layers, experts], real tokens sent to each expert; summed over ranks after the chunk has run.
        complete: the chunk has run; later router calls are recomputation.
        gradients: [layers, experts], of the loss with respect to a row's probabilities; None until then, and without a loss.
    """

    real: list[Tensor]
    tokens: list[int]
    counts: Tensor
    complete: bool = False
    gradients: Tensor | None = None


class Routers:
    """Load balancing of this rank's routers.

    Args:
        chunks: the rank's model chunks, not wrapped.
        config: mcore-bridge's ModelConfig.
        moe: the user's settings.
    """

    def __init__(self, chunks: Sequence[Any], config: Any, moe: Moe, groups: ProcessGroups) -> None:
        self._config, self._moe, self._groups = config, moe, groups
        self._by_chunk = [_routers(chunk) for chunk in chunks]
        self._predicts = [_routers(getattr(chunk, "mtp", None)) for chunk in chunks]
        for router in (router for routers in self._by_chunk for router in routers):
            patch(router, "enable_expert_bias", False, "does not count tokens itself; the bias stays in use")
        self._active = False
        self._pass: _BalancedPass | None = None
        self._weight = 0.0
        self._totals: list[Tensor] = []
        if moe.aux_loss == "none" and moe.bias_update_rate == 0:
            return
        for routers in self._by_chunk:
            self._totals.append(torch.zeros(2, len(routers), config.num_moe_experts, device=groups.device))
            for position, router in enumerate(routers):
                self._attach(router, position)

    @contextlib.contextmanager
    def training(self, micro_batches: int) -> Iterator[None]:
        """Count tokens, and add the loss's gradients, within the context. Collective.

        Args:
            micro_batches: number of this rank's, without dummy batches.
        """
        if not self._totals:
            yield
            return
        topology = self._groups.topology
        total = all_reduce_numbers([float(micro_batches)], "dp", self._groups, purpose="micro batches")[0]
        # The mean over the micro batches of all ranks; DDP divides the sum of gradients by DP x CP.
        self._weight = self._moe.aux_loss_coefficient * topology.data * topology.context / max(total, 1.0)
        self._active = True
        try:
            yield
        finally:
            self._active, self._pass = False, None

    def enter(self, batch: MicroBatch, chunk: int) -> None:
        """Set the micro batch that the chunk of this index computes next."""
        if not self._active:
            return
        experts = self._config.num_moe_experts
        counts = torch.zeros(2, len(self._by_chunk[chunk]), experts, device=self._groups.device)
        real, tokens = router_rows(batch.real, batch, self._groups), 0 if batch.dummy else sum(batch.lengths)
        rows, numbers = [real] * len(self._by_chunk[chunk]), [tokens] * len(self._by_chunk[chunk])
        if batch.mtp is not None and self._predicts[chunk]:
            rest = torch.zeros_like(batch.mtp.padding) if batch.dummy else ~batch.mtp.padding
            real, tokens = router_rows(rest, batch, self._groups), tokens and tokens - len(batch.lengths)
            for router in self._predicts[chunk]:
                position = self._by_chunk[chunk].index(router)
                rows[position], numbers[position] = real, tokens
        self._pass = _BalancedPass(rows, numbers, counts)

    def leave(self, output: Tensor, chunk: int) -> None:
        """Sum the counts of the chunk that has just run over ranks, for its backward pass. Collective."""
        current = self._pass
        if not self._active or current is None:
            return
        # TP ranks have different tokens: Megatron trains experts under TP only with sequence parallelism.
        group = self._groups.device_group("tp_cp")
        if group.size() > 1 and current.counts.numel():
            # The loss is one of the micro batch: each rank of these axes has a part of its tokens.
            dist.all_reduce(current.counts, group=group)
        current.complete = True
        self._totals[chunk] += current.counts
        if self._moe.aux_loss != "none":
            top_k = self._config.moe_router_topk
            gradients = current.counts[TO_BALANCE].clone()
            # Routers that see the same tokens at a time: the formula of transformers pools them.
            for tokens in set(current.tokens):
                group = [position for position, number in enumerate(current.tokens) if number == tokens]
                gradients[group] = load_balancing.gradients(self._moe.aux_loss, gradients[group], tokens, top_k)
            gradients = gradients * self._weight
            scale = self._config.grad_scale_func  # the loss scale of fp16
            current.gradients = gradients if scale is None else scale(gradients)
        if output.requires_grad:
            # Recomputed layers run in the backward pass, when another micro batch may have been entered.
            output.register_hook(lambda _: setattr(self, "_pass", current))

    def update_bias(self) -> None:
        """Move the correction bias of every expert towards an equal load, by the tokens since the last call. Collective.

        DeepSeek-V3's rule (arXiv:2412.19437, section 2.1.2): ``bias += rate * sign(mean load - load)``.
        """
        if self._moe.bias_update_rate > 0:
            # leave() has summed over TP and CP already.
            group = self._groups.device_group("dp")
            for totals, routers in zip(self._totals, self._by_chunk, strict=True):
                # All ranks of the group have the same layers, so all or none of them have experts.
                if group.size() > 1 and totals.numel():
                    dist.all_reduce(totals, group=group)
                for load, router in zip(totals[CHOSEN], routers, strict=True):
                    if router.expert_bias is not None:
                        router.expert_bias += self._moe.bias_update_rate * torch.sign(load.mean() - load)
        self.forget_counts()

    def forget_counts(self) -> None:
        """Reset the counts, after an update or a skipped step."""
        for totals in self._totals:
            totals.zero_()

    def _attach(self, router: TopKRouter, position: int) -> None:
        """Patch a router to record its logits, and hook its output."""
        logits: list[Tensor] = []

        # The router's output has probabilities after top-k only; the loss needs all logits.
        def gating(hidden: Tensor) -> Tensor:
            logits[:] = [type(router).gating(router, hidden)]
            return logits[0]

        def after(module: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
            current, router_logits = self._pass, logits.pop()
            if not self._active or current is None:
                return None
            return self._record(current, position, router_logits.view(-1, router_logits.shape[-1]), *output)

        patch(router, "gating", gating, "its logits are seen by the load-balancing loss")
        router.register_forward_hook(after)

    def _record(
        self, current: _BalancedPass, position: int, logits: Tensor, weights: Tensor, chosen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Count one router's choices, and attach the loss's gradient; returns the router's output."""
        scores = load_balancing.scores(logits, self._config.moe_router_score_function)
        if not current.complete:  # recomputation would count again
            with torch.no_grad():
                real = current.real[position][:, None]
                # The correction bias is left out, as in the formula of the loss: it is there to steer the choice, not
                # the probabilities.
                top_k = self._config.moe_router_topk
                current.counts[TO_BALANCE, position] = load_balancing.counts(scores, top_k, real)
                current.counts[CHOSEN, position] = (chosen * real).sum(0, dtype=torch.float32)
        if self._moe.aux_loss != "none" and torch.is_grad_enabled():
            weights = _WithLoss.apply(weights, scores, lambda: _gradient_rows(current, position))
        return weights, chosen


def _routers(module: torch.nn.Module | None) -> list[TopKRouter]:
    return [] if module is None else [m for m in module.modules() if isinstance(m, TopKRouter)]


def router_rows(values: Tensor, batch: MicroBatch, groups: ProcessGroups) -> Tensor:
    """Return a micro batch's values, [tokens, ...], as [rows, ...] of this rank's routers.

    Megatron's order has the sequence first; under sequence parallelism a rank has a slice of it.
    """
    rows = values.unflatten(0, batch.input_ids.shape).transpose(0, 1).flatten(0, 1)
    topology = groups.topology
    return rows.chunk(topology.tensor)[groups.coordinates.tensor] if topology.sequence_parallel else rows


def _gradient_rows(current: _BalancedPass, position: int) -> Tensor:
    assert current.gradients is not None, "the backward pass began before the chunk's forward pass had ended"
    return current.gradients[position] * current.real[position][:, None]


class _WithLoss(torch.autograd.Function):
    """Identity of ``weights`` whose backward pass adds the loss's gradient of ``scores``, which is known only by then."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, scores: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
        ctx.gradient = gradient
        # A view: autograd needs a new tensor, not a copy.
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.gradient(), None


@contextlib.contextmanager
def biases_in_fp32(chunk: torch.nn.Module) -> Iterator[None]:
    """Keep routers' correction biases in fp32 while the block converts a chunk to 16 bits."""
    # They are fp32 in every precision, as in transformers; rounded to bf16, routers would choose other experts.
    routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    biases = [(router, bias.clone()) for router in routers if (bias := router.expert_bias) is not None]
    yield
    for router, bias in biases:
        router.expert_bias = bias
