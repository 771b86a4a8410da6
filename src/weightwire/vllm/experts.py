"""Reloading of expert layers: refuse those that vLLM reloads wrongly, and work around its error on the CPU.

vLLM 0.32 loads such a layer in two steps: weights are converted to a kernel's format, and the kernel prepares them further
(``FusedMoEExperts.process_weights_after_loading``), which on the CPU packs and pads them. If the layer already has a kernel, a
reload omits the second step. The kernel then reads plain weights as packed ones: log-probabilities are off by 4, without an
error. A layer without a kernel is loaded as for the first time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from weightwire.errors import UpdateError

PREPARED_APART = ("MOONEP",)
"""Backends on accelerators whose experts keep the second step's result outside the layer's parameters."""


def check_reloadable(model: torch.nn.Module) -> None:
    """Raise UpdateError for a model with expert layers that vLLM would reload wrongly without an error."""
    for name, layer in _layers(model):
        method = layer.quant_method
        on_cpu = any(parameter.device.type == "cpu" for parameter in layer.parameters())
        if (on_cpu and not _rebuildable(method)) or _backend(method) in PREPARED_APART:
            raise UpdateError(
                f"{name} is an expert layer whose weights vLLM may reload wrongly ({type(method).__name__}, backend "
                f"{_backend(method)}), so this engine takes no updates of its model; on the CPU unquantized experts of vLLM 0.32 "
                "can be updated"
            )


@contextlib.contextmanager
def kernels_built_again(model: torch.nn.Module) -> Iterator[None]:
    """Make a reload within the context load experts on the CPU as for the first time, with new kernels.

    The old kernels are restored afterwards: they read the model's memory, while the reload's kernels refer to biases in temporary
    tensors. No graph has captured addresses of either, since there are no graphs on the CPU.
    """
    before = [(layer.quant_method, vars(layer.quant_method).copy()) for _, layer in _layers(model)]
    before = [(method, attributes) for method, attributes in before if _rebuildable(method)]
    for method, _ in before:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, attributes in before:
            vars(method).clear()
            vars(method).update(attributes)


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules that own experts' weights, without their routers."""
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

    for name, module in model.named_modules():
        if isinstance(getattr(module, "quant_method", None), FusedMoEMethodBase) and module._parameters:
            yield name, module


def _backend(method: Any) -> str | None:
    return getattr(getattr(method, "unquantized_backend", None), "name", None)


def _rebuildable(method: Any) -> bool:
    """Check for unquantized experts on the CPU as implemented in vLLM 0.32."""
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        return False
    kernel = getattr(method, "moe_kernel", None)
    return _backend(method) == "CPU" and isinstance(getattr(kernel, "fused_experts", None), CPUUnquantizedExperts)
