"""Optimizer step of several adapters; the result of each does not depend on the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from megascend.config import Adam
from megascend.reference.reductions import square_sum
from megascend.runtime.distributed.process_groups import ProcessGroups
from megascend.runtime.topology.topology import Topology
from megascend.training.batch.results import StepResult
from megascend.training.lora.adapter import Adapter
from megascend.training.lora.layout import SHARDINGS, Sharding
from megascend.training.lora.transfer import is_main_replica


def step_adapters(
    adapters: Sequence[Adapter], adam: Mapping[str, Adam], groups: ProcessGroups
) -> dict[str, StepResult]:
    """Reduce and clip gradients and step, adapter by adapter; skip one whose gradients are not finite.

    Collective over the world, whose ranks pass the same adapters. Waits for the device once. ``adam``: for this step only.
    """
    groups.monitor.call("grad reduce", _reduce, adapters, groups)
    with groups.monitor.phase("update"):
        shardings: list[Sharding] = [
            sharding for sharding in SHARDINGS if is_main_replica(sharding, groups.coordinates)
        ]
        # One all-reduce for all adapters, in which one copy of every factor counts.
        squares = torch.stack([square_norm(adapter, shardings) for adapter in adapters])
        if groups.topology.world_size > 1:
            dist.all_reduce(squares)
        return update(adapters, squares.sqrt().tolist(), adam)


def _reduce(adapters: Sequence[Adapter], groups: ProcessGroups) -> None:
    """Sum the gradients over ranks with different tokens or partial sums."""
    topology = groups.topology
    ranks = topology.data * topology.context
    for adapter in adapters:
        for sharding in SHARDINGS:
            start, stop = adapter.layout.ranges[sharding]
            if start == stop:
                continue
            # A view: it is reduced in place.
            grads = adapter.grads[start:stop]
            for name in reductions(sharding, topology):
                dist.all_reduce(grads, group=groups.device_group(name))
        if ranks > 1:
            adapter.grads.div_(ranks)  # the loss is scaled for a mean over ranks, as Megatron's DDP computes


def square_norm(adapter: Adapter, shardings: Iterable[Sharding]) -> torch.Tensor:
    """Return this rank's part, in the ranges of ``shardings``, of the squared L2 norm of an adapter's gradients."""
    ranges = merged(adapter.layout.ranges[sharding] for sharding in shardings)
    parts = [square_sum(adapter.grads[start:stop]) for start, stop in ranges]
    return torch.stack(parts).sum() if parts else adapter.grads.new_zeros(())


@torch.no_grad()
def update(adapters: Sequence[Adapter], norms: Sequence[float], adam: Mapping[str, Adam]) -> dict[str, StepResult]:
    """Clip and step each adapter, or skip it if its norm is not finite; then clear its gradients.

    Adapters with equal settings share an AdamW call, with the same results as separate calls. ``norms``: of the reduced gradients
    over all ranks, loss scale included.
    """
    steps = [adapter.next_step(norm, adam.get(adapter.name)) for adapter, norm in zip(adapters, norms, strict=True)]
    finite = [(adapter, step) for adapter, step in zip(adapters, steps, strict=True) if not step.skipped]
    # Allocate before any value changes: this may run out of memory.
    moments = {adapter.name: adapter.moments() for adapter, _ in finite}
    scaled = [(adapter.grads, step.factor) for adapter, step in finite if step.factor != 1]
    if scaled:
        grads, factors = zip(*scaled, strict=True)
        torch._foreach_mul_(grads, factors)
    by_settings: dict[tuple[bool, float, tuple[float, float], float, float], list[Adapter]] = defaultdict(list)
    for adapter, step in finite:
        by_settings[adapter.fused, step.adam.lr, step.adam.betas, step.adam.eps, step.adam.weight_decay].append(adapter)
    for (fused, lr, betas, eps, weight_decay), members in by_settings.items():
        adamw(
            [adapter.values for adapter in members],
            [adapter.grads for adapter in members],
            [moments[adapter.name][0] for adapter in members],
            [moments[adapter.name][1] for adapter in members],
            # max_exp_avg_sqs, for amsgrad only
            [],
            [adapter.taken_count for adapter in members],
            foreach=False,  # allocates temporaries for all adapters at once
            fused=fused,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )
    torch._foreach_zero_([adapter.grads for adapter in adapters])
    return {adapter.name: adapter.count_step(step) for adapter, step in zip(adapters, steps, strict=True)}


def reductions(sharding: Sharding, topology: Topology) -> list[str]:
    """Return the groups over which gradients of a factor are summed.

    Outside experts and vision towers, a factor that is copied on tensor parallel ranks gets equal gradients on all of them,
    except under sequence parallelism, where each rank's are of its slice of the tokens. In experts that are divided over tensor
    parallel ranks, each has a partial sum.
    """
    names = []
    if sharding == "copied" and topology.sequence_parallel and topology.tensor > 1:
        names.append("tp")
    if sharding == "expert_copied" and topology.expert_tensor > 1:
        names.append("etp")
    if sharding.startswith("expert"):
        return [*names, "edp"] if topology.expert_data > 1 else names
    return [*names, "dp_cp"] if topology.data * topology.context > 1 else names


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent ascending ranges and drop empty ones. Pure."""
    result: list[tuple[int, int]] = []
    for start, stop in ranges:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        elif stop > start:
            result.append((start, stop))
    return result
