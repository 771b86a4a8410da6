"""What the ranks tell each other before a step: one small Gloo exchange, so that all of them run it or none does."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megascend.batch.losses import Loss
from megascend.batch.results import TokenCounts
from megascend.batch.sample import Sample
from megascend.distributed.objects import gather_objects
from megascend.distributed.process_groups import ProcessGroups
from megascend.errors import DataError
from megascend.topology.topology import Topology

WEIGHT_LIMIT = 1e30
"""Largest sum of weights, and the inverse of the smallest: room for losses up to 1e8 in float32."""


@dataclass(frozen=True)
class RankReport:
    """One rank's view of its own samples.

    Attributes:
        problem: why they cannot be trained on, or None.
        micro_batches: how many it planned.
        counts: sums over the samples of each adapter; under "" those of the model itself.
        checksums: of each per-token field of all samples, and of their adapters and pairs; equal on ranks that were given the
            same samples.
    """

    problem: str | None
    micro_batches: int = 0
    counts: dict[str, TokenCounts] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Agreement:
    """Sums over data parallel ranks, and the number of micro batches that every rank runs."""

    micro_batches: int
    counts: dict[str, TokenCounts]


def report(samples: Sequence[Sample], micro_batches: int, names: Sequence[str], loss: Loss | None) -> RankReport:
    """Return the :class:`RankReport` of valid samples; ``names``: each one's adapter, "" for the model; ``loss``: None if none
    trains.
    """
    for index, sample in enumerate(samples):
        if not bool(sample.weights.isfinite().all()):
            raise DataError(f"sample {index} has weights that are not finite")
    checksums: dict[str, int] = {}
    counts: dict[str, TokenCounts] = {}
    pairs: dict[
        Hashable, int
    ] = {}  # numbered, since a pair may be called by an object that has another name in each process
    for index, (sample, name) in enumerate(zip(samples, names, strict=True)):
        pair = None if sample.pair is None else pairs.setdefault(sample.pair, len(pairs))
        for what, content in _contents(sample, name, index, pair):
            checksums[what] = zlib.crc32(content, checksums.get(what, 0))
        counts[name] = counts.get(name, TokenCounts()) + TokenCounts(
            weight=_weight(sample, loss),
            pairs=int(loss is not None and loss.per == "pair" and bool(sample.chosen)),
            trained=int((sample.weights != 0).sum()),
            tokens=len(sample),
        )
    return RankReport(None, micro_batches, counts, checksums)


def _weight(sample: Sample, loss: Loss | None) -> float:
    """What averages over the sample's targets are divided by."""
    if loss is not None and loss.reduction == "sum":
        return float((sample.weights != 0).sum())
    return float(sample.weights.sum(dtype=torch.float64))


def _contents(sample: Sample, name: str, index: int, pair: int | None) -> Iterator[tuple[str, bytes]]:
    """What ranks that share their samples must agree on: (what it is, its bytes). The index tells which samples have it."""
    for what, values in sample.token_fields().items():
        yield what, index.to_bytes(8, "little") + values.numpy().tobytes()
    yield "adapter", f"{index} {name}".encode()
    if pair is not None:
        yield "pair", f"{index} {pair} {sample.chosen}".encode()


def exchange(mine: RankReport, topology: Topology, groups: ProcessGroups, call: str) -> Agreement:
    """Exchange reports with all ranks and reach the same verdict everywhere; ``call``: with the arguments that must be equal."""
    return reconcile(gather_objects(mine, "world", groups, call), topology)


def reconcile(reports: Sequence[RankReport], topology: Topology) -> Agreement:
    """The verdict on the reports of all ranks. Pure."""
    problems = [(rank, entry.problem) for rank, entry in enumerate(reports) if entry.problem is not None]
    if problems:
        rank, problem = problems[0]
        more = f" ({len(problems)} ranks have problems)" if len(problems) > 1 else ""
        raise DataError(f"rank {rank}: {problem}{more}")
    leaders: dict[int, int] = {}
    for rank, entry in enumerate(reports):
        leader = leaders.setdefault(topology.coordinates(rank).data, rank)
        first, second = reports[leader].checksums, entry.checksums
        different = [what for what in {**first, **second} if first.get(what) != second.get(what)]
        if different:
            raise DataError(
                f"ranks {leader} and {rank} differ only in tensor, pipeline or context parallelism but were given different "
                f"samples (their {', '.join(different)} differ); pass the same list on both (backend.shard picks a data "
                "parallel rank's share of a global list)"
            )
    shares = [reports[rank] for rank in leaders.values()]
    if not any(share.counts for share in shares):
        raise DataError("the batch is empty on every rank")
    count = max(share.micro_batches for share in shares)
    if topology.virtual_pipeline > 1:  # the interleaved schedule works in rounds of one micro batch per stage
        count = -(-count // topology.pipeline) * topology.pipeline
    counts: dict[str, TokenCounts] = {}
    for share in shares:
        for name, sums in share.counts.items():
            counts[name] = counts.get(name, TokenCounts()) + sums
    for name, sums in counts.items():
        if sums.weight and not 1 / WEIGHT_LIMIT <= sums.weight <= WEIGHT_LIMIT:
            of = f" of adapter {name!r}" if name else ""
            raise DataError(
                f"the weights of all samples{of} sum to {sums.weight:g}, outside [{1 / WEIGHT_LIMIT:g}, {WEIGHT_LIMIT:g}]: the "
                "loss would overflow in float32. It is divided by this sum, so scale all weights by one factor"
            )
    return Agreement(count, dict(sorted(counts.items())))
