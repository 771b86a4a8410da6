"""An adapter on this rank: its values, gradients, optimizer state and step count."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megascend.config import Adam, Lora, Schedule
from megascend.config.training import learning_rate
from megascend.training.batch.gradient_scaling import GradientScaling
from megascend.training.batch.results import StepResult
from megascend.training.lora.layout import FlatLayout, Span

if TYPE_CHECKING:
    from megascend.training.lora.factors import UnshardedAdapter


@dataclass(frozen=True)
class NextStep:
    """Settings and gradient factor of an adapter's next optimizer step.

    Attributes:
        adam: settings, with the learning rate of this step.
        norm: L2 norm of the gradients without the loss scale; inf if the step is skipped.
        factor: multiplies the gradients before the step, to undo the loss scale and to clip.
    """

    adam: Adam
    norm: float
    factor: float

    @property
    def skipped(self) -> bool:
        """True if the gradients are not finite."""
        return math.isinf(self.norm)


class Adapter(GradientScaling):
    """A LoRA adapter in training.

    Attributes:
        name, lora: arguments of ``add_adapter``.
        values: float32, all factors of this rank in one vector; see :class:`FlatLayout`.
        accumulated: True if a forward_backward has added to ``grads`` since the last step.
        taken_count: :attr:`taken` as the float32 scalar that AdamW increments: on the device if AdamW is fused, else on the CPU.
        step_count: optimizer steps so far, skipped ones included; the schedule follows it.
        fused: AdamW runs as one kernel.
    """

    def __init__(
        self, name: str, lora: Lora, layout: FlatLayout, adam: Adam, schedule: Schedule, seed: int, *,
        scales_loss: bool, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(scales_loss=scales_loss)
        learning_rate(schedule, adam.lr, 0)  # raises for a schedule without an end here, not at the first step
        self.name, self.lora, self.layout = name, lora, layout
        self.adam, self.schedule, self.seed = adam, schedule, seed
        # One vector, so that a reduction, the norm and a step are one operation each.
        self.values = torch.nn.Parameter(torch.zeros(layout.size, device=device))
        self.values.grad = torch.zeros(layout.size, device=device)
        self.fused = device.type == "cuda"
        self._moments: tuple[Tensor, Tensor] | None = None
        self.taken_count = self._count(0)
        self.accumulated = False
        self.step_count = 0

    @property
    def grads(self) -> Tensor:
        """Gradients in the layout of :attr:`values`; accumulated, not yet reduced over ranks."""
        assert self.values.grad is not None
        return self.values.grad

    def views(self, vector: Tensor) -> Iterator[tuple[Span, Tensor]]:
        """Yield every factor's part of ``vector`` (``values``, ``grads`` or a moment), in the factor's shape."""
        for span in self.layout.spans:
            yield span, vector[span.start : span.stop].view(span.shape)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return Adam's first and second moment, float32 as ``values``, zeros before the first step; not copies."""
        if self._moments is None:
            self._moments = torch.zeros_like(self.values), torch.zeros_like(self.values)
        return self._moments

    def make_room(self) -> None:
        """Allocate a step's memory, so that a step cannot run out of memory after it has changed values.

        Unfused AdamW needs two vectors of the adapter's size at a time, and both kinds and the norm need a few scalars. These go
        straight back to the caching allocator, which hands them to the step.
        """
        self.moments()
        scratch = [] if self.fused else [torch.empty_like(self.grads) for _ in range(2)]
        scratch += [self.grads.new_empty(1) for _ in range(8)]

    @property
    def taken(self) -> int:
        """Steps that changed the adapter."""
        return int(self.taken_count)

    def restore(self, first: Tensor, second: Tensor, saved: UnshardedAdapter) -> None:
        """Resume from saved moments and counters."""
        self._moments, self.taken_count = (first, second), self._count(saved.taken)
        self.step_count, self.skipped_in_a_row = saved.step_count, saved.skipped_in_a_row
        # An adapter that was trained in another precision starts with the initial scale.
        if saved.loss_scale is not None and self._scales_loss:
            self.loss_scale, self.good_steps = saved.loss_scale, saved.good_steps

    def next_step(self, grad_norm: float, adam: Adam | None = None) -> NextStep:
        """Plan a step with gradients of this norm (over all ranks, loss scale included). Changes nothing."""
        if adam is None:
            lr = learning_rate(self.schedule, self.adam.lr, self.step_count)
            adam = self.adam.model_copy(update={"lr": lr})
        if not math.isfinite(grad_norm):
            return NextStep(adam, math.inf, 1.0)
        norm = grad_norm / self.loss_scale
        return NextStep(adam, norm, self.gradient_factor(norm, adam.max_grad_norm))

    def count_step(self, step: NextStep) -> StepResult:
        """Record that ``step`` was taken or skipped and the gradients were zeroed."""
        self.accumulated = False
        self.step_count += 1
        return self.count(step.norm, step.adam.lr, skipped=step.skipped)

    def clear(self) -> None:
        """Drop accumulated gradients."""
        self.grads.zero_()
        self.accumulated = False

    def _count(self, steps: int) -> Tensor:
        # Fused AdamW counts steps on the device; the unfused one reads them, which would wait for it.
        return torch.tensor(float(steps), device=self.values.device if self.fused else "cpu")
