"""``npu_cross_entropy_loss``: log-softmax and negative log-likelihood in one operator.

Formula and limits are those of torch_npu's documentation; the sums are taken in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simnpu.errors import NotSimulatedError
from simnpu.operators.dispatch import differentiable, operator
from simnpu.operators.refusal import Refusal

MAX_ROWS = 200000
NO_INDEX = -100  # any negative number means that no label is ignored


@operator
def npu_cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = NO_INDEX,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cross entropy of logits [N, C] and labels [N].

    Unlike ``torch.nn.functional.cross_entropy`` it has no ignored label by default: a negative ``ignore_index`` ignores
    nothing, and a label of -100 is out of range.

    Returns:
        the loss ([1], or [N] without reduction), log-probabilities [N, C], and two empty tensors.
    """
    refuse = Refusal("npu_cross_entropy_loss", "aclnnCrossEntropyLoss")
    if lse_square_scale_for_zloss or return_zloss:
        raise NotSimulatedError("npu_cross_entropy_loss with a z-loss: torch_npu documents it as not supported yet")
    check_tensors(input, target, weight, refuse)
    check_options(input, weight, reduction, ignore_index, label_smoothing, refuse)

    def loss_of(logits: Tensor, target: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        classes = logits.shape[1]
        valid = target != ignore_index if ignore_index >= 0 else torch.ones_like(target, dtype=torch.bool)
        wrong = valid & ((target < 0) | (target >= classes))
        if bool(wrong.any()):
            refuse.kernel(
                f"target must be in [0, {classes}), but holds {int(target[wrong][0])}; a negative ignore_index "
                f"({ignore_index}) ignores no label"
            )
        log_prob = logits.float().log_softmax(-1)
        scale = torch.ones(classes) if weight is None else weight.float()
        rows = scale[target.clamp_min(0)] * valid
        losses = -rows * log_prob.gather(1, target.clamp_min(0)[:, None])[:, 0]
        if label_smoothing:
            spread = -(log_prob * scale).sum(-1) * valid
            losses = (1 - label_smoothing) * losses + label_smoothing / classes * spread
        if reduction == "mean":
            losses = (losses.sum() / rows.sum()).view(1)
        elif reduction == "sum":
            losses = losses.sum().view(1)
        return losses.to(logits.dtype), log_prob.detach().to(logits.dtype)

    loss, log_prob = differentiable(loss_of)(input, target, weight)
    return loss, log_prob, input.new_empty(0), input.new_empty(0)


def check_tensors(input: Tensor, target: Tensor, weight: Tensor | None, refuse: Refusal) -> None:
    """Shapes."""
    if tuple(target.shape) != (input.shape[0],) or not input.shape[1]:
        refuse.kernel(f"input must be [N, C] and target [N], but got {list(input.shape)} and {list(target.shape)}")
    if input.shape[0] > MAX_ROWS:
        refuse.kernel(f"N must be in (0, {MAX_ROWS}], but got {input.shape[0]}")
    if weight is not None and tuple(weight.shape) != (input.shape[1],):
        refuse.kernel(f"weight must be [{input.shape[1]}], but got {list(weight.shape)}")


def check_options(
    input: Tensor, weight: Tensor | None, reduction: str, ignore_index: int, label_smoothing: float, refuse: Refusal
) -> None:
    """Ranges of the options, and which of them a call with a gradient may set."""
    if reduction not in ("mean", "sum", "none"):
        refuse.kernel(f"reduction must be mean, sum or none, but got {reduction}")
    if not 0.0 <= label_smoothing < 1.0:
        refuse.kernel(f"label_smoothing must be in [0, 1), but got {label_smoothing}")
    if ignore_index >= input.shape[1]:
        refuse.kernel(f"ignore_index must be less than C {input.shape[1]}, but got {ignore_index}")
    if not input.requires_grad:
        return
    if label_smoothing:
        refuse.kernel(f"with a gradient label_smoothing must be 0, but got {label_smoothing}")
    if reduction == "mean" and (weight is not None or ignore_index != NO_INDEX):
        refuse.kernel(
            f"with a gradient and reduction mean, weight and ignore_index must have their defaults, but got ignore_index "
            f"{ignore_index}{' and a weight' if weight is not None else ''}; use reduction sum and divide"
        )
