"""The fused operators of ``torch_npu`` in plain PyTorch, with the argument checks of the Ascend kernels.

One file per family. Formulas and argument names follow the public documentation of torch_npu (Ascend Extension for
PyTorch, API reference) and of the aclnn operators below it; sums are taken in float32. An operator that is not here
raises :class:`~simnpu.errors.NotSimulatedError` when its name is looked up.
"""

from simnpu.operators import (
    activation,
    attention,
    cross_entropy,
    matmul,
    mc2,
    moe,
    moe_init_routing,
    moe_routing_map,
    norm,
    optimizer,
    quantisation,
    quantised_matmul,
    rope,
)
from simnpu.operators.dispatch import OPERATORS
from simnpu.operators.library import packets

__all__ = [
    "OPERATORS",
    "activation",
    "attention",
    "cross_entropy",
    "matmul",
    "mc2",
    "moe",
    "moe_init_routing",
    "moe_routing_map",
    "norm",
    "optimizer",
    "packets",
    "quantisation",
    "quantised_matmul",
    "rope",
]
