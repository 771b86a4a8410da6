"""Layout of an adapter's factors in one flat vector. Pure arithmetic.

All factors of an adapter on a rank are views of one fp32 vector, so that an all-reduce, the norm, clipping and a step are one
operation each. Layers with factors of the same shape form a shape group, whose factors are two tensors over all its layers.
Factors that are reduced over the same ranks are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megascend.training.lora.target_modules import TargetModule

Sharding = Literal["copied", "split", "tower", "expert_copied", "expert_split"]
SHARDINGS: tuple[Sharding, ...] = ("copied", "split", "tower", "expert_copied", "expert_split")
"""``copied``: the same on all tensor parallel ranks; ``split``: divided over them. ``tower``: copied, and each of these ranks
computes the complete gradient. ``expert``: of routed experts."""


@dataclass(frozen=True)
class ShapeGroup:
    """Target modules whose factors have the same shapes, in the model's order."""

    target_modules: tuple[TargetModule, ...]

    @property
    def first(self) -> TargetModule:
        """The first target module; shapes are the same in all of them."""
        return self.target_modules[0]

    def sharding(self, factor: Literal["a", "b"]) -> Sharding:
        """Return how tensor parallel ranks share a factor: A follows the layer's input, B its output."""
        if self.first.rows != "tokens":
            return "tower"
        split = self.first.split == {"a": "row", "b": "column"}[factor]
        if self.first.is_expert:
            return "expert_split" if split else "expert_copied"
        return "split" if split else "copied"

    def shape(self, factor: Literal["a", "b"], rank: int) -> tuple[int, ...]:
        """Return a factor's shape: A [layers, experts, slices, rank, in]; B, transposed, [layers, experts, rank, out]."""
        target = self.first
        if factor == "a":
            return (len(self.target_modules), target.experts, len(target.slices), rank, target.in_features)
        return (len(self.target_modules), target.experts, rank, target.out_features)


@dataclass(frozen=True)
class Span:
    """Range of one factor of one shape group in the flat vector."""

    shape_group: int
    factor: Literal["a", "b"]
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """End of the span."""
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """Spans of all factors, and the range of every sharding."""

    spans: tuple[Span, ...]
    ranges: dict[Sharding, tuple[int, int]]
    size: int


def shape_groups(target_modules: Sequence[TargetModule]) -> list[ShapeGroup]:
    """Group target modules whose factors have the same shapes."""
    groups: dict[tuple[object, ...], list[TargetModule]] = {}
    for target in target_modules:
        groups.setdefault(target.shape_key, []).append(target)
    return [ShapeGroup(tuple(members)) for members in groups.values()]


def flat_layout(groups: Sequence[ShapeGroup], rank: int) -> FlatLayout:
    """Lay out the factors of an adapter of ``rank``."""
    spans: list[Span] = []
    ranges: dict[Sharding, tuple[int, int]] = {}
    end = 0
    for sharding in SHARDINGS:
        start = end
        for number, shape_group in enumerate(groups):
            for factor in ("a", "b"):
                if shape_group.sharding(factor) == sharding:
                    spans.append(Span(number, factor, end, shape_group.shape(factor, rank)))
                    end = spans[-1].stop
        ranges[sharding] = (start, end)
    return FlatLayout(tuple(spans), ranges, end)
