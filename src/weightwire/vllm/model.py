"""Loads new weights into vLLM's model, and goes back to the old ones where that fails.

vLLM's own reload (``vllm.model_executor.model_loader.reload``) writes into the memory that kernels and captured graphs use, layer
by layer as tensors come. Half done it leaves layers without memory, so that whoever starts it must be able to undo it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from weightwire.errors import ManifestError
from weightwire.vllm.checkpoint import tied_head_checked
from weightwire.vllm.experts import kernels_built_again

KV_CACHE = "kv_cache"


class Structure:
    """What a model's modules and their kernels refer to: a reload puts other tensors and kernels in their places."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._attributes = [(module, _attributes(module)) for module in model.modules()]
        methods = {id(method): method for method in map(_quant_method, model.modules()) if method is not None}
        self._attributes += [(method, _attributes(method)) for method in methods.values()]

    def restore(self) -> None:
        """Put it back, whatever state a reload was left in. What is in the tensors' memory stays as it is."""
        for owner, attributes in self._attributes:
            vars(owner).clear()
            vars(owner).update(attributes)
        _forget_reload(self._model)


class Snapshot:
    """Copies of the memory behind a model's tensors. Taken while the model computes, which only reads its weights.

    Args:
        copies: device that the copies are kept on.
    """

    def __init__(self, model: torch.nn.Module, copies: torch.device | str = "cpu") -> None:
        self._memory: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        for module in model.modules():
            for tensor in _tensors(module):
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in self._memory:
                    self._memory[storage.data_ptr()] = storage, _bytes(storage).to(copies, copy=True)

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.numel() for _, copy in self._memory.values())

    def restore(self) -> None:
        """Copy them back."""
        for storage, copy in self._memory.values():
            _bytes(storage).copy_(copy)


def load(model: torch.nn.Module, model_config: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Put a checkpoint's tensors into a model that computes with others now.

    If it raises, the model is sound, but some of its weights are new. A :class:`Snapshot` has the old ones.

    Raises:
        ManifestError: layers of the model got nothing: they would keep their old values; an output layer of its own came for a
            model that computes logits with its embedding.
        Exception: whatever vLLM's loaders raise.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    device = next(model.parameters()).device
    structure = Structure(model)
    if getattr(model_config.hf_config, "tie_word_embeddings", False):
        tensors = tied_head_checked(tensors)
    try:
        with torch.device(device), torch.no_grad(), kernels_built_again(model):
            initialize_layerwise_reload(model)
            model.load_weights(tensors)  # type: ignore[operator]
            if missing := _without_weights(model):
                raise ManifestError(
                    f"no weights came for {len(missing)} of the engine's layers: {', '.join(missing[:8])}"
                )
            finalize_layerwise_reload(model, model_config)
    except BaseException:
        structure.restore()
        raise
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _without_weights(model: torch.nn.Module) -> list[str]:
    """Layers with parameters for which nothing has come, and which share none with a layer for which something has."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    loaded, waiting = set(), {}
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load():  # complete, and in the kernels' form already
            loaded |= {parameter.data_ptr() for parameter in layer._parameters.values() if parameter is not None}
        elif info.load_numel == 0 and not callable(getattr(layer, "process_weights_after_loading", None)):
            parameters, _ = info.kernel_tensors or ({}, {})
            waiting[name] = {parameter.data_ptr() for parameter in parameters.values() if parameter.numel()}
    return [name for name, addresses in waiting.items() if addresses - loaded]


def _forget_reload(model: torch.nn.Module) -> None:
    """Take vLLM's notes of a reload that was not finished away."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        get_layerwise_info(layer).reset()


def _quant_method(module: torch.nn.Module) -> Any:
    """What vLLM computes the module with, unless it is a module itself: it may hold a kernel that refers to tensors."""
    method = getattr(module, "quant_method", None)
    return method if hasattr(method, "__dict__") and not isinstance(method, torch.nn.Module) else None


def _attributes(owner: Any) -> dict[str, Any]:
    return {name: value.copy() if isinstance(value, (dict, set)) else value for name, value in vars(owner).items()}


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from (tensor for tensor in module._parameters.values() if tensor is not None)
    yield from (tensor for tensor in module._buffers.values() if tensor is not None)
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor) and KV_CACHE not in name:
            yield value


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a flat tensor of bytes that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
