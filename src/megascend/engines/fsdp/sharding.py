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
from megascend.distributed.engine_groups import EngineGroups, PlainGroups
from megascend.engines.fsdp.transformers_api import is_fused_experts, layers
from megascend.engines.heads import output_layer
from megascend.errors import TopologyError
from megascend.topology.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megascend.distributed.process_groups import ProcessGroups


def mesh_ranks(world_size: int, replicas: int, expert: int = 1) -> list[list[int]]:
    """Return the ranks of each copy of the model, neighbours together. Pure.

    Args:
        expert: ranks that hold different experts; neighbours, too.

    Raises:
        TopologyError: the ranks cannot be divided by the copies, or a copy's by the experts'.
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
    """Raise TopologyError for axes that this engine does not have."""
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


def _line(group: ProcessGroup, device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=("shard",))


class FsdpGroups(PlainGroups):
    """The plain groups, and with several copies of the model those along both axes of its mesh and of the experts'."""

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self._replicas = replicas
        self._axes: dict[str, ProcessGroup] = {}  # this rank's groups: across the copies, within its copy

    def create(self, topology: Topology, rank: int, timeout_s: float) -> EngineGroups:
        """See :class:`megascend.distributed.engine_groups.GroupFactory`."""
        made = super().create(topology, rank, timeout_s)
        if self._replicas > 1:
            copies = mesh_ranks(topology.world_size, self._replicas, topology.expert)
            axes = {"REPLICATE": [list(ranks) for ranks in zip(*copies, strict=True)], "SHARD": copies}
            if topology.expert > 1:
                parts = [ranks[first :: topology.expert] for ranks in copies for first in range(topology.expert)]
                axes["EXPERT_SHARD"] = parts
            for name, axis in axes.items():
                for ranks in axis:
                    group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), group_desc=name)
                    if rank in ranks:
                        assert isinstance(group, dist.ProcessGroup)
                        self._created.append(group)
                        self._axes[name] = group
        return made

    def mesh(self, world_size: int, device_type: str) -> DeviceMesh:
        """Return ``fully_shard``'s mesh: one axis, or (copies, ranks of a copy)."""
        if self._replicas == 1:
            return _line(dist.distributed_c10d._get_default_group(), device_type)
        return self._grid(mesh_ranks(world_size, self._replicas), "SHARD", device_type)

    def expert_mesh(self, topology: Topology, groups: ProcessGroups) -> DeviceMesh:
        """Return the same mesh of the ranks that hold this rank's experts."""
        device_type = groups.device.type
        if self._replicas == 1:
            return _line(groups.device_group("edp"), device_type)
        first = groups.coordinates.expert
        copies = mesh_ranks(topology.world_size, self._replicas, topology.expert)
        return self._grid([ranks[first :: topology.expert] for ranks in copies], "EXPERT_SHARD", device_type)

    def _grid(self, ranks: list[list[int]], within: str, device_type: str) -> DeviceMesh:
        axes = [self._axes["REPLICATE"], self._axes[within]]
        names = ("replicate", "shard")
        return DeviceMesh.from_group(axes, device_type, torch.tensor(ranks, dtype=torch.int), mesh_dim_names=names)

    def forget(self, destroy: bool) -> None:
        """See :class:`megascend.distributed.engine_groups.GroupFactory`."""
        super().forget(destroy)
        self._axes.clear()


def freeze(model: Any, dtype: torch.dtype) -> None:
    """Have parameters get no gradients, and keep them in ``dtype``, the one they compute in: there is no sum to be exact for.

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
