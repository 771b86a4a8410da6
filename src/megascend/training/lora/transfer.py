"""Gather an adapter's shards into unsharded factors, and scatter them back: saved adapters do not depend on the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megascend.errors import CheckpointError
from megascend.runtime.distributed.objects import collect_objects, gather_objects
from megascend.runtime.distributed.process_groups import ProcessGroups
from megascend.runtime.topology.topology import Coordinates
from megascend.training.lora.adapter import Adapter
from megascend.training.lora.factors import Factors
from megascend.training.lora.layout import ShapeGroup, Sharding
from megascend.training.lora.target_modules import FusedSlice, TargetModule, matches


@dataclass(frozen=True)
class FactorShard:
    """One rank's part of one factor.

    Attributes:
        shape: shape of the unsharded factor.
        index: index of this part in it.
        values: float32, on the CPU.
    """

    name: str
    factor: Literal["a", "b"]
    shape: tuple[int, ...]
    index: tuple[Any, ...]
    values: Tensor


def is_main_replica(sharding: Sharding, coordinates: Coordinates) -> bool:
    """Check whether, of the ranks that hold the same values of a factor, this one saves it and counts it in norms."""
    if sharding.startswith("expert"):
        return coordinates.expert_data == 0 and (sharding == "expert_split" or coordinates.expert_tensor == 0)
    return coordinates.data == 0 and coordinates.context == 0 and (sharding == "split" or coordinates.tensor == 0)


def gather(
    vectors: Sequence[Tensor],
    adapter: Adapter,
    shape_groups: Sequence[ShapeGroup],
    groups: ProcessGroups,
    *,
    everywhere: bool = False,
) -> list[dict[str, Factors]] | None:
    """Return unsharded factors of each of ``vectors`` (values or moments) on rank 0, or ``everywhere``; else None. Collective."""
    shards = [factor_shards(adapter, vector, shape_groups, groups.coordinates) for vector in vectors]
    exchange = gather_objects if everywhere else collect_objects
    shards_by_rank = exchange(shards, "world", groups, f"factors of adapter {adapter.name!r}")
    if shards_by_rank is None:
        return None
    return [assemble([shard for rank in shards_by_rank for shard in rank[number]]) for number in range(len(vectors))]


def factor_shards(
    adapter: Adapter, vector: Tensor, shape_groups: Sequence[ShapeGroup], coordinates: Coordinates
) -> list[FactorShard]:
    """Return the shards that this rank contributes."""
    shards = []
    for span, values in adapter.views(vector.detach()):
        shape_group = shape_groups[span.shape_group]
        if not is_main_replica(shape_group.sharding(span.factor), coordinates):
            continue
        values = values.cpu()  # once for all layers of the group
        for layer, target in enumerate(shape_group.target_modules):
            for number, fused_slice in enumerate(target.slices):
                if matches(fused_slice.name, adapter.lora.targets):
                    shards.append(_shard(values[layer], span.factor, number, target, fused_slice))
    return shards


def _shard(
    values: Tensor, factor: Literal["a", "b"], number: int, target: TargetModule, fused_slice: FusedSlice
) -> FactorShard:
    """Cut the shard of a slice out of a layer's A [experts, slices, rank, in] or B [experts, rank, out]."""
    if factor == "a":
        part = values[:, number]
        columns = slice(target.in_start, target.in_start + target.in_features)
        shape, index = (part.shape[1], target.in_total), (slice(None), columns)
    else:
        part = values[:, :, fused_slice.local_rows].transpose(1, 2)
        shape, index = (fused_slice.out_features, part.shape[2]), (fused_slice.global_rows,)
    # clone: pickling a view would send the storage of all layers.
    if not target.is_expert:
        return FactorShard(fused_slice.name, factor, shape, index, part[0].clone())
    experts = slice(target.expert_start, target.expert_start + target.experts)
    return FactorShard(fused_slice.name, factor, (target.expert_total or 0, *shape), (experts, *index), part.clone())


def assemble(shards: Sequence[FactorShard]) -> dict[str, Factors]:
    """Assemble the shards of all ranks; NaN where no rank has a shard."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for shard in shards:
        factors = by_name.setdefault(shard.name, {})
        # NaN, not zero: the writer's check then detects a shard that no rank has sent.
        tensor = factors.setdefault(shard.factor, torch.full(shard.shape, torch.nan))
        tensor[shard.index] = shard.values
    return {name: Factors(factors["a"], factors["b"]) for name, factors in sorted(by_name.items())}


def scatter(
    factors: Mapping[str, Factors], adapter: Adapter, vector: Tensor, shape_groups: Sequence[ShapeGroup]
) -> None:
    """Write this rank's parts of unsharded factors into ``vector``; projections without factors become zero. Local."""
    for span, values in adapter.views(vector.detach()):
        # Rows that pad a rank must be zero in both A and B; their gradients are then zero, too.
        values.zero_()
        for layer, target in enumerate(shape_groups[span.shape_group].target_modules):
            for number, fused_slice in enumerate(target.slices):
                pair = factors.get(fused_slice.name)
                if pair is None:
                    continue
                for expert in range(target.experts):
                    a, b = local_factors(target, fused_slice, expert, pair)
                    if span.factor == "a":
                        values[layer, expert, number].copy_(a)
                    # Assignment by index, unlike copy_, needs the values on the device.
                    else:
                        values[layer, expert, :, fused_slice.local_rows] = b.to(values.device)


def local_factors(
    target: TargetModule, fused_slice: FusedSlice, expert: int, factors: Factors
) -> tuple[Tensor, Tensor]:
    """Return this rank's part of unsharded factors: A [rank, in] and B transposed [rank, rows of the slice]."""
    a, b = factors.a, factors.b
    lead = (target.expert_total,) if target.is_expert else ()
    shapes = (*lead, factors.rank, target.in_total), (*lead, fused_slice.out_features, factors.rank)
    if target.is_head and len(b) != fused_slice.out_features:
        raise CheckpointError(
            f"the head ({fused_slice.name}) has {len(b)} labels, and this model's has {fused_slice.out_features}"
        )
    if (tuple(a.shape), tuple(b.shape)) != shapes:
        raise CheckpointError(
            f"the factors of {fused_slice.name} have shapes {tuple(a.shape)} and {tuple(b.shape)}; this model's layer needs "
            f"{shapes[0]} and {shapes[1]}"
        )
    if target.is_expert:
        a, b = a[target.expert_start + expert], b[target.expert_start + expert]
    return a[:, target.in_start : target.in_start + target.in_features], b[fused_slice.global_rows].T
