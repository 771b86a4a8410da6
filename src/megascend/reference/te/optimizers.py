"""FusedAdam, FusedSGD and the multi-tensor functions that megatron-core's optimizer calls.

``simnpu.optim`` has a similar AdamW. The duplication is deliberate: simnpu does not import megascend, and the reference
Transformer Engine does not depend on the simulated device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megascend.errors import ConfigError
from megascend.reference.reductions import square_sum
from megascend.reference.te.unsupported import refuse_settings

MEGATRON_NAMES = {
    "master_weights": "use_precision_aware_optimizer",
    "use_decoupled_grad": "use_precision_aware_optimizer",
    "exp_avg_dtype": "exp_avg_dtype (use fp32)",
    "exp_avg_sq_dtype": "exp_avg_sq_dtype (use fp32)",
}
"""Megatron-Core's settings from which these arguments come, for messages: users do not construct the optimizer themselves."""


class FusedAdam(torch.optim.Optimizer):
    """Adam with fp32 moments and one ``step`` counter for each parameter group.

    megatron-core's distributed optimizer saves and loads the counter of the group; ``torch.optim.AdamW`` has one for each
    parameter instead. Parameters may be fp32, fp16 or bf16; the arithmetic is fp32.

    Args:
        adam_w_mode: True for decoupled weight decay (AdamW), False for L2 regularisation (Adam).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        refused = {
            "amsgrad": amsgrad,
            "capturable": capturable,
            "master_weights": master_weights,
            "use_decoupled_grad": use_decoupled_grad,
            "exp_avg_dtype": exp_avg_dtype if exp_avg_dtype != torch.float32 else None,
            "exp_avg_sq_dtype": exp_avg_sq_dtype if exp_avg_sq_dtype != torch.float32 else None,
        }
        refuse_settings("FusedAdam", refused, MEGATRON_NAMES)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    def initialize_state(self, param: Tensor, store_param_remainders: bool = False) -> None:
        """Create zero fp32 moments for ``param``."""
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[param][name] = torch.zeros_like(param, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Perform one update. Empty groups count the step too, so that the counters of all ranks agree."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if "exp_avg" not in state:
            self.initialize_state(param)
        assert param.grad is not None
        grad, wide = param.grad.float(), param.float()
        decay = group["weight_decay"]
        if decay and not self.adam_w_mode:
            # Not in place: for fp32 parameters ``grad`` is param.grad itself.
            grad = grad.add(wide, alpha=decay)
        beta1, beta2 = group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        correction1 = correction2 = 1.0
        if group["bias_correction"]:
            correction1 = 1 - beta1 ** group["step"]
            correction2 = 1 - beta2 ** group["step"]
        # (mean / correction1) / (sqrt(square / correction2) + eps): eps counts after the correction, as in Transformer Engine.
        update = mean / (square.sqrt().div_(math.sqrt(correction2)).add_(group["eps"])).mul_(correction1)
        if decay and self.adam_w_mode:
            update.add_(wide, alpha=decay)
        # For fp32 parameters ``wide`` is the parameter itself, and this is in place.
        param.copy_(wide.add_(update, alpha=-group["lr"]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, and keep the moments in fp32, where torch would cast them to the parameter's dtype."""
        super().load_state_dict(state_dict)
        # State dicts number parameters through the groups in order, which pairs them with this optimizer's.
        names = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for name, param in zip(names, self._all_params(), strict=True):
            for key, value in state_dict["state"].get(name, {}).items():
                if isinstance(value, Tensor):
                    self.state[param][key] = value.detach().to(param.device, torch.float32, copy=True)

    def _all_params(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)


class FusedSGD(torch.optim.SGD):
    """SGD with momentum; weight decay is added to the gradient before the momentum."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        refuse_settings("FusedSGD", {"wd_after_momentum": wd_after_momentum})
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)


def multi_tensor_applier(
    op: Callable[..., Any], noop_flag: Tensor | None, tensor_lists: list[list[Tensor]], *args: Any
) -> Any:
    """Call ``op(chunk_size, noop_flag, tensor_lists, *args)``; the lists must be equally long."""
    counts = [len(tensors) for tensors in tensor_lists]
    if len(set(counts)) > 1:
        raise ConfigError(f"multi_tensor_applier needs lists of equal length, got {counts}")
    # The chunk size that Apex and Transformer Engine pass to their kernels; the functions below have no use for it.
    return op(2048 * 32, noop_flag, tensor_lists, *args)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor | None, tensor_lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the fp32 norm over all tensors of the first list, ``[1]``, and with ``per_tensor`` of each, ``[n]``, else empty."""
    tensors = tensor_lists[0]
    # A rank may own no parameter of the distributed optimizer; its norm of 0 still enters the all-reduce.
    if not tensors:
        return torch.zeros(1), torch.zeros(0)
    squares = torch.stack([square_sum(tensor) for tensor in tensors])
    return squares.sum().sqrt().reshape(1), squares.sqrt() if per_tensor else squares[:0]


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor | None, tensor_lists: list[list[Tensor]], scale: float | Tensor
) -> None:
    """Write ``scale * source`` to the destinations; ``noop_flag`` becomes 1 if a source is not finite."""
    sources, destinations = tensor_lists
    for source, destination in zip(sources, destinations, strict=True):
        if noop_flag is not None:
            flawed = torch.isfinite(source).all().logical_not().to(noop_flag.dtype)
            # Only ever set: callers may use one flag for several lists, and clear it themselves.
            noop_flag.copy_(torch.maximum(noop_flag, flawed.to(noop_flag.device)))
        # One tensor in both lists, as in gradient clipping, is scaled in place, without an fp32 copy.
        destination.copy_(source.float() * scale if source is not destination else source.mul_(scale))
