"""One adapter on a transformers model, put on and taken off by peft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megascend.config import Lora
from megascend.lora.factors import Factors
from megascend.lora.peft_tensors import is_expert_parameter

NAME = "worn"


class WornAdapter:
    """An adapter that is part of the model until :meth:`take_off`.

    Args:
        factors: of every adapted projection; copied, in the model's dtype.
    """

    def __init__(self, model: Any, lora: Lora, factors: Mapping[str, Factors]) -> None:
        from peft import LoraConfig
        from peft.tuners.lora import LoraModel

        parameters = sorted(name for name in factors if is_expert_parameter(name))
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[reportArgumentType]
            use_rslora=lora.rslora,
            lora_dropout=lora.dropout,
            target_modules=sorted(name for name in factors if name not in parameters),
            target_parameters=parameters or None,
            bias="none",
        )
        training = model.training
        self._tuner = LoraModel(model, config, NAME)
        model.train(training)
        self._weights = {name: _weights(model, name) for name in factors}
        for name, (a, b) in self._weights.items():
            pair = factors[name]
            with torch.no_grad():
                a.copy_(pair.a.reshape(a.shape))
                b.copy_(pair.b if pair.b.ndim == 2 else pair.b.permute(1, 2, 0).reshape(b.shape))

    def take_gradients(self) -> dict[str, Factors]:
        """Gradients since the last call, float32; experts as [experts, ...]. None are left."""
        found = {}
        for name, (a, b) in self._weights.items():
            grad_a, grad_b = _taken(a), _taken(b)
            if is_expert_parameter(name):
                rank = self._rank
                grad_a = grad_a.view(-1, rank, grad_a.shape[1])
                grad_b = grad_b.view(grad_b.shape[0], rank, -1).permute(2, 0, 1)
            found[name] = Factors(grad_a, grad_b)
        return found

    @property
    def _rank(self) -> int:
        return self._tuner.peft_config[NAME].r  # type: ignore[reportAttributeAccessIssue]

    def take_off(self) -> None:
        """The model is the base model again."""
        self._tuner.unload()


def _weights(model: Any, name: str) -> tuple[Tensor, Tensor]:
    """peft's A and B of one projection."""
    if not is_expert_parameter(name):
        layer = model.get_submodule(name)
    else:  # one wrapper for each adapted parameter of the module, one around the other
        experts, _, parameter = name.rpartition(".")
        layer = model.get_submodule(experts)
        while layer.parameter_name != parameter:
            layer = layer.base_layer
    return layer.lora_A[NAME].weight, layer.lora_B[NAME].weight


def _taken(weight: Tensor) -> Tensor:
    grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    weight.grad = None
    return grad.float()
