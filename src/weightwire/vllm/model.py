"""Load new weights into vLLM's model, and restore the old ones if that fails.

vLLM's reload (``vllm.model_executor.model_loader.reload``) writes into the memory that kernels and captured graphs use, layer by
layer as tensors arrive. If it is interrupted, layers are left without memory, so its caller must be able to undo it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch

from weightwire.errors import ManifestError, UpdateError
from weightwire.reception import side_stream
from weightwire.vllm.checkpoint import tied_head_checked

KV_CACHE = "kv_cache"
PREPARED_APART = ("MOONEP",)
"""Backends on accelerators whose experts keep the second step's result outside the layer's parameters."""

UNCONVERTED = ("TRITON", "BATCHED_TRITON")
"""Backends that read experts' weights as they are stored."""


class Structure:
    """References held by a model's modules and their kernels: a reload replaces tensors and kernels."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._attributes = [(module, _attributes(module)) for module in model.modules()]
        # Layers may share one object.
        methods = {id(method): method for method in map(_quant_method, model.modules()) if method is not None}
        self._attributes += [(method, _attributes(method)) for method in methods.values()]

    def restore(self) -> None:
        """Restore the references after a reload that stopped in any state. The content of the tensors stays unchanged."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for owner, attributes in self._attributes:
            # Cleared first: attributes that the reload has added would remain.
            vars(owner).clear()
            vars(owner).update(attributes)
        # vLLM's state of an unfinished reload.
        for layer in self._model.modules():
            get_layerwise_info(layer).reset()


class Snapshot:
    """Copies on the host of the memory of a model's tensors, taken while the model computes, which only reads its weights.

    Args:
        memory: an earlier snapshot of the model, which is no longer needed: its memory is used again.
    """

    def __init__(self, model: torch.nn.Module, memory: Snapshot | None = None) -> None:
        self._memory: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        self._names: dict[int, str] = {}
        before = {} if memory is None else memory._memory
        with side_stream(next(model.parameters()).device):
            for prefix, module in model.named_modules():
                for name, tensor in _tensors(module):
                    storage = tensor.untyped_storage()
                    # Tied weights and views share memory, which is copied once.
                    if not storage.nbytes() or storage.data_ptr() in self._memory:
                        continue
                    _, copy = before.get(storage.data_ptr(), (None, None))
                    # New memory of the host costs more than the copy: each of its pages is cleared at its first use.
                    if copy is None or copy.numel() != storage.nbytes():
                        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
                    copy.copy_(_bytes(storage))
                    self._memory[storage.data_ptr()] = storage, copy
                    self._names[storage.data_ptr()] = f"{prefix}.{name}"

    def restore(self) -> None:
        """Copy the content back."""
        for storage, copy in self._memory.values():
            _bytes(storage).copy_(copy)

    def changed_elsewhere(self, addresses: set[int]) -> str | None:
        """Return the name of a tensor that differs from its copy and is not in the memory at ``addresses``; None without one."""
        for address, (storage, copy) in self._memory.items():
            if address not in addresses and not torch.equal(_bytes(storage), copy.to(storage.device)):
                return self._names[address]
        return None


@contextlib.contextmanager
def parameters_on_meta(model: torch.nn.Module) -> Iterator[None]:
    """Replace the model's parameters by tensors without memory within the context, so that its loaders can be observed."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

    structure = Structure(model)
    try:
        for module in model.modules():
            restore_layer_on_meta(module, get_layerwise_info(module))
            for parameter in module._parameters.values():
                # The last reload has left loaders that defer loading, and load nothing outside a reload.
                if getattr(getattr(parameter, "weight_loader", None), "__name__", "") == "online_process_loader":
                    parameter.weight_loader = _get_original_loader(parameter)  # type: ignore[union-attr,arg-type]
        yield
    finally:
        structure.restore()


def load(model: torch.nn.Module, model_config: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load a checkpoint's tensors into a model that is in use.

    If it raises, the model can compute, but some of its weights are new. A :class:`Snapshot` has the old ones.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    device = next(model.parameters()).device
    # For a reload that is interrupted: the caller's snapshot has the content, not the references.
    structure = Structure(model)
    if getattr(model_config.hf_config, "tie_word_embeddings", False):
        tensors = tied_head_checked(tensors)
    try:
        with torch.device(device), torch.no_grad(), kernels_kept(model):
            initialize_layerwise_reload(model)
            model.load_weights(tensors)  # type: ignore[operator]
            if missing := _without_weights(model):
                raise ManifestError(
                    f"no weights came for {len(missing)} of the engine's layers: {', '.join(missing[:8])}"
                )
            finalize_layerwise_reload(model, model_config)
            _pack_tied_heads(model)
    except BaseException:
        structure.restore()
        raise
    # Kernels of the reload may still run; errors of theirs belong to this update.
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _pack_tied_heads(model: torch.nn.Module) -> None:
    """Make output layers that share the embedding's weights compute with the new ones.

    On the CPU a layer computes with a packed copy. vLLM's reload packs only layers that were loaded themselves, so a tied output
    layer would keep the old weights: log-probabilities are off, without an error (0.32).
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            method: Any = module.quant_method
            method.process_weights_after_loading(module)


def _without_weights(model: torch.nn.Module) -> list[str]:
    """Return layers whose parameters were not loaded, neither themselves nor as those of a layer that shares them."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    loaded, waiting = set(), {}
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load():  # complete, and already in the kernels' format
            loaded |= {parameter.data_ptr() for parameter in layer._parameters.values() if parameter is not None}
        elif info.load_numel == 0 and not callable(getattr(layer, "process_weights_after_loading", None)):
            parameters, _ = info.kernel_tensors or ({}, {})
            waiting[name] = {parameter.data_ptr() for parameter in parameters.values() if parameter.numel()}
    return [name for name, addresses in waiting.items() if addresses - loaded]


def _quant_method(module: torch.nn.Module) -> Any:
    """Return vLLM's object that computes the module, unless it is a module: its kernel may refer to tensors."""
    method = getattr(module, "quant_method", None)
    return method if hasattr(method, "__dict__") and not isinstance(method, torch.nn.Module) else None


def _attributes(owner: Any) -> dict[str, Any]:
    return {name: value.copy() if isinstance(value, (dict, set)) else value for name, value in vars(owner).items()}


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, value) for name, value in module._parameters.items() if value is not None)
    yield from ((name, value) for name, value in module._buffers.items() if value is not None)
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor) and KV_CACHE not in name:
            yield name, value


def storage_id(tensor: torch.Tensor | None) -> int:
    """Return a number of the tensor's storage, also of one without memory; -1 for None."""
    return -1 if tensor is None else tensor.untyped_storage()._cdata


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """View a storage as a flat tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


# --- experts ---
#
# vLLM 0.32 loads an expert layer in two steps: weights are converted to a kernel's format, and the kernel prepares them further
# (``FusedMoEExperts.process_weights_after_loading``), which on the CPU packs and pads them. If the layer already has a kernel, a
# reload omits the second step. The kernel then reads plain weights as packed ones: log-probabilities are off by 4, without an
# error. A layer without a kernel is loaded as for the first time. Experts in fp8 blocks have one step, which also replaces the
# kernel.


def check_reloadable(model: torch.nn.Module, vllm_config: Any) -> None:
    """Raise UpdateError for a model with expert layers that vLLM would reload wrongly without an error."""
    for name, layer in _expert_layers(model):
        method = layer.quant_method
        # Loaders know where experts are at the start, not where the balancer has moved them.
        if getattr(vllm_config.parallel_config, "enable_eplb", False):
            raise UpdateError(
                f"this engine balances experts between its workers (enable_eplb), and a reload would put those of {name} where "
                "they were at its start: start vLLM without it"
            )
        inner = getattr(method, "old_quant_method", None)
        if inner is not None and _expert_backend(inner) not in UNCONVERTED:
            raise UpdateError(
                f"{name}: --enable-lora leaves experts as stored, and backend {_expert_backend(inner)} of "
                f"{type(inner).__name__} reads them converted: start vLLM without it"
            )
        on_cpu = any(parameter.device.type == "cpu" for parameter in layer.parameters())
        reloads = _rebuildable(method) or _in_fp8_blocks(method)
        if (on_cpu and not reloads) or _expert_backend(method) in PREPARED_APART:
            raise UpdateError(
                f"{name} is an expert layer whose weights vLLM may reload wrongly ({type(method).__name__}, backend "
                f"{_expert_backend(method)}); on the CPU only unquantized experts or fp8 blocks are updated"
            )


@contextlib.contextmanager
def kernels_kept(model: torch.nn.Module) -> Iterator[None]:
    """Keep the kernels of quantised experts over a reload within the context; on the CPU, load plain ones as for the first time.

    A kernel that the reload builds refers to the tensors that it loads into, which are temporary: biases, scales of blocks. The
    kernel before and captured graphs refer to the model's memory, to which the reload copies those tensors.

    Raises:
        UpdateError: the new kernel has other tensors than the one before, which would compute with the old weights.
    """
    layers = [
        (name, layer.quant_method, vars(layer.quant_method).copy())
        for name, layer in _expert_layers(model)
        if _rebuildable(layer.quant_method) or not _is_plain(layer.quant_method)
    ]
    for _, method, _ in layers:
        if _rebuildable(method):
            method.moe_kernel = None
    modules = set(map(id, model.modules()))
    try:
        yield
        for name, method, attributes in layers:
            before, after = attributes.get("moe_kernel"), getattr(method, "moe_kernel", None)
            if before is not None and (path := _differing_tensor(before, after, modules)) is not None:
                raise UpdateError(
                    f"{name}: vLLM's reload builds another kernel of these experts ({type(method).__name__}, backend "
                    f"{_expert_backend(method)}): {path} differs; start vLLM with another --moe-backend"
                )
    finally:
        for _, method, attributes in layers:
            if getattr(method, "moe_kernel", None) is not attributes.get("moe_kernel"):
                vars(method).clear()
                vars(method).update(attributes)


def _differing_tensor(before: Any, after: Any, modules: set[int]) -> str | None:
    """Return the path of a tensor that two kernels of a layer hold with different content; None if they compute the same."""
    if before is after:
        return None
    tensors, expected = _kernel_tensors(before, modules), _kernel_tensors(after, modules)
    for path in sorted(tensors.keys() | expected.keys()):
        tensor, other = tensors.get(path), expected.get(path)
        if tensor is other:
            continue
        if tensor is None or other is None or (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            return path
        # Bits: scales may be NaN.
        pair = [side.detach().contiguous().view(-1).view(torch.uint8) for side in (tensor, other)]
        if not torch.equal(*pair):
            return path
    return None


def _kernel_tensors(kernel: Any, modules: set[int]) -> dict[str, torch.Tensor]:
    """Return the tensors that a kernel refers to, by their path.

    Args:
        modules: ids of the model's modules, whose tensors the reload has replaced.
    """
    tensors: dict[str, torch.Tensor] = {}
    visited: set[int] = set(modules)
    stack = [("", kernel)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, torch.Tensor):
            tensors[path] = value
            continue
        if id(value) in visited:
            continue
        if isinstance(value, dict):
            items = list(value.items())
        elif isinstance(value, (list, tuple)):
            items = list(enumerate(value))
        elif hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType)) and not hasattr(value, "__get__"):
            # Buffers of communication, which depend on the last batch, and on no weights.
            items = [item for item in vars(value).items() if item[0] != "prepare_finalize"]
        else:
            continue
        visited.add(id(value))
        stack += [(f"{path}.{name}".lstrip("."), item) for name, item in items]
    return tensors


def _expert_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules that own experts' weights, without their routers."""
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

    for name, module in model.named_modules():
        if isinstance(getattr(module, "quant_method", None), FusedMoEMethodBase) and module._parameters:
            yield name, module


def _expert_backend(method: Any) -> str | None:
    backend = getattr(method, "unquantized_backend", None) or getattr(method, "fp8_backend", None)
    return getattr(backend, "name", None)


def _is_plain(method: Any) -> bool:
    """Check for experts that are not quantised."""
    return any(kind.__name__ == "UnquantizedFusedMoEMethod" for kind in type(method).__mro__)


def _in_fp8_blocks(method: Any) -> bool:
    """Check for experts in fp8 blocks, whose kernel vLLM builds anew whenever it has loaded their weights."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

    return type(method) is Fp8MoEMethod and bool(getattr(method, "block_quant", False))


def _rebuildable(method: Any) -> bool:
    """Check for unquantized experts on the CPU as implemented in vLLM 0.32."""
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        return False
    kernel = getattr(method, "moe_kernel", None)
    return getattr(getattr(method, "unquantized_backend", None), "name", None) == "CPU" and isinstance(
        getattr(kernel, "fused_experts", None), CPUUnquantizedExperts
    )
