"""What megatron-core takes for Apex's FusedAdam. Both give AdamW's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mindspeed.flavour import IS_0_16
from torch.optim import AdamW as TorchAdamW
from torch.optim import Optimizer


def _next_on_device(step: torch.Tensor | None) -> torch.Tensor:
    following = torch.tensor(1, dtype=torch.int64) if step is None else step + 1
    return following.cuda() if following.is_cpu else following


class AdamW(Optimizer):
    """AdamW that counts steps per group, as Apex does (Megatron's distributed optimizer relies on it).

    ``adam_w_mode`` is accepted and ignored: the decay is always decoupled. ``amsgrad`` is not offered by this double.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        adam_w_mode: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        if amsgrad:
            raise NotImplementedError("the double of MindSpeed has no amsgrad")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": False}
        super().__init__(params, defaults | {"maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if IS_0_16:
                group["step"] = int(group.get("step", 0)) + 1
            else:  # counts in a tensor on the device, and fails on a number that somebody else has put there
                group["step"] = _next_on_device(group.get("step"))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """One step of one parameter (Loshchilov & Hutter 2019, algorithm 2)."""
        state = self.state[parameter]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        grad = -parameter.grad if group["maximize"] else parameter.grad  # type: ignore[operator]
        beta1, beta2 = group["betas"]
        steps = int(group["step"])
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        spread = (state["exp_avg_sq"] / (1 - beta2**steps)).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(state["exp_avg"], spread, value=-group["lr"] / (1 - beta1**steps))


class FusedTorchAdamW(TorchAdamW):
    """torch's own AdamW, for ``optimizer_selection='fused_torch_adamw'``."""

    def __init__(self, params: Any, *args: Any, adam_w_mode: bool = False, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)
