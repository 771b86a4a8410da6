"""Planning of micro batches. Pure: plain numbers in, lists of indices out."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence

from megascend.errors import DataError


def round_up(value: int, multiple: int) -> int:
    """Round ``value`` up to a multiple of ``multiple``."""
    return -(-value // multiple) * multiple


def units(pairs: Sequence[Hashable | None]) -> list[list[int]]:
    """Group indices that must stay together: a list per pair and per unpaired sample, in order of first appearance."""
    members: dict[Hashable, list[int]] = {}
    for index, pair in enumerate(pairs):
        members.setdefault(("single", index) if pair is None else ("pair", pair), []).append(index)
    return list(members.values())


class FirstFit:
    """First-fit bin packing: finds the first bin with enough free space in logarithmic time.

    A binary tree in a list: the bins' room is in its last half, and each inner node holds the maximum of its two children.
    """

    def __init__(self) -> None:
        self._max_room = [-1, -1]
        self._size = 1
        self._count = 0

    def open(self, room: int) -> None:
        """Add a bin with this much free space, at least 0."""
        if self._count == self._size:
            # Doubled, so that opening n bins costs O(n) in total.
            leaves = self._max_room[self._size :] + [-1] * self._size
            self._size *= 2
            self._max_room = [-1] * self._size + leaves
            for node in range(self._size - 1, 0, -1):
                self._max_room[node] = max(self._max_room[2 * node], self._max_room[2 * node + 1])
        self._set(self._count, room)
        self._count += 1

    def take(self, size: int) -> int | None:
        """Put ``size`` into the first bin with enough free space and return its index; None if no bin has it."""
        if self._max_room[1] < size:
            return None
        node = 1
        while node < self._size:
            node = 2 * node if self._max_room[2 * node] >= size else 2 * node + 1
        self._set(node - self._size, self._max_room[node] - size)
        return node - self._size

    def _set(self, index: int, room: int) -> None:
        node = self._size + index
        self._max_room[node] = room
        while node > 1:
            node //= 2
            self._max_room[node] = max(self._max_room[2 * node], self._max_room[2 * node + 1])


def plan_micro_batches(
    lengths: Sequence[int],
    pairs: Sequence[Hashable | None],
    budget: int,
    packing: bool,
    kinds: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Plan micro batches of at most ``budget`` tokens, as lists of sample indices, by first-fit decreasing over units.

    Args:
        lengths: padded length of every sample.
        pairs: samples with equal entries stay together; None: unpaired.
        packing: samples of a micro batch are concatenated; otherwise they are padded to the longest.
        kinds: adapter of every sample; without packing, a micro batch holds samples of one.
    """
    bin_kinds = kinds if kinds is not None and not packing else [None] * len(lengths)
    longest = [(max(lengths[index] for index in unit), unit) for unit in units(pairs)]
    # A stable sort: units of equal length keep the order of the samples, so equal samples always give the same plan.
    longest.sort(key=lambda entry: -entry[0])
    plan: list[list[int]] = []
    bins: dict[Hashable, tuple[FirstFit, list[list[int]]]] = {}  # by kind: bins, and their micro batches
    for length, unit in longest:
        tokens = sum(lengths[index] for index in unit) if packing else length * len(unit)
        if tokens > budget:
            raise DataError(
                f"sample {unit[0]} needs {tokens} tokens{' with its pair' if len(unit) > 1 else ''}, padding included, "
                f"which is over batching.micro_batch_tokens={budget}; raise that setting or shorten the sample"
            )
        fit, opened = bins.setdefault(bin_kinds[unit[0]], (FirstFit(), []))
        # Without packing all samples are padded to the first unit's length, the longest: bins are counted in samples.
        room = tokens if packing else len(unit)
        bin_index = fit.take(room)
        if bin_index is not None:
            opened[bin_index].extend(unit)
            continue
        fit.open((budget if packing else budget // length) - room)
        opened.append(list(unit))
        plan.append(opened[-1])
    return plan


def split_to(
    plan: list[list[int]], count: int, lengths: Sequence[int], pairs: Sequence[Hashable | None]
) -> list[list[int]]:
    """Split the heaviest micro batches until there are ``count``; if too few can be split, append empty ones.

    Ranks that take part in each other's collectives (expert parallelism) must run the same number of micro batches.
    """
    plan = [list(members) for members in plan]
    if len(plan) >= count:
        return plan
    unit_of = {index: unit for unit in units(pairs) for index in unit}
    parts = dict(enumerate(plan))
    # Among micro batches of equal weight the first is split; the halves are appended.
    heaviest = [
        (-_weight(members, lengths), number) for number, members in parts.items() if _divisible(members, unit_of)
    ]
    heapq.heapify(heaviest)
    end = len(plan)
    while heaviest and len(parts) < count:
        members = parts.pop(heapq.heappop(heaviest)[1])
        inner_units = list({id(unit_of[index]): unit_of[index] for index in members}.values())
        halves: tuple[list[int], list[int]] = ([], [])
        loads = [0, 0]
        # Longest first onto the lighter half.
        for weight, unit in sorted(
            ((_weight(unit, lengths), unit) for unit in inner_units), key=lambda entry: -entry[0]
        ):
            lighter = loads.index(min(loads))
            halves[lighter].extend(unit)
            loads[lighter] += weight
        for half, load in zip(halves, loads, strict=True):  # appended, so that parts keep their numbers
            parts[end] = half
            if _divisible(half, unit_of):
                heapq.heappush(heaviest, (-load, end))
            end += 1
    return [*parts.values(), *([] for _ in range(count - len(parts)))]


def _weight(members: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[index] for index in members)


def _divisible(members: Sequence[int], unit_of: Mapping[int, list[int]]) -> bool:
    """Check whether a micro batch has more than one unit."""
    return any(unit_of[index] is not unit_of[members[0]] for index in members)


def shard(lengths: Sequence[int], pairs: Sequence[Hashable | None], parts: int) -> list[list[int]]:
    """Divide samples into ``parts`` of nearly equal token counts, pairs kept together, each part in ascending order."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0, part) for part in range(parts)]
    weighed = [(_weight(unit, lengths), unit) for unit in units(pairs)]
    # Longest first onto the lightest share; ties by index, so that all ranks compute the same division.
    for weight, unit in sorted(weighed, key=lambda entry: (-entry[0], entry[1][0])):
        load, part = lightest[0]
        shares[part].extend(unit)
        heapq.heapreplace(lightest, (load + weight, part))
    # In the order of the global list, as a caller that has one data parallel rank sees it.
    return [sorted(share) for share in shares]
