"""``torch.compile`` for a model's layers.

Each layer is compiled without its hooks, so that ``fully_shard`` still gathers before it and reduces after it. Layers of one
class share the code compiled for the first of them. Layers with experts are compiled in parts, without routing and the products
of experts, whose shapes depend on the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo.config
from torch import nn

from megascend.changes import patch

BACKEND = "inductor"
MAX_VARIANTS = 64
"""Limit of compiled variants of a function: shapes (constant, varying), packed and padded batches, with and without gradients,
kinds of layers. Beyond it torch runs the function uncompiled; torch's default is 8."""


def compile_layers(layers: Sequence[nn.Module], is_experts: Callable[[nn.Module], bool]) -> None:
    """Compile layers, at their first call.

    Args:
        is_experts: True for a module that is a layer's experts.
    """
    patch(torch._dynamo.config, "recompile_limit", MAX_VARIANTS, "more variants of a compiled layer")
    for layer in layers:
        for part in _parts(layer, is_experts):
            patch(part, "forward", torch.compile(part.forward, backend=BACKEND), "compiled")
        experts: Any
        for experts in filter(is_experts, layer.modules()):
            # Between the products, which stay uncompiled, the gate is elementwise work on the widest activations.
            if hasattr(experts, "_apply_gate"):
                patch(experts, "_apply_gate", torch.compile(experts._apply_gate, backend=BACKEND), "compiled")


def _parts(module: nn.Module, is_experts: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """Yield the module, or its largest submodules without experts and without their router."""
    if not any(is_experts(inner) for inner in module.modules()):
        yield module
        return
    beside_experts = any(is_experts(child) for child in module.children())
    for child in module.children():
        if is_experts(child) or (beside_experts and not list(child.children())):  # a router has no submodules
            continue
        yield from _parts(child, is_experts)
