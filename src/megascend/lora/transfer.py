"""Whole factors from an adapter's shards, and back: what makes saved adapters independent of the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megascend.distributed.objects import collect_objects
from megascend.distributed.process_groups import ProcessGroups
from megascend.errors import CheckpointError
from megascend.lora.adapter import Adapter
from megascend.lora.factors import Factors
from megascend.lora.layout import Family, Kind
from megascend.lora.target_modules import Part, Site, matches
from megascend.topology.topology import Coordinates


@dataclass(frozen=True)
class Piece:
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


def leads(place: Coordinates) -> dict[Kind, bool]:
    """For every kind of factor, whether this rank is the one of several with the same values that speaks for them."""
    dense = place.data == 0 and place.context == 0
    expert = place.expert_data == 0
    return {
        "split": dense,
        "copied": dense and place.tensor == 0,
        "expert_split": expert,
        "expert_copied": expert and place.expert_tensor == 0,
    }


def gather(
    vectors: Sequence[Tensor], adapter: Adapter, families: Sequence[Family], groups: ProcessGroups
) -> list[dict[str, Factors]] | None:
    """Whole factors, by projection, of each of ``vectors`` (values or moments), on rank 0; None on the others.

    Collective over the world.
    """
    mine = [pieces(adapter, vector, families, leads(groups.coordinates)) for vector in vectors]
    everyone = collect_objects(mine, "world", groups, f"factors of adapter {adapter.name!r}")
    if everyone is None:
        return None
    return [assemble([piece for rank in everyone for piece in rank[number]]) for number in range(len(vectors))]


def pieces(adapter: Adapter, vector: Tensor, families: Sequence[Family], leading: Mapping[Kind, bool]) -> list[Piece]:
    """What this rank contributes."""
    found = []
    for span, values in adapter.views(vector.detach()):
        family = families[span.family]
        if not leading[family.kind(span.factor)]:
            continue
        values = values.cpu()
        for layer, site in enumerate(family.sites):
            for number, part in enumerate(site.parts):
                if matches(part.name, adapter.lora.targets):
                    take = _piece_a if span.factor == "a" else _piece_b
                    found.append(take(values[layer], number, site, part))
    return found


def _piece_a(values: Tensor, number: int, site: Site, part: Part) -> Piece:
    """From [experts, parts, rank, in]."""
    own = values[:, number]
    columns = slice(site.in_start, site.in_start + site.in_features)
    if not site.is_expert:
        return Piece(part.name, "a", (own.shape[1], site.in_total), (slice(None), columns), own[0].clone())
    shape = (site.expert_total or 0, own.shape[1], site.in_total)
    return Piece(part.name, "a", shape, (_experts(site), slice(None), columns), own.clone())


def _piece_b(values: Tensor, number: int, site: Site, part: Part) -> Piece:
    """From [experts, rank, out]."""
    own = values[:, :, part.local_rows].transpose(1, 2)
    if not site.is_expert:
        return Piece(part.name, "b", (part.out_features, own.shape[2]), (part.global_rows,), own[0].clone())
    shape = (site.expert_total or 0, part.out_features, own.shape[2])
    return Piece(part.name, "b", shape, (_experts(site), part.global_rows), own.clone())


def _experts(site: Site) -> slice:
    return slice(site.expert_start, site.expert_start + site.experts)


def assemble(found: Sequence[Piece]) -> dict[str, Factors]:
    """Put pieces of all ranks together; a hole left between them stays NaN."""
    whole: dict[str, dict[str, Tensor]] = {}
    for piece in found:
        factors = whole.setdefault(piece.name, {})
        target = factors.setdefault(piece.factor, torch.full(piece.shape, torch.nan))
        target[piece.where] = piece.values
    return {name: Factors(factors["a"], factors["b"]) for name, factors in sorted(whole.items())}


def scatter(factors: Mapping[str, Factors], adapter: Adapter, vector: Tensor, families: Sequence[Family]) -> None:
    """Write this rank's parts of whole factors into ``vector``; projections without factors become zero. Local.

    Raises:
        CheckpointError: a factor does not fit its layer.
    """
    for span, values in adapter.views(vector.detach()):
        values.zero_()
        for layer, site in enumerate(families[span.family].sites):
            for number, part in enumerate(site.parts):
                given = factors.get(part.name)
                if given is None:
                    continue
                for expert in range(site.experts):
                    a, b = local_factors(site, part, expert, given)
                    if span.factor == "a":
                        values[layer, expert, number].copy_(a)
                    else:
                        values[layer, expert, :, part.local_rows] = b.to(values.device)


def local_factors(site: Site, part: Part, expert: int, factors: Factors) -> tuple[Tensor, Tensor]:
    """This rank's part of whole factors: A [rank, in] and B transposed [rank, rows of the part].

    Raises:
        CheckpointError: they are of a layer of another shape.
    """
    a, b = factors.a, factors.b
    lead = (site.expert_total,) if site.is_expert else ()
    shapes = (*lead, factors.rank, site.in_total), (*lead, part.out_features, factors.rank)
    if (tuple(a.shape), tuple(b.shape)) != shapes:
        raise CheckpointError(
            f"the factors of {part.name} have shapes {tuple(a.shape)} and {tuple(b.shape)}; this model's layer takes "
            f"{shapes[0]} and {shapes[1]}"
        )
    if site.is_expert:
        a, b = a[site.expert_start + expert], b[site.expert_start + expert]
    return a[:, site.in_start : site.in_start + site.in_features], b[part.global_rows].T
