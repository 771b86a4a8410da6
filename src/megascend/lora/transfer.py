"""Whole factors from an adapter's shards, and back: what makes saved adapters independent of the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megascend.distributed.objects import collect_objects, gather_objects
from megascend.distributed.process_groups import ProcessGroups
from megascend.errors import CheckpointError
from megascend.lora.adapter import Adapter
from megascend.lora.factors import Factors
from megascend.lora.layout import ShapeGroup, Sharding
from megascend.lora.target_modules import FusedSlice, TargetModule, matches
from megascend.topology.topology import Coordinates


@dataclass(frozen=True)
class FactorShard:
    """One rank's part of one factor.

    Attributes:
        shape: of the whole factor.
        where: index of the part in it.
        values: float32, on the CPU.
    """

    name: str
    factor: Literal["a", "b"]
    shape: tuple[int, ...]
    where: tuple[Any, ...]
    values: Tensor


def is_main_replica(sharding: Sharding, place: Coordinates) -> bool:
    """Whether the rank at ``place`` is the one that saves and counts a factor, of all ranks that have the same values of it."""
    if sharding.startswith("expert"):
        return place.expert_data == 0 and (sharding == "expert_split" or place.expert_tensor == 0)
    return place.data == 0 and place.context == 0 and (sharding == "split" or place.tensor == 0)


def gather(
    vectors: Sequence[Tensor],
    adapter: Adapter,
    shape_groups: Sequence[ShapeGroup],
    groups: ProcessGroups,
    *,
    everywhere: bool = False,
) -> list[dict[str, Factors]] | None:
    """Return whole factors of each of ``vectors`` (values or moments) on rank 0, or ``everywhere``; else None. Collective."""
    mine = [factor_shards(adapter, vector, shape_groups, groups.coordinates) for vector in vectors]
    bring = gather_objects if everywhere else collect_objects
    everyone = bring(mine, "world", groups, f"factors of adapter {adapter.name!r}")
    if everyone is None:
        return None
    return [assemble([shard for rank in everyone for shard in rank[number]]) for number in range(len(vectors))]


def factor_shards(
    adapter: Adapter, vector: Tensor, shape_groups: Sequence[ShapeGroup], place: Coordinates
) -> list[FactorShard]:
    """What this rank contributes."""
    found = []
    for span, values in adapter.views(vector.detach()):
        shape_group = shape_groups[span.shape_group]
        if not is_main_replica(shape_group.sharding(span.factor), place):
            continue
        values = values.cpu()
        for layer, target in enumerate(shape_group.target_modules):
            for number, fused_slice in enumerate(target.slices):
                if matches(fused_slice.name, adapter.lora.targets):
                    take = _shard_of_a if span.factor == "a" else _shard_of_b
                    found.append(take(values[layer], number, target, fused_slice))
    return found


def _shard_of_a(values: Tensor, number: int, target: TargetModule, fused_slice: FusedSlice) -> FactorShard:
    """From [experts, slices, rank, in]."""
    own = values[:, number]
    columns = slice(target.in_start, target.in_start + target.in_features)
    if not target.is_expert:
        shape = (own.shape[1], target.in_total)
        return FactorShard(fused_slice.name, "a", shape, (slice(None), columns), own[0].clone())
    shape = (target.expert_total or 0, own.shape[1], target.in_total)
    return FactorShard(fused_slice.name, "a", shape, (_experts(target), slice(None), columns), own.clone())


def _shard_of_b(values: Tensor, number: int, target: TargetModule, fused_slice: FusedSlice) -> FactorShard:
    """From [experts, rank, out]."""
    own = values[:, :, fused_slice.local_rows].transpose(1, 2)
    if not target.is_expert:
        shape = (fused_slice.out_features, own.shape[2])
        return FactorShard(fused_slice.name, "b", shape, (fused_slice.global_rows,), own[0].clone())
    shape = (target.expert_total or 0, fused_slice.out_features, own.shape[2])
    return FactorShard(fused_slice.name, "b", shape, (_experts(target), fused_slice.global_rows), own.clone())


def _experts(target: TargetModule) -> slice:
    return slice(target.expert_start, target.expert_start + target.experts)


def assemble(found: Sequence[FactorShard]) -> dict[str, Factors]:
    """Put the shards of all ranks together; a hole left between them stays NaN."""
    whole: dict[str, dict[str, Tensor]] = {}
    for shard in found:
        factors = whole.setdefault(shard.name, {})
        whole_factor = factors.setdefault(shard.factor, torch.full(shard.shape, torch.nan))
        whole_factor[shard.where] = shard.values
    return {name: Factors(factors["a"], factors["b"]) for name, factors in sorted(whole.items())}


def scatter(
    factors: Mapping[str, Factors], adapter: Adapter, vector: Tensor, shape_groups: Sequence[ShapeGroup]
) -> None:
    """Write this rank's parts of whole factors into ``vector``; projections without factors become zero. Local."""
    for span, values in adapter.views(vector.detach()):
        values.zero_()
        for layer, target in enumerate(shape_groups[span.shape_group].target_modules):
            for number, fused_slice in enumerate(target.slices):
                given = factors.get(fused_slice.name)
                if given is None:
                    continue
                for expert in range(target.experts):
                    a, b = local_factors(target, fused_slice, expert, given)
                    if span.factor == "a":
                        values[layer, expert, number].copy_(a)
                    else:
                        values[layer, expert, :, fused_slice.local_rows] = b.to(values.device)


def local_factors(
    target: TargetModule, fused_slice: FusedSlice, expert: int, factors: Factors
) -> tuple[Tensor, Tensor]:
    """This rank's part of whole factors: A [rank, in] and B transposed [rank, rows of the slice]."""
    a, b = factors.a, factors.b
    lead = (target.expert_total,) if target.is_expert else ()
    shapes = (*lead, factors.rank, target.in_total), (*lead, fused_slice.out_features, factors.rank)
    if (tuple(a.shape), tuple(b.shape)) != shapes:
        raise CheckpointError(
            f"the factors of {fused_slice.name} have shapes {tuple(a.shape)} and {tuple(b.shape)}; this model's layer takes "
            f"{shapes[0]} and {shapes[1]}"
        )
    if target.is_expert:
        a, b = a[target.expert_start + expert], b[target.expert_start + expert]
    return a[:, target.in_start : target.in_start + target.in_features], b[fused_slice.global_rows].T
