"""The activation function of gated MLPs: mcore-bridge takes SiLU for all of them, whatever ``hidden_act`` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from megatron.core.activations import squared_relu
from torch import Tensor

from megascend.errors import ConfigError

tanh_gelu = partial(F.gelu, approximate="tanh")
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": tanh_gelu,
    "gelu_pytorch_tanh": tanh_gelu,
    "relu": F.relu,
    "relu2": squared_relu,
}
"""By the names that transformers gives them (``transformers.activations.ACT2FN``)."""
SILU = ("silu", "swish")


def activation_arguments(hidden_act: str | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """TransformerConfig's settings for a gated MLP with ``hidden_act``.

    Args:
        hidden_act: as the model's configuration has it, or None if it has none.
        arguments: mcore-bridge's; where they decide the activation themselves, nothing is added.

    Raises:
        ConfigError: a function that nothing here is known to compute.
    """
    if hidden_act is None or hidden_act in SILU or "swiglu" in arguments or "activation_func" in arguments:
        return {}
    if hidden_act not in FUNCTIONS:
        raise ConfigError(
            f"config.json: hidden_act {hidden_act!r}: megascend computes {', '.join([*SILU, *FUNCTIONS])}; a model with another "
            "one cannot be trained here"
        )
    return {"swiglu": False, "gated_linear_unit": True, "activation_func": FUNCTIONS[hidden_act]}
