"""Reducing, measuring and stepping the gradients of several adapters, each as if it were alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megascend.batch.results import StepResult
from megascend.config import Adam
from megascend.distributed.process_groups import ProcessGroups
from megascend.lora.adapter import Adapter
from megascend.lora.layout import SHARDINGS, Sharding
from megascend.lora.transfer import is_main_replica
from megascend.topology.topology import Topology


class AdapterOptimizer:
    """Steps adapters. The state is that of the adapters; the ranks it is reduced over are those of the topology."""

    def __init__(self, topology: Topology, groups: ProcessGroups) -> None:
        self._topology, self._groups = topology, groups

    def step(self, adapters: Sequence[Adapter], adam: Mapping[str, Adam]) -> dict[str, StepResult]:
        """Reduce, clip and step each adapter by its own gradients; one whose gradients are not finite is skipped.

        Args:
            adam: settings of this step alone, by adapter.

        Collective over the world, whose ranks pass the same adapters. Waits for the device once.
        """
        self._groups.monitor.call("grad reduce", self._reduce_all, adapters)
        with self._groups.monitor.phase("update"):
            squares = torch.stack([self._square_norm(adapter) for adapter in adapters])
            if self._topology.world_size > 1:
                dist.all_reduce(squares)
            norms = squares.sqrt().tolist()
            return {
                adapter.name: adapter.step(norm, adam.get(adapter.name))
                for adapter, norm in zip(adapters, norms, strict=True)
            }

    def _reduce_all(self, adapters: Sequence[Adapter]) -> None:
        for adapter in adapters:
            self._reduce(adapter)

    def _reduce(self, adapter: Adapter) -> None:
        """Sum the gradients over the ranks that have seen different tokens, or different parts of a sum."""
        topology = self._topology
        for sharding in SHARDINGS:
            start, stop = adapter.layout.ranges[sharding]
            if start == stop:
                continue
            grads = adapter.grads[start:stop]
            for name in reductions(sharding, topology):
                dist.all_reduce(grads, group=self._groups.device_group(name))
        if topology.data * topology.context > 1:
            adapter.grads.div_(topology.data * topology.context)  # the loss is scaled for a mean, as for Megatron's DDP

    def _square_norm(self, adapter: Adapter) -> torch.Tensor:
        """This rank's part of the squared gradient norm; copies of a factor count on one rank."""
        ranges = (
            adapter.layout.ranges[sharding]
            for sharding in SHARDINGS
            if is_main_replica(sharding, self._groups.coordinates)
        )
        parts = [adapter.grads[start:stop].square().sum() for start, stop in ranges if stop > start]
        return torch.stack(parts).sum() if parts else adapter.grads.new_zeros(())


def reductions(sharding: Sharding, topology: Topology) -> list[str]:
    """The groups over which gradients of a factor are summed. Pure.

    Outside experts, a factor that tensor parallel ranks have in common gets equal gradients on all of them, but under
    sequence parallelism each has seen its slice of the tokens only. Inside experts that are divided over tensor parallel
    ranks, each has a part of the sum.
    """
    names = []
    if sharding == "copied" and topology.sequence_parallel and topology.tensor > 1:
        names.append("tp")
    if sharding == "expert_copied" and topology.expert_tensor > 1:
        names.append("etp")
    if sharding.startswith("expert"):
        return [*names, "edp"] if topology.expert_data > 1 else names
    return [*names, "dp_cp"] if topology.data * topology.context > 1 else names


def loss_scales(names: Sequence[str], adapters: Mapping[str, Adapter]) -> list[float]:
    """The loss scale of each name's adapter, 1 for the model itself."""
    return [adapters[name].loss_scale if name else 1.0 for name in names]
