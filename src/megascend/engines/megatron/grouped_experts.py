"""``moe.experts``: experts by grouped products and indexed permutations, chosen when a model is built."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megascend.changes import patch
from megascend.config import Moe, Precision
from megascend.engines.megatron.expert_dispatch import IndexedDispatcher
from megascend.engines.megatron.expert_weights import ExpertWeights
from megascend.errors import ConfigError
from megascend.lora.grouped import kernel_of

_logger = logging.getLogger(__name__)


def wanted(moe: Moe, config: Any, precision: Precision, device: torch.device, *, overlapped: bool) -> bool:
    """Whether experts are to be grouped. ``auto`` groups them on GPUs, wherever that can be done.

    Args:
        overlapped: gradients are reduced while the backward pass runs, in buckets that may divide a layer's experts.

    Raises:
        ConfigError: ``moe.experts: grouped`` where it would be slow, wrong or nothing at all.
    """
    if moe.experts == "upstream":
        return False
    wrong = _unfit(config, precision, device)
    if moe.experts == "grouped":
        if wrong:
            raise ConfigError(f"moe.experts: grouped, but {wrong}; set moe.experts: upstream")
        return True
    if not config.num_moe_experts or device.type != "cuda":
        return False
    if wrong is None and overlapped:
        wrong = "optimizer.overlap_grad_reduce may divide a layer's gradients (set moe.experts: grouped to try)"
    if wrong:
        _logger.info("moe.experts: auto: experts are Transformer Engine's: %s", wrong)
    return wrong is None


def _unfit(config: Any, precision: Precision, device: torch.device) -> str | None:
    if not config.num_moe_experts:
        return f"{config.hf_model_type} has no experts"
    if device.type == "npu":
        return "on NPUs experts are MindSpeed's"
    if device.type == "cuda":
        if kernel_of(device) != "torch":
            return f"torch's grouped products need compute capability 9.0, and this is {torch.cuda.get_device_name(device)}"
        if precision != "bf16":
            return f"torch's grouped products need precision bf16, not {precision}"
        width = config.moe_ffn_hidden_size // config.expert_tensor_parallel_size
        if config.hidden_size % 8 or width % 8:
            return f"sizes must be multiples of 8, not {config.hidden_size} and {width}"
    for name in ("moe_permute_fusion", "moe_shared_expert_overlap", "add_bias_linear", "fp8"):
        if getattr(config, name, None):
            return f"the model has {name}"
    if config.moe_expert_capacity_factor is not None:
        return "tokens above a capacity are dropped"
    return None


def install(chunks: Sequence[torch.nn.Module], device: torch.device, *, required: bool) -> list[ExpertWeights]:
    """Change every layer of experts in ``chunks``, before Megatron's DDP takes their parameters.

    Args:
        required: layers of another make are an error; otherwise they stay, all of them, and the log says so.

    Raises:
        ConfigError: a layer is not made of what this replaces.
    """
    layers: list[Any] = [module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)]
    for layer in layers:
        experts, dispatcher = layer.experts, layer.token_dispatcher
        if not isinstance(experts, TEGroupedMLP) or type(dispatcher) is not MoEAlltoAllTokenDispatcher:
            made_of = f"the model has {type(experts).__name__} and {type(dispatcher).__name__}"
            if required:
                raise ConfigError(f"moe.experts: grouped, but {made_of}; set moe.experts: upstream")
            _logger.info("moe.experts: auto: experts are upstream's: %s", made_of)
            return []
    found = []
    for layer in layers:
        dispatcher = IndexedDispatcher(layer.token_dispatcher)
        patch(layer, "token_dispatcher", dispatcher, "permutes by indices on the device")
        found += [ExpertWeights(layer.experts.linear_fc1), ExpertWeights(layer.experts.linear_fc2)]
    if not found:  # a pipeline stage of dense layers alone
        return []
    how = "torch._grouped_mm" if kernel_of(device) == "torch" else "a loop of products (no grouped kernel here)"
    _logger.info(
        "experts are grouped: %d layers of experts by %s on %s; moe.experts: upstream switches it off",
        len(found) // 2,
        how,
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    )
    return found


def settle(weights: Sequence[ExpertWeights], chunks: Sequence[Any]) -> None:
    """Connect what :func:`install` returned with parameters and gradients where they lie now, when all is built."""
    groups: dict[Any, Any] = {}
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_grad_reduce:
            groups.update(dict.fromkeys(chunk.param_to_bucket_group, chunk))

    def ready(parameter: Any) -> None:
        chunk = groups[parameter]
        options = [chunk.force_all_reduce] if hasattr(chunk, "force_all_reduce") else []  # not in 0.15
        chunk.param_to_bucket_group[parameter].register_grad_ready(parameter, *options)

    for each in weights:
        each.settle(ready if groups else None)
