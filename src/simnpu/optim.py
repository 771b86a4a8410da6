"""``torch_npu.optim``: the fused optimizers, of which AdamW is simulated."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from simnpu.operators.optimizer import adamw

__all__ = ["NpuFusedAdamW", "NpuFusedOptimizerBase"]

FUSABLE = (torch.float32, torch.float16)


class NpuFusedOptimizerBase(Optimizer):
    """Parameters and gradients of one type lie in one block of memory, so that a step is a few large operators.

    Here a step goes through the tensors one by one, with the same result. What follows from the block is kept: only
    float32 and float16, gradients are zeroed in place, and a gradient that left the block is warned of.
    """

    def __init__(self, params: Iterable[Any], default: dict[str, Any]) -> None:
        super().__init__(params, default)
        self.is_fused_optimizer = True
        self.combined: dict[
            Tensor, Tensor
        ] = {}  # gradients when the block was made; kept, so that their addresses stay theirs

    def check_gradients(self) -> None:
        """Remember where gradients lie at the first call, and see at later ones that they still do."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            if parameter.dtype not in FUSABLE:
                raise TypeError(
                    "Fused optimizer's parameters must be either float32 or float16, but received "
                    f"{parameter.dtype} [torch_npu.optim, simulated by simnpu]"
                )
        if not self.combined:
            self.combined = {p: p.grad for p in parameters}
        elif any(p not in self.combined or self.combined[p].data_ptr() != p.grad.data_ptr() for p in parameters):
            warnings.warn(
                "torch_npu.optim: gradients were replaced since the first step, and torch_npu's fused optimizers keep stepping "
                "with the old ones (the simulated one takes the new ones); use optimizer.zero_grad()",
                stacklevel=3,
            )
            self.combined = {p: p.grad for p in parameters}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        self.check_gradients()
        for group in self.param_groups:
            self.step_group(group)
        return loss

    def step_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the gradients in place."""
        if set_to_none:
            raise ValueError("set_to_none is not supported in fused optimizers")
        super().zero_grad(set_to_none=False)

    def clip_grad_norm_fused_(self, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale all gradients so that their common norm is at most ``max_norm``; returns the norm."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not gradients:
            return torch.tensor(0.0)
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(g.float(), norm_type) for g in gradients]), norm_type
        )
        scale = max_norm / (norm + 1e-6)
        if scale < 1:
            for gradient in gradients:
                gradient.mul_(scale)
        return norm


class NpuFusedAdamW(NpuFusedOptimizerBase):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101), optionally with AMSGrad; defaults are torch_npu's.

    Raises:
        ValueError: a setting is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
    ) -> None:
        for name, value, bound in (
            ("learning rate", lr, None),
            ("epsilon value", eps, None),
            ("beta parameter at index 0", betas[0], 1.0),
            ("beta parameter at index 1", betas[1], 1.0),
            ("weight_decay value", weight_decay, None),
        ):
            if value < 0 or (bound is not None and value >= bound):
                raise ValueError(f"Invalid {name}: {value}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(params, defaults)

    def step_group(self, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise RuntimeError(
                    "NpuFusedAdamW does not support sparse gradients, please consider SparseAdam instead"
                )
            state = self.state[parameter]
            if not state:
                state["step"] = 0
                for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["step"] += 1
            adamw(
                parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], 1 - beta1 ** state["step"],
                1 - beta2 ** state["step"], group["lr"], group["weight_decay"], beta1, beta2, group["eps"], False,
                state.get("max_exp_avg_sq"),
            )  # fmt: skip


def __getattr__(name: str) -> object:
    from simnpu.errors import missing

    raise missing(name, "torch_npu.optim")
