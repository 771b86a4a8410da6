"""How the samples of a run's first steps become micro batches, before any rank is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from megascend.app.objectives import Objective
from megascend.app.run_samples import RunSamples
from megascend.batch.micro_batch import SequenceLayout
from megascend.batch.packing import plan_micro_batches, shard
from megascend.config import RunConfig
from megascend.topology.topology import Topology

LOOKED_AT = 50
"""Steps that are planned."""


@dataclass(frozen=True)
class StepPlan:
    """Micro batches of a run's first steps.

    Attributes:
        steps: how many were looked at.
        budget: most tokens of a micro batch.
        micro_batches: most that a data parallel rank has in a step.
        tokens: of the largest micro batch, padding included, over all context parallel ranks.
        samples: of that one.
        longest: tokens of the longest sample, with its padding.
        padding: share of tokens that are padding.
        packed: some micro batch has samples of different length one after the other.
        idle: True if some rank has no sample in some step.
    """

    steps: int
    budget: int
    micro_batches: int
    tokens: int
    samples: int
    longest: int
    padding: float
    packed: bool
    idle: bool


def plan_steps(
    config: RunConfig,
    samples: RunSamples,
    objective: Objective,
    layout: SequenceLayout,
    topology: Topology,
    budget: int,
) -> StepPlan:
    """Plan the first :data:`LOOKED_AT` steps, from the lengths of samples alone.

    Args:
        budget: most tokens of a micro batch.

    Raises:
        DataError: a sample, or a pair, does not fit into a micro batch.
    """
    lengths = samples.learned.lengths.tolist()
    steps = min(config.steps, LOOKED_AT)
    most = largest = largest_samples = longest = taken = padded = 0
    idle = packed = False
    for batch in islice(samples.batches(config, objective), steps):
        members = objective.members(batch)
        own = [lengths[index] for index, _ in members]
        pairs = [pair for _, pair in members]
        for share in shard(own, pairs, topology.data):
            planned = _micro_batches([own[i] for i in share], [pairs[i] for i in share], layout, budget)
            most, idle = max(most, len(planned)), idle or not planned
            for tokens, count, top in planned:
                packed |= layout.packing and tokens < top * count
                if tokens > largest:
                    largest, largest_samples = tokens, count
                longest, padded = max(longest, top), padded + tokens
            taken += sum(own[i] for i in share)
    return StepPlan(steps, budget, most, largest, largest_samples, longest, 1 - taken / padded, packed, idle)


def _micro_batches(
    lengths: Sequence[int], pairs: Sequence[int | None], layout: SequenceLayout, budget: int
) -> list[tuple[int, int, int]]:
    """(tokens, samples, longest sample) of each micro batch of one rank."""
    padded = [layout.padded_length(length) for length in lengths]
    found = []
    for members in plan_micro_batches(padded, pairs, budget, layout.packing):
        longest = max(padded[i] for i in members)
        tokens = sum(padded[i] for i in members) if layout.packing else longest * len(members)
        found.append((tokens, len(members), longest))
    return found
