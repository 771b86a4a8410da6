"""Which samples go into which micro batch. Pure: plain numbers in, lists of indices out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from megascend.errors import DataError


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def units(pairs: Sequence[Hashable | None]) -> list[list[int]]:
    """Indices that must stay together: one list per pair, one per unpaired sample, in order of first appearance."""
    found: dict[Hashable, list[int]] = {}
    for index, pair in enumerate(pairs):
        found.setdefault(("alone", index) if pair is None else ("pair", pair), []).append(index)
    return list(found.values())


def cost(lengths: Sequence[int], members: Sequence[int], packing: bool) -> int:
    """Tokens a micro batch of ``members`` takes, padding included."""
    chosen = [lengths[index] for index in members]
    return sum(chosen) if packing else max(chosen, default=0) * len(chosen)


def plan_micro_batches(
    lengths: Sequence[int],
    pairs: Sequence[Hashable | None],
    budget: int,
    packing: bool,
    kinds: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """First fit over units of falling length, so that no micro batch costs more than ``budget`` tokens.

    Args:
        lengths: padded length of every sample.
        pairs: ``Sample.pair`` of every sample.
        budget: most tokens of one micro batch.
        packing: True if samples are concatenated, False if they are padded to the longest.
        kinds: the adapter of every sample; padded micro batches hold one kind each.

    Returns:
        Sample indices of every micro batch; each index occurs once.

    Raises:
        DataError: a unit alone is over the budget.
    """
    bins: list[list[int]] = []
    of = kinds if kinds is not None and not packing else [None] * len(lengths)
    ordered = sorted(units(pairs), key=lambda unit: -max(lengths[index] for index in unit))
    for unit in ordered:
        needed = cost(lengths, unit, packing)
        if needed > budget:
            raise DataError(
                f"sample {unit[0]} needs {needed} tokens{' with its pair' if len(unit) > 1 else ''}, padding included, "
                f"which is over batching.micro_batch_tokens={budget}; raise that setting or shorten the sample"
            )
        for members in bins:
            if of[members[0]] == of[unit[0]] and cost(lengths, [*members, *unit], packing) <= budget:
                members.extend(unit)
                break
        else:
            bins.append(list(unit))
    return bins


def split_to(
    plan: list[list[int]], count: int, lengths: Sequence[int], pairs: Sequence[Hashable | None]
) -> list[list[int]]:
    """Split the heaviest micro batches until there are ``count``; what cannot be split gives empty ones at the end.

    Ranks that take part in each other's collectives (expert parallelism) must run the same number of micro batches.
    """
    plan = [list(members) for members in plan]
    unit_of = {index: unit for unit in units(pairs) for index in unit}
    while len(plan) < count:
        splittable = [members for members in plan if len({id(unit_of[index]) for index in members}) > 1]
        if not splittable:
            return plan + [[] for _ in range(count - len(plan))]
        heaviest = max(splittable, key=lambda members: sum(lengths[index] for index in members))
        plan.remove(heaviest)
        parts: list[list[int]] = [[], []]
        inside = {id(unit_of[index]): unit_of[index] for index in heaviest}
        for unit in sorted(inside.values(), key=lambda unit: -sum(lengths[index] for index in unit)):
            min(parts, key=lambda part: sum(lengths[index] for index in part)).extend(unit)
        plan.extend(parts)
    return plan


def shard(lengths: Sequence[int], pairs: Sequence[Hashable | None], parts: int) -> list[list[int]]:
    """Divide samples into ``parts`` of nearly equal token counts, pairs kept together, each part in ascending order."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for unit in sorted(units(pairs), key=lambda unit: (-sum(lengths[index] for index in unit), unit[0])):
        lightest = min(range(parts), key=lambda part: (loads[part], part))
        shares[lightest].extend(unit)
        loads[lightest] += sum(lengths[index] for index in unit)
    return [sorted(share) for share in shares]
