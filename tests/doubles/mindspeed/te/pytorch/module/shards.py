"""Allocating and checkpointing the weights of parallel linears. Not a module of the real MindSpeed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu, _initialize_affine_weight_gpu
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn import Parameter


def allocate_weight(
    shape: tuple[int, int],
    whole: tuple[int, int],
    config: Any,
    init_method: Callable[..., Any],
    partition_dim: int,
    ranks: tuple[int, int] = (0, 1),
    is_expert: bool = False,
) -> Parameter:
    """A shard ``[out, in]`` of a weight of size ``whole``, initialised if the configuration says so.

    Args:
        ranks: this rank and the number of ranks that share the weight.
    """
    weight = empty(shape, config)
    if config.perform_initialization:
        if config.use_cpu_initialization:
            _initialize_affine_weight_cpu(
                weight,
                *whole,
                shape[partition_dim],
                partition_dim,
                init_method,
                params_dtype=config.params_dtype,
                rank=ranks[0],
                world_size=ranks[1],
            )
        else:
            _initialize_affine_weight_gpu(weight, init_method, partition_dim=partition_dim, is_expert=is_expert)
    return weight


def allocate_bias(size: int, config: Any) -> Parameter:
    """``[size]``, zero if the configuration asks for initialisation."""
    bias = empty((size,), config)
    if config.perform_initialization:
        torch.nn.init.zeros_(bias)
    return bias


def empty(shape: tuple[int, ...], config: Any) -> Parameter:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    return Parameter(torch.empty(shape, device=device, dtype=config.params_dtype))


def sharded(module: torch.nn.Module, axes: dict[str, int], prefix: str, offsets: Any) -> dict[str, Any]:
    """The checkpoint's view of a module whose parameters are split along ``axes``."""
    state = module.state_dict(prefix="", keep_vars=True)
    return make_sharded_tensors_for_checkpoint(state, prefix, axes, offsets)
