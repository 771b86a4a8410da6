"""One adapter on this rank: its values, gradients, optimizer and step count, shared with nobody."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megascend.batch.results import StepResult
from megascend.config import Adam, Lora, Schedule
from megascend.config.learning_rate import learning_rate
from megascend.lora.layout import FlatLayout, Span

if TYPE_CHECKING:
    from megascend.lora.adapter_io import SavedAdapter

INITIAL_LOSS_SCALE = 2.0**16
LOSS_SCALE_WINDOW = 1000


class Adapter:
    """A LoRA adapter in training.

    Attributes:
        name, lora: as given to ``add_adapter``.
        values: float32, all factors of this rank in one vector; see :class:`FlatLayout`.
        grads: likewise; accumulated and not yet reduced over ranks.
        accumulated: True if a forward_backward has added to ``grads`` since the last step.
        step_count: optimizer steps so far, skipped ones included; the schedule follows it.
        skipped_in_a_row: steps skipped since the last one that was taken.
    """

    def __init__(
        self, name: str, lora: Lora, layout: FlatLayout, adam: Adam, schedule: Schedule, seed: int, *,
        scales_loss: bool, device: torch.device,
    ) -> None:  # fmt: skip
        learning_rate(schedule, adam.lr, 0)  # refuses a schedule without an end now, not at the first step
        self.name, self.lora, self.layout = name, lora, layout
        self.adam, self.schedule, self.seed = adam, schedule, seed
        self.values = torch.nn.Parameter(torch.zeros(layout.size, device=device))
        self.values.grad = torch.zeros(layout.size, device=device)
        self.optimizer = torch.optim.AdamW(
            [self.values],
            lr=adam.lr,
            betas=adam.betas,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            fused=device.type == "cuda",
        )
        self.accumulated = False
        self.step_count = self.skipped_in_a_row = 0
        self._scales_loss = scales_loss
        self.loss_scale = INITIAL_LOSS_SCALE if scales_loss else 1.0
        self.good_steps = 0

    @property
    def grads(self) -> Tensor:
        """See the class."""
        assert self.values.grad is not None
        return self.values.grad

    def views(self, vector: Tensor) -> Iterator[tuple[Span, Tensor]]:
        """Every factor's part of ``vector`` (``values``, ``grads`` or a moment), in its own shape."""
        for span in self.layout.spans:
            yield span, vector[span.start : span.stop].view(span.shape)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Adam's first and second moment, zeros before the first step."""
        state = self.optimizer.state[self.values]
        if not state:
            zero = torch.zeros_like(self.values)
            return zero, zero.clone()
        return state["exp_avg"], state["exp_avg_sq"]

    def restore(self, first: Tensor, second: Tensor, saved: SavedAdapter) -> None:
        """Go on from saved moments and counters."""
        device = self.values.device if self.optimizer.defaults["fused"] else "cpu"
        self.optimizer.state[self.values] = (
            {"step": torch.tensor(float(saved.taken), device=device), "exp_avg": first, "exp_avg_sq": second}
            if saved.taken
            else {}
        )
        self.step_count, self.skipped_in_a_row = saved.step_count, saved.skipped_in_a_row
        if saved.loss_scale is not None and self._scales_loss:
            self.loss_scale, self.good_steps = saved.loss_scale, saved.good_steps

    @property
    def taken(self) -> int:
        """Steps that changed the adapter."""
        state = self.optimizer.state[self.values]
        return int(state["step"]) if state else 0

    def step(self, grad_norm: float, adam: Adam | None = None) -> StepResult:
        """Clip and step, or skip if the norm is not finite; then clear the gradients.

        Args:
            grad_norm: L2 norm of the reduced gradients over all ranks, loss scale included.
            adam: settings for this step alone, in place of the adapter's own and of its schedule.
        """
        lr = learning_rate(self.schedule, self.adam.lr, self.step_count) if adam is None else adam.lr
        settings = adam or self.adam
        scale, finite = self.loss_scale, math.isfinite(grad_norm)
        norm = grad_norm / scale if finite else math.inf
        if finite:
            factor = 1 / scale
            if settings.max_grad_norm > 0:
                factor *= min(1.0, settings.max_grad_norm / (norm + 1e-6))
            if factor != 1:
                self.grads.mul_(factor)
            self.optimizer.param_groups[0].update(
                lr=lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
            )
            self.optimizer.step()
        self._adapt_scale(finite)
        self.clear()
        self.step_count += 1
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        return StepResult(norm, lr, not finite, self.skipped_in_a_row, scale)

    def clear(self) -> None:
        """Drop accumulated gradients."""
        self.grads.zero_()
        self.accumulated = False

    def _adapt_scale(self, finite: bool) -> None:
        """fp16: halve the loss scale after an overflow, double it after a long row of finite steps."""
        if not self._scales_loss:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.loss_scale = max(1.0, self.loss_scale / 2)
        elif self.good_steps % LOSS_SCALE_WINDOW == 0:
            self.loss_scale *= 2
