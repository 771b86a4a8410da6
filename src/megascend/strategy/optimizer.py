"""Megatron's optimizer, stepped by all ranks or by none."""

from __future__ import annotations

import math
from typing import Any

from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megascend.config import Adam, Precision, Schedule
from megascend.model.build import DTYPES
from megascend.parallel.objects import all_reduce_numbers
from megascend.parallel.process_groups import ProcessGroups
from megascend.strategy.schedule import learning_rate
from megascend.train.results import StepResult

INITIAL_LOSS_SCALE = 2.0**16


class Optimizer:
    """AdamW over the model chunks of this rank: one step for all ranks, or none.

    Attributes:
        step_count: calls of :meth:`step` so far, skipped ones included; the schedule follows it.
        skipped_in_a_row: steps skipped since the last one that was taken.
    """

    def __init__(self, chunks: list[Any], adam: Adam, schedule: Schedule, precision: Precision, groups: ProcessGroups):
        self._chunks, self._adam, self._schedule, self._groups = chunks, adam, schedule, groups
        self._scales_loss = precision == "fp16"
        self.megatron = get_megatron_optimizer(optimizer_config(adam, precision), chunks)
        self.step_count = 0
        self.skipped_in_a_row = 0

    def scale_loss(self, loss: Any) -> Any:
        """``loss`` times the fp16 loss scale (1 for other precisions)."""
        return self.megatron.scale_loss(loss)

    def step(self, reduced: bool) -> StepResult:
        """Reduce the gradients, then update the parameters, unless any rank's gradients are not finite.

        Args:
            reduced: the schedule has started the reduction already (``overlap_grad_reduce``).
        """
        if not reduced:
            finalize_model_grads(self._chunks)
        lr = learning_rate(self._schedule, self._adam.lr, self.step_count)
        self._set_hyperparameters(lr)
        loss_scale = float(self.megatron.get_loss_scale()) if self._scales_loss else 1.0
        overflow = bool(self.megatron.prepare_grads())
        grad_norm = math.inf if overflow else float(self.megatron.get_grad_norm())
        finite = all_reduce_numbers([float(math.isfinite(grad_norm))], "world", self._groups, "min")[0] == 1.0
        if finite:
            self._clip(grad_norm)
            self.megatron.step_with_ready_grads()
        elif math.isfinite(grad_norm):
            grad_norm = math.inf
        self.zero_grad()
        self.step_count += 1
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        return StepResult(grad_norm, lr, not finite, self.skipped_in_a_row, loss_scale)

    def zero_grad(self) -> None:
        """Zero the gradient buffer of every model chunk, and what the optimizer keeps of them."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def create_state(self) -> None:
        """Make Adam's moments, which otherwise come into being in the first step; a no-op afterwards."""
        for optimizer in getattr(self.megatron, "chained_optimizers", [self.megatron]):
            if not optimizer.is_stub_optimizer:
                optimizer.init_state_fn(optimizer.optimizer, optimizer.config)

    def _set_hyperparameters(self, lr: float) -> None:
        """Per parameter group; Megatron leaves the weight-decay multiplier to its own scheduler, which is not used here."""
        for group in self.megatron.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._adam.weight_decay * group.get("wd_mult", 1.0)

    def _clip(self, grad_norm: float) -> None:
        if self._adam.max_grad_norm == 0:
            return
        for optimizer in getattr(self.megatron, "chained_optimizers", [self.megatron]):
            parameters = optimizer.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=self._adam.max_grad_norm, total_norm=grad_norm)


def optimizer_config(adam: Adam, precision: Precision) -> OptimizerConfig:
    """Megatron's settings for ``adam``; main parameters, gradients and moments are fp32 in every precision."""
    return OptimizerConfig(
        optimizer="adam",
        lr=adam.lr,
        weight_decay=adam.weight_decay,
        adam_beta1=adam.betas[0],
        adam_beta2=adam.betas[1],
        adam_eps=adam.eps,
        clip_grad=adam.max_grad_norm,
        params_dtype=DTYPES[precision],
        fp16=precision == "fp16",
        bf16=precision == "bf16",
        initial_loss_scale=INITIAL_LOSS_SCALE,
        use_distributed_optimizer=adam.distributed,
        overlap_param_gather=adam.overlap_param_gather,
    )
