"""The order in which Megatron's pipeline schedules run micro batches, and how long a step of them takes.

``forward_backward_pipelining_without_interleaving`` and ``..._with_interleaving`` of megatron-core 0.15.3 and 0.16.1: the engine
runs the latter if ``parallel.virtual_pipeline`` is above 1. The order of a stage is what Megatron runs; starts and ends follow
from it, from the duration of each pass, and from the rule that a pass needs its neighbour's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

Task = tuple[bool, int, int]
"""A pass of one stage: forward or not, model chunk, micro batch."""

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


@lru_cache(maxsize=4096)
def stage_order(stage: int, stages: int, chunks: int, micro_batches: int) -> tuple[Task, ...]:
    """Return the passes of a stage in the order in which Megatron runs them."""
    if chunks == 1:
        forwards = [(True, 0, index) for index in range(micro_batches)]
        backwards = [(False, 0, index) for index in range(micro_batches)]
        warmup = min(stages - stage - 1, micro_batches)
    else:
        # Rounds of as many micro batches as there are stages; each round passes all chunks before the next one begins.
        table = [
            (chunk, index)
            for first in range(0, micro_batches, stages)
            for chunk in range(chunks)
            for index in range(first, min(first + stages, micro_batches))
        ]
        forwards = [(True, chunk, index) for chunk, index in table]
        backwards = [(False, chunks - 1 - chunk, index) for chunk, index in table]
        warmup = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(table))
    order = forwards[:warmup]
    for number, task in enumerate(forwards[warmup:]):
        order += [task, backwards[number]]
    return tuple(order + backwards[len(forwards) - warmup :])


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
