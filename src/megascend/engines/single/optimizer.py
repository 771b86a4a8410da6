"""torch's AdamW on a model's parameters, or on fp32 originals of those of 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from megascend.config import Adam, Precision, Schedule
from megascend.engines.adamw import MainAdamW


class Optimizer(MainAdamW):
    """AdamW over a model's parameters.

    A parameter of 16 bits has an fp32 original, which is what is updated. Every parameter's gradients are summed in fp32, in
    its ``main_grad``.
    """

    def __init__(self, model: torch.nn.Module, adam: Adam, schedule: Schedule, precision: Precision) -> None:
        super().__init__({name: (own, _main(own)) for name, own in model.named_parameters()}, adam, schedule, precision)


def _main(parameter: torch.nn.Parameter) -> Tensor:
    """What is updated: the parameter, or its fp32 original. Gradients arrive in its ``grad``, which always exists."""
    if parameter.dtype == torch.float32:
        parameter.grad = torch.zeros_like(parameter)
        parameter.main_grad = parameter.grad  # type: ignore[reportAttributeAccessIssue]
        return parameter
    main = parameter.detach().float().requires_grad_()
    main.grad = torch.zeros_like(main)
    parameter.main_grad = main.grad  # type: ignore[reportAttributeAccessIssue]

    def add(own: torch.Tensor) -> None:
        if own.grad is not None:
            main.grad.add_(own.grad)  # type: ignore[reportOptionalMemberAccess]
            own.grad = None

    parameter.register_post_accumulate_grad_hook(add)
    return main
