"""How one adapter's factors lie in one flat vector. Pure arithmetic.

All factors of an adapter on a rank are views of one fp32 vector, so that reducing, measuring, clipping and stepping them
each is one operation. Layers with factors of the same shape form a family, whose factors are two tensors over all its
layers. Factors that are reduced over the same ranks lie together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megascend.lora.target_modules import Site

Kind = Literal["copied", "split", "expert_copied", "expert_split"]
KINDS: tuple[Kind, ...] = ("copied", "split", "expert_copied", "expert_split")
"""Whether a factor is the same on all tensor parallel ranks or divided over them, outside experts and inside."""


@dataclass(frozen=True)
class Family:
    """Sites whose factors have the same shapes, in the model's order."""

    sites: tuple[Site, ...]

    @property
    def one(self) -> Site:
        """Any of them."""
        return self.sites[0]

    def kind(self, factor: Literal["a", "b"]) -> Kind:
        """How tensor parallel ranks share a factor: A follows the layer's input, B its output."""
        split = (factor == "a") == (self.one.split == "row")
        if self.one.is_expert:
            return "expert_split" if split else "expert_copied"
        return "split" if split else "copied"

    def shape(self, factor: Literal["a", "b"], rank: int) -> tuple[int, ...]:
        """A: [layers, experts, parts, rank, in]. B, transposed: [layers, experts, rank, out]; an output row has one part."""
        site = self.one
        if factor == "a":
            return (len(self.sites), site.experts, len(site.parts), rank, site.in_features)
        return (len(self.sites), site.experts, rank, site.out_features)


@dataclass(frozen=True)
class Span:
    """Where one factor of one family lies."""

    family: int
    factor: Literal["a", "b"]
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """End of the span."""
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """Spans of all factors, and the range of every kind."""

    spans: tuple[Span, ...]
    ranges: dict[Kind, tuple[int, int]]
    size: int


def families(sites: Sequence[Site]) -> list[Family]:
    """Group sites whose factors have the same shapes."""
    found: dict[tuple[object, ...], list[Site]] = {}
    for site in sites:
        found.setdefault(site.family, []).append(site)
    return [Family(tuple(members)) for members in found.values()]


def flat_layout(of: Sequence[Family], rank: int) -> FlatLayout:
    """Lay out the factors of an adapter of ``rank``."""
    spans: list[Span] = []
    ranges: dict[Kind, tuple[int, int]] = {}
    end = 0
    for kind in KINDS:
        start = end
        for number, family in enumerate(of):
            for factor in ("a", "b"):
                if family.kind(factor) == kind:
                    spans.append(Span(number, factor, end, family.shape(factor, rank)))
                    end = spans[-1].stop
        ranges[kind] = (start, end)
    return FlatLayout(tuple(spans), ranges, end)
