"""Common prefixes of samples, which a micro batch computes once. Pure: token ids in, lists of numbers out.

Samples are sorted by their tokens, so that those with a common prefix follow one another. Each then computes only its tokens
after the prefix that it has in common with the sample before it; the prefix's tokens are that sample's, or those of one before
it. A tree of any depth is such a list: a fork is a sample that shares less with its predecessor than that one does with its own.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from megascend.training.batch.packing import shard, units
from megascend.training.batch.sample import Sample

SHORTEST = 64
"""Shortest prefix in tokens that ``share_prefixes: auto`` shares; below, a layer's gather of keys costs more than it saves."""
LEAST_SHARE = 0.1
"""Least share of a call's tokens that must be common prefixes, with ``share_prefixes: auto``."""
KEYS_PER_TOKEN = 16
"""Most keys that attention gathers for each token of a micro batch's budget, which bounds the memory of a layer's copies."""


@dataclass(frozen=True)
class PrefixPlan:
    """Division of samples into units that are computed together, so that what they have in common is computed once.

    Attributes:
        order: position of each sample: those of a unit, sorted by it, share prefixes with the ones before them.
        common: first tokens of each sample that the sample before it in its unit has too.
        unit: number of each sample's unit, which must stay in one micro batch.
    """

    order: list[int]
    common: list[int]
    unit: list[int]

    def costs(self, lengths: Sequence[int]) -> list[int]:
        """Return the tokens that each sample of ``lengths`` tokens adds to its unit.

        The first one of a unit adds what gathered keys take beyond :data:`KEYS_PER_TOKEN` for each token.
        """
        costs = [length - common for length, common in zip(lengths, self.common, strict=True)]
        for members in units(self.unit):
            keys = sum(lengths[index] for index in members)
            costs[members[0]] += max(0, -(-keys // KEYS_PER_TOKEN) - sum(costs[index] for index in members))
        return costs


def plan_prefixes(
    samples: Sequence[Sample],
    kinds: Sequence[str | None],
    pairs: Sequence[Hashable | None],
    limit: int,
    minimum: int | None = None,
) -> PrefixPlan | None:
    """Join samples with common prefixes into units; None if they have too little in common.

    Args:
        kinds: adapter of each sample; those of different ones share nothing.
        pairs: samples with equal entries stay together; None: unpaired.
        limit: most tokens to compute in a unit of several pairs or unpaired samples.
        minimum: shortest prefix to share, in tokens; None: :data:`SHORTEST`, and only if the gain is worth it.
    """
    if len(samples) < 2:
        return None
    shortest = SHORTEST if minimum is None else minimum
    # Big-endian bytes compare as the numbers do. Token ids fit into 4 bytes.
    keys = [sample.input_ids.numpy().astype(">u4").tobytes() for sample in samples]
    by_tokens = sorted(range(len(samples)), key=lambda index: (kinds[index] or "", keys[index]))
    order = [0] * len(samples)
    for position, index in enumerate(by_tokens):
        order[index] = position

    @cache
    def common(first: int, second: int) -> int:
        if kinds[first] != kinds[second]:
            return 0
        length = common_prefix(samples[first], samples[second])
        return length if length >= shortest else 0

    def shared(members: Sequence[int]) -> list[int]:
        return [0, *(common(first, second) for first, second in pairwise(members))]

    def insert(members: list[int], index: int) -> int:
        """Insert a sample where its tokens belong, and return the common tokens that it adds."""
        place = bisect(members, order[index], key=order.__getitem__)
        before, after = members[place - 1 : place], members[place : place + 1]
        members.insert(place, index)
        return sum(shared([*before, index, *after])) - sum(shared([*before, *after]))

    joined: list[list[int]] = []
    unit_common = unit_tokens = 0  # of the last of them
    by_order = (sorted(members, key=order.__getitem__) for members in units(pairs))
    for members in sorted(by_order, key=lambda members: order[members[0]]):
        common_tokens, tokens = sum(shared(members)), sum(len(samples[index]) for index in members)
        if joined:
            candidate, both = list(joined[-1]), unit_tokens + tokens
            candidate_common = unit_common + sum(insert(candidate, index) for index in members)
            gains = candidate_common > unit_common + common_tokens
            if gains and both - candidate_common <= limit and both <= KEYS_PER_TOKEN * limit:
                joined[-1], unit_common, unit_tokens = candidate, candidate_common, both
                continue
        joined.append(members)
        unit_common, unit_tokens = common_tokens, tokens
    plan = PrefixPlan(order, [0] * len(samples), [0] * len(samples))
    for number, members in enumerate(joined):
        for index, tokens in zip(members, shared(members), strict=True):
            plan.unit[index], plan.common[index] = number, tokens
    least = LEAST_SHARE * sum(map(len, samples)) if minimum is None else 1
    return plan if sum(plan.common) >= least else None


def shard_by_prefixes(
    samples: Sequence[Sample],
    kinds: Sequence[str | None],
    pairs: Sequence[Hashable | None],
    parts: int,
    minimum: int | None = None,
) -> list[list[int]]:
    """Divide samples into ``parts`` of nearly equal numbers of tokens to compute, each part in ascending order.

    Args: those of :func:`plan_prefixes`.
    """
    lengths = [len(sample) for sample in samples]
    divisions = [(lengths, shard(lengths, pairs, parts))]
    # A unit on two ranks computes its prefix twice, and a whole one may be too large to balance: the best of some sizes is taken.
    for units_per_part in (1, 2, 4, 8):
        plan = plan_prefixes(samples, kinds, pairs, -(-sum(lengths) // (parts * units_per_part)), minimum)
        if plan is None:
            break
        costs = plan.costs(lengths)
        divisions.append((costs, shard(costs, plan.unit, parts)))
    return min(divisions, key=lambda division: max(sum(division[0][i] for i in share) for share in division[1]))[1]


def common_prefix(first: Sample, second: Sample) -> int:
    """Return the number of first tokens that two samples have in common, with the experts that they are sent to.

    0 if one of them has images, whose features take the place of tokens.
    """
    if first.images is not None or second.images is not None:
        return 0
    length = min(len(first), len(second))
    equal = first.input_ids[:length] == second.input_ids[:length]
    if first.routed_experts is not None or second.routed_experts is not None:
        if first.routed_experts is None or second.routed_experts is None:
            return 0
        equal &= (first.routed_experts[:length] == second.routed_experts[:length]).flatten(1).all(1)
    return length if bool(equal.all()) else int(equal.int().argmin())
