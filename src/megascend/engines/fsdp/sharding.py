"""Which modules are gathered together, and in which precision they compute."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils._python_dispatch import _disable_current_modes

from megascend.config import Fsdp
from megascend.engines.fsdp.transformers_api import is_fused_experts, layers
from megascend.engines.scalar_head import output_layer


def freeze(model: Any, dtype: torch.dtype) -> None:
    """Parameters get no gradients, and are kept in ``dtype``, the one they compute in: there is no sum to be exact for.

    Args:
        model: without memory, not yet sharded.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def shard(
    model: Any,
    mesh: DeviceMesh,
    settings: Fsdp,
    dtype: torch.dtype,
    *,
    page_locked: bool,
    expert_mesh: DeviceMesh | None = None,
) -> list[FSDPModule]:
    """Shard a model that has no memory yet: each layer by itself, final norm and output layer together, the rest.

    Parameters stay in their dtype on every rank, gathered ones are ``dtype``, and gradients are summed in fp32. A tied output
    layer is the embedding's parameter, and so in the rest with it.

    Args:
        page_locked: offloaded shards lie in page-locked memory.
        expert_mesh: over which experts are sharded, where ranks hold different ones; they are gathered by themselves then.

    Returns:
        What holds gathered parameters, the model itself first.
    """
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=page_locked) if settings.offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    options_of_experts: dict[str, Any] = options | {"mesh": expert_mesh}
    split = layers(model)  # by class names, which sharding changes
    for layer in split:
        for experts in filter(is_fused_experts, layer.modules() if expert_mesh else ()):
            fully_shard(experts, reshard_after_forward=settings.reshard_after_forward, **options_of_experts)
            _hide_hooks_from_recomputation(experts)
        fully_shard(layer, reshard_after_forward=settings.reshard_after_forward, **options)
    head = output_layer(model)
    if head.weight is not model.get_input_embeddings().weight:
        norm = getattr(model.base_model, "norm", None)
        # Needed again as soon as the backward pass begins.
        fully_shard([head] if norm is None else [norm, head], reshard_after_forward=False, **options)
    fully_shard(model, **options)
    if expert_mesh is not None:
        gather_ahead(split)
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _hide_hooks_from_recomputation(unit: nn.Module) -> None:
    """Run the hooks of a unit inside a recomputed layer outside the modes by which selective recomputation counts operators.

    A recomputed forward pass gathers where the first one did not, or the other way round, and torch takes an operator that it has
    not counted before for a sign of nondeterminism.
    """

    def hidden(hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return hook(*args, **kwargs)

        return run

    for hooks in (unit._forward_pre_hooks, unit._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = hidden(hook)


def gather_ahead(split: list[nn.Module]) -> None:
    """Have each layer start the gathering of the next one, forward and backward, with its experts.

    FSDP2 by itself starts a gathering in the forward pass when the host comes to the layer. A host that waits in every layer, for
    the numbers of rows that experts get, comes there when the device has nothing left to do.
    """
    of_layers: list[list[FSDPModule]] = [
        [unit for unit in layer.modules() if isinstance(unit, FSDPModule)] for layer in split
    ]
    for before, after in pairwise(of_layers):
        before[0].set_modules_to_forward_prefetch(after)
        after[0].set_modules_to_backward_prefetch(before)


def reshard(units: list[FSDPModule]) -> None:
    """Free gathered parameters. Those of the model itself and of its head outlast a forward pass that no backward pass follows,
    and the next one would use them, whatever has been loaded or updated meanwhile."""
    for unit in units:
        unit.reshard()
