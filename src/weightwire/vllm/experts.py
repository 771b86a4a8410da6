"""Layers of experts: which of them vLLM's reload gets right, and what it needs for those on the CPU.

vLLM 0.32 loads such a layer in two steps: weights are brought into a kernel's form, and the kernel prepares them once more
(``FusedMoEExperts.process_weights_after_loading``), which on the CPU packs and pads them. Where the layer has a kernel already, a
reload omits the second step. It leaves plain weights that the kernel reads as packed ones: log-probabilities are off by 4,
without a word. A layer without a kernel is loaded as it was the first time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from weightwire.errors import UpdateError

PREPARED_APART = ("MOONEP",)
"""Backends on accelerators whose experts keep what that second step makes outside the layer's parameters."""


def check_reloadable(model: torch.nn.Module) -> None:
    """Raises UpdateError for a model with layers of experts whose reload is wrong, and would not say so."""
    for name, layer in _layers(model):
        method = layer.quant_method
        on_cpu = any(one.device.type == "cpu" for one in layer.parameters())
        if (on_cpu and not _rebuildable(method)) or _backend(method) in PREPARED_APART:
            raise UpdateError(
                f"{name} is a layer of experts whose weights vLLM's reload may get wrong ({type(method).__name__}, backend "
                f"{_backend(method)}), so this engine takes no updates of its model; on the CPU unquantized ones of vLLM 0.32 "
                "can be updated"
            )


@contextlib.contextmanager
def kernels_built_again(model: torch.nn.Module) -> Iterator[None]:
    """Let a reload in this block load experts on the CPU as the first time, with kernels of their own.

    Afterwards the kernels from before are back. They read the memory that is in force: those of the reload refer to biases of
    the tensors that it has only loaded through. Nothing has captured addresses of either, since there are no graphs on the CPU.
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
    """Modules that own experts' weights, without their routers."""
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

    for name, module in model.named_modules():
        if isinstance(getattr(module, "quant_method", None), FusedMoEMethodBase) and module._parameters:
            yield name, module


def _backend(method: Any) -> str | None:
    return getattr(getattr(method, "unquantized_backend", None), "name", None)


def _rebuildable(method: Any) -> bool:
    """Whether these are unquantized experts on the CPU, as vLLM 0.32 has them."""
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        return False
    kernel = getattr(method, "moe_kernel", None)
    return _backend(method) == "CPU" and isinstance(getattr(kernel, "fused_experts", None), CPUUnquantizedExperts)
