"""The loss scale of fp16, and the factor of gradients before a step, of a model or of an adapter."""

from __future__ import annotations

from megascend.training.batch.results import StepResult

# GradScaler's start, not Megatron's 2**32, from which nearly every first step overflows. The window is Megatron's.
INITIAL_LOSS_SCALE = 2.0**16
LOSS_SCALE_WINDOW = 1000


class GradientScaling:
    """Base class with the loss scale, the gradient factor and the counts of skipped steps.

    Attributes:
        loss_scale: factor of losses before the backward pass; 1 except for fp16.
        good_steps: steps since the last one that was skipped.
        skipped_in_a_row: steps skipped since the last one that was not.
    """

    def __init__(self, *, scales_loss: bool) -> None:
        self._scales_loss = scales_loss
        self.loss_scale = INITIAL_LOSS_SCALE if scales_loss else 1.0
        self.good_steps = self.skipped_in_a_row = 0

    def gradient_factor(self, norm: float, max_grad_norm: float) -> float:
        """Return the factor that undoes the loss scale and clips. ``norm``: L2 norm of the gradients without the scale."""
        factor = 1 / self.loss_scale
        if max_grad_norm > 0:
            # The epsilon of Megatron and of torch's clip_grad_norm_.
            factor *= min(1.0, max_grad_norm / (norm + 1e-6))
        return factor

    def count(self, norm: float, lr: float, *, skipped: bool) -> StepResult:
        """Count a step that was taken, or skipped because of an overflow; return its result.

        An overflow halves the loss scale, and so many finite steps in a row as :data:`LOSS_SCALE_WINDOW` double it.
        """
        scale = self.loss_scale
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if self._scales_loss:
            self.good_steps = 0 if skipped else self.good_steps + 1
            if skipped:
                # At 1 an overflow is the model's, not the scale's; a smaller scale would only make gradients underflow.
                self.loss_scale = max(1.0, scale / 2)
            elif self.good_steps % LOSS_SCALE_WINDOW == 0:
                self.loss_scale *= 2
        return StepResult(norm, lr, skipped, self.skipped_in_a_row, scale)
