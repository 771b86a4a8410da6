"""Sharding by ``fully_shard``: the mesh of ranks, the modules that are gathered together, and their precision."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils._python_dispatch import _disable_current_modes

from megascend.config import Fsdp
from megascend.engines.common.heads import output_layer
from megascend.engines.fsdp.transformers_api import is_fused_experts, layers
from megascend.errors import TopologyError
from megascend.runtime.distributed.engine_groups import EngineGroups, PlainGroups
from megascend.runtime.topology.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megascend.runtime.distributed.process_groups import ProcessGroups


def mesh_ranks(world_size: int, replicas: int, expert: int = 1) -> list[list[int]]:
    """Return the ranks of each replica of the model; a replica's ranks are consecutive. Pure.

    Args:
        expert: expert parallel size; its ranks are consecutive too.
    """
    if world_size % replicas:
        raise TopologyError(
            f"fsdp.replicate={replicas} does not divide the {world_size} processes; each copy of the model is spread over "
            "an equal number of them"
        )
    size = world_size // replicas
    if size % expert:
        raise TopologyError(
            f"parallel.expert={expert} does not divide the {size} processes of a copy of the model (fsdp.replicate={replicas})"
        )
    return [list(range(first, first + size)) for first in range(0, world_size, size)]


def check_layout(topology: Topology) -> None:
    """Raise TopologyError for parallelism that this engine does not support."""
    for axis in ("tensor", "pipeline", "expert_tensor"):
        if topology.size(axis) > 1:
            raise TopologyError(
                f"parallel.{axis}={topology.size(axis)}: engine fsdp has no such axis; set 1, or use engine megatron"
            )
    if topology.context > 1 and topology.context_algorithm != "ulysses":
        raise TopologyError(
            f"parallel.context={topology.context} with context_algorithm={topology.context_algorithm!r}: engine fsdp exchanges "
            "heads; set parallel.context_algorithm: ulysses"
        )


def _flat_mesh(group: ProcessGroup, device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=("shard",))


class FsdpGroups(PlainGroups):
    """Plain process groups; with several replicas of the model also those of both axes of the HSDP mesh, and of experts."""

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self._replicas = replicas
        self._axes: dict[str, ProcessGroup] = {}  # this rank's groups: across replicas, within its replica

    def create(self, topology: Topology, rank: int, timeout_s: float) -> EngineGroups:
        """Create the groups; see :class:`megascend.runtime.distributed.engine_groups.GroupFactory`."""
        groups = super().create(topology, rank, timeout_s)
        if self._replicas > 1:
            replicas = mesh_ranks(topology.world_size, self._replicas, topology.expert)
            axes = {"REPLICATE": [list(ranks) for ranks in zip(*replicas, strict=True)], "SHARD": replicas}
            if topology.expert > 1:
                shards = [ranks[first :: topology.expert] for ranks in replicas for first in range(topology.expert)]
                axes["EXPERT_SHARD"] = shards
            # new_group is collective over the world: every rank creates every group, in the same order.
            for name, axis in axes.items():
                for ranks in axis:
                    group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), group_desc=name)
                    if rank in ranks:
                        assert isinstance(group, dist.ProcessGroup)
                        self._created.append(group)
                        self._axes[name] = group
        return groups

    def mesh(self, world_size: int, device_type: str) -> DeviceMesh:
        """Return ``fully_shard``'s mesh: one axis, or (replicas, ranks of a replica)."""
        if self._replicas == 1:
            return _flat_mesh(dist.distributed_c10d._get_default_group(), device_type)
        return self._replicated_mesh(mesh_ranks(world_size, self._replicas), "SHARD", device_type)

    def expert_mesh(self, topology: Topology, groups: ProcessGroups) -> DeviceMesh:
        """Return the mesh of the ranks that hold the same experts as this rank."""
        device_type = groups.device.type
        if self._replicas == 1:
            return _flat_mesh(groups.device_group("edp"), device_type)
        first = groups.coordinates.expert
        replicas = mesh_ranks(topology.world_size, self._replicas, topology.expert)
        return self._replicated_mesh(
            [ranks[first :: topology.expert] for ranks in replicas], "EXPERT_SHARD", device_type
        )

    def _replicated_mesh(self, ranks: list[list[int]], axis: str, device_type: str) -> DeviceMesh:
        axes = [self._axes["REPLICATE"], self._axes[axis]]
        names = ("replicate", "shard")
        return DeviceMesh.from_group(axes, device_type, torch.tensor(ranks, dtype=torch.int), mesh_dim_names=names)

    def forget(self, destroy: bool) -> None:
        """Forget the groups; see :class:`megascend.runtime.distributed.engine_groups.GroupFactory`."""
        super().forget(destroy)
        self._axes.clear()


def freeze(model: Any, dtype: torch.dtype) -> None:
    """Freeze parameters, and keep them in the compute dtype: without updates, fp32 shards would gain nothing.

    Args:
        model: model on ``meta``, not yet sharded.
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
    """Shard a model on ``meta``: one FSDP unit per layer, one of final norm and output layer, one of the rest.

    Shards keep their dtype, gathered parameters are ``dtype``, and gradients are summed in fp32. A tied output layer shares the
    embedding's parameter, and belongs to the rest with it.

    Args:
        page_locked: offloaded shards are in page-locked memory.
        expert_mesh: mesh over which experts are sharded under expert parallelism; each is then a separate FSDP unit.

    Returns:
        The FSDP units, the model itself first.
    """
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=page_locked) if settings.offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    expert_options: dict[str, Any] = options | {"mesh": expert_mesh}
    split = layers(model)  # before sharding, which changes the class names that it uses
    # fully_shard takes parameters that no unit has yet: inner modules first, the model itself last.
    for layer in split:
        for experts in filter(is_fused_experts, layer.modules() if expert_mesh else ()):
            fully_shard(experts, reshard_after_forward=settings.reshard_after_forward, **expert_options)
            _hide_hooks_from_recomputation(experts)
        fully_shard(layer, reshard_after_forward=settings.reshard_after_forward, **options)
    head = output_layer(model)
    if head.weight is not model.get_input_embeddings().weight:
        norm = getattr(model.base_model, "norm", None)
        # Not resharded after the forward pass: the backward pass starts with them.
        fully_shard([head] if norm is None else [norm, head], reshard_after_forward=False, **options)
    fully_shard(model, **options)
    if expert_mesh is not None:
        _prefetch_next_layers(split)
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _hide_hooks_from_recomputation(unit: nn.Module) -> None:
    """Run the hooks of a unit inside a recomputed layer outside the dispatch modes of selective activation checkpointing."""
    # The modes count operators. The recomputed forward pass may gather where the first one did not, or the reverse, and
    # torch would report an operator that it has not counted before as nondeterminism.

    def without_modes(hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return hook(*args, **kwargs)

        return run

    for hooks in (unit._forward_pre_hooks, unit._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = without_modes(hook)


def _prefetch_next_layers(split: list[nn.Module]) -> None:
    """Make each layer prefetch the parameters of the next one and of its experts, forward and backward.

    By default FSDP2 starts a gather in the forward pass when the host reaches the layer. With expert parallelism the host waits
    for the device in every layer (for the number of rows of each expert), so the device would be idle during the gather.
    """
    layer_units: list[list[FSDPModule]] = [
        [unit for unit in layer.modules() if isinstance(unit, FSDPModule)] for layer in split
    ]
    for before, after in pairwise(layer_units):
        before[0].set_modules_to_forward_prefetch(after)
        after[0].set_modules_to_backward_prefetch(before)


def reshard(units: list[FSDPModule]) -> None:
    """Free gathered parameters."""
    # Without a backward pass, those of the model and its head would remain gathered after a forward pass, and the next one
    # would use the old values even after a load or an update.
    for unit in units:
        unit.reshard()
