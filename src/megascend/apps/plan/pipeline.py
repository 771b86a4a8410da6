"""How long a step of Megatron's pipeline schedules takes.

The order of a stage's passes is what Megatron runs (:mod:`megascend.runtime.topology.schedule`); starts and ends follow from it,
from the duration of each pass, and from the rule that a pass needs its neighbour's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from megascend.runtime.topology.schedule import stage_order

ROUNDS = 3
"""Rounds of one micro batch per stage that are simulated; of the rounds between, each takes as long as the one before it."""


@dataclass(frozen=True)
class TimedPass:
    """A pass with its start and end, in seconds from the first one of the step."""

    stage: int
    forward: bool
    chunk: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class Durations:
    """Seconds of a stage's passes of one micro batch, by model chunk."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.forward) + sum(self.backward)


def simulate(durations: Sequence[Durations], micro_batches: int, transfer: float, *, overlaps: bool) -> list[TimedPass]:
    """Return all passes of a step with their times, in the order of their ends.

    Args:
        durations: of each stage.
        transfer: seconds in which a result arrives at the neighbour.
        overlaps: the sender computes on while the result is sent, as the interleaved schedule does here.
    """
    stages, chunks = len(durations), len(durations[0].forward)
    orders = [stage_order(stage, stages, chunks, micro_batches) for stage in range(stages)]
    position, free = [0] * stages, [0.0] * stages
    ends: dict[tuple[int, bool, int, int], float] = {}
    spans: list[TimedPass] = []
    waiting = list(range(stages))
    while waiting:
        progressed = False
        for stage in waiting:
            order = orders[stage]
            while position[stage] < len(order):
                forward, chunk, micro_batch = order[position[stage]]
                source = _source(stage, stages, chunks, forward, chunk)
                start = free[stage]
                if source is not None:
                    key = (source[0], source[1], source[2], micro_batch)
                    if key not in ends:
                        break
                    start = max(start, ends[key] + (transfer if source[0] != stage else 0.0))
                seconds = (durations[stage].forward if forward else durations[stage].backward)[chunk]
                end = start + seconds
                ends[stage, forward, chunk, micro_batch] = end
                free[stage] = end if overlaps or stages == 1 else end + transfer
                spans.append(TimedPass(stage, forward, chunk, micro_batch, start, end))
                position[stage] += 1
                progressed = True
        waiting = [stage for stage in waiting if position[stage] < len(orders[stage])]
        assert progressed or not waiting, "the schedule waits for itself"
    return sorted(spans, key=lambda span: (span.end, span.stage))


def _source(stage: int, stages: int, chunks: int, forward: bool, chunk: int) -> tuple[int, bool, int] | None:
    """Return (stage, forward, chunk) of the pass whose result a pass needs; None for the first of a micro batch."""
    if forward:
        if stage > 0:
            return stage - 1, True, chunk
        return None if chunk == 0 else (stages - 1, True, chunk - 1)
    if stage < stages - 1:
        return stage + 1, False, chunk
    return (stage, True, chunk) if chunk == chunks - 1 else (0, False, chunk + 1)


def step_seconds(durations: Sequence[Durations], micro_batches: int, transfer: float, *, overlaps: bool) -> float:
    """Return the seconds from the first forward to the last backward pass of a step.

    Once the pipeline is full, every round takes as long as the slowest stage, so that a few rounds tell about any number.
    """
    stages = len(durations)
    if stages == 1:
        return micro_batches * durations[0].total
    left = micro_batches % stages
    simulated = ROUNDS * stages + left
    if micro_batches <= simulated:
        return simulate(durations, micro_batches, transfer, overlaps=overlaps)[-1].end
    long, short = (
        simulate(durations, count, transfer, overlaps=overlaps)[-1].end for count in (simulated, simulated - stages)
    )
    return long + (micro_batches - simulated) // stages * (long - short)


def least_seconds(durations: Sequence[Durations], micro_batches: int, transfer: float) -> float:
    """Return seconds that no order of passes is faster than.

    A stage begins when the first micro batch has passed the stages before it, does all its passes, and after its last one, a
    backward pass of its first chunk, those stages have theirs to do.
    """
    ends = [0.0, *accumulate(stage.forward[0] + stage.backward[0] + 2 * transfer for stage in durations)]
    return max(end + micro_batches * stage.total for end, stage in zip(ends, durations, strict=False))


BALANCING_MOVES = 64
"""Layers that are moved between stages, at most, to balance a division whose layers differ."""


@lru_cache(maxsize=4096)
def balanced_chunks(
    layers: tuple[float, ...], first: float, last: float, stages: int, chunks: int, least_last: int = 0
) -> tuple[int, ...] | None:
    """Divide layers over the chunks of a pipeline so that the stage that works longest takes as little time as possible.

    Args:
        layers: time of each layer, in any unit.
        first, last: time of what the first and the last chunk have beside layers: embedding; output layer, loss, and a head for
            multi-token prediction.
        chunks: of a stage.
        least_last: layers of the last chunk, at least; the first one may have none, and all others have one or more.

    Returns:
        Layers of each chunk, in the order in which a token passes them; None if there are too few.
    """
    count, total = stages * chunks, len(layers)
    least = [0, *[1] * (count - 2), least_last]
    sizes = list(least)
    if count < 2 or sum(sizes) > total:
        return None
    mean = sum(layers) / total
    ends = {0: first, count - 1: last}

    def alike(index: int) -> float:
        """Return the time of a chunk if all layers took the same time."""
        return sizes[index] * mean + ends.get(index, 0.0)

    loads = [sum(alike(index) for index in range(stage, count, stages)) for stage in range(stages)]
    for _ in range(total - sum(sizes)):
        stage = min(range(stages), key=lambda stage: loads[stage])
        loads[stage] += mean
        sizes[min(range(stage, count, stages), key=alike)] += 1
    # Where the first layers take less time than others, layers are moved from the busiest stage to other chunks.
    times = [0.0, *accumulate(layers)]

    def cost(sizes: Sequence[int]) -> tuple[float, float, list[float]]:
        """Return the time of the busiest stage, how unequal chunks are, and the time of each stage."""
        borders = [0, *accumulate(sizes)]
        parts = [times[borders[index + 1]] - times[borders[index]] + ends.get(index, 0.0) for index in range(count)]
        stage_times = [sum(parts[stage::stages]) for stage in range(stages)]
        return round(max(stage_times), 6), round(sum(part**2 for part in parts), 6), stage_times

    best = cost(sizes)
    for _ in range(BALANCING_MOVES):
        moved = []
        for source in range(best[2].index(max(best[2])), count, stages):
            if sizes[source] > least[source]:
                for target in range(count):
                    other = list(sizes)
                    other[source] -= 1
                    other[target] += 1
                    moved.append((*cost(other), other))
        if not moved or min(moved)[:2] >= best[:2]:
            break
        chosen = min(moved)
        best, sizes = chosen[:3], chosen[3]
    return tuple(sizes)
