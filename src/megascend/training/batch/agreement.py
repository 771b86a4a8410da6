"""Agreement of all ranks on a step: one small Gloo exchange before it, so that all run the step or none does."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megascend.errors import DataError
from megascend.runtime.distributed.objects import gather_objects
from megascend.runtime.distributed.process_groups import ProcessGroups
from megascend.runtime.topology.topology import Topology
from megascend.training.batch.loss import Loss
from megascend.training.batch.packing import round_up
from megascend.training.batch.results import TokenCounts
from megascend.training.batch.sample import Sample

WEIGHT_LIMIT = 1e30
"""Largest sum of weights, and inverse of the smallest: losses up to 1e8 times these still fit into float32."""


@dataclass(frozen=True)
class RankReport:
    """A rank's report on its samples.

    Attributes:
        problem: reason why they cannot be trained on, or None.
        micro_batches: planned micro batches.
        counts: sums over the samples of each adapter; "" is the model itself.
        checksums: checksums of each per-token field of all samples, and of their adapters and pairs; equal on ranks with the same
            samples.
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


def report(
    samples: Sequence[Sample],
    micro_batches: int,
    names: Sequence[str],
    loss: Loss | None,
    common: Sequence[int] | None = None,
) -> RankReport:
    """Build the report on valid samples.

    Args:
        names: the samples' adapters, "" for the model.
        loss: None for a forward pass without one.
        common: tokens of each sample that are computed with another one; None: no tokens.
    """
    for index, sample in enumerate(samples):
        if not bool(sample.weights.isfinite().all()):
            raise DataError(f"sample {index} has weights that are not finite")
    checksums: dict[str, int] = {}
    counts: dict[str, TokenCounts] = {}
    # Numbered by first appearance: a pair may be named by an object whose repr differs between processes.
    pairs: dict[Hashable, int] = {}
    for index, (sample, name) in enumerate(zip(samples, names, strict=True)):
        pair = None if sample.pair is None else pairs.setdefault(sample.pair, len(pairs))
        for label, content in _contents(sample, name, index, pair):
            # CRC-32: cheap, and the same in every process; it only has to detect mistakes.
            checksums[label] = zlib.crc32(content, checksums.get(label, 0))
        counts[name] = counts.get(name, TokenCounts()) + TokenCounts(
            weight=_weight(sample.weights, loss),
            mtp_weight=_weight(sample.weights[1:], loss),
            units=int(loss is not None and (loss.per == "sample" or (loss.per == "pair" and bool(sample.chosen)))),
            trained=int((sample.weights != 0).sum()),
            tokens=len(sample),
            routed=int(sample.routed_experts is not None),
            shared=0 if common is None else common[index],
        )
    return RankReport(None, micro_batches, counts, checksums)


def _weight(weights: torch.Tensor, loss: Loss | None) -> float:
    """Return the share of targets with these weights in the divisor of averages."""
    if loss is not None and loss.reduction == "sum":
        return float((weights != 0).sum())
    # fp64: all losses are divided by the sum over all samples.
    return float(weights.sum(dtype=torch.float64))


def _contents(sample: Sample, name: str, index: int, pair: int | None) -> Iterator[tuple[str, bytes]]:
    """Yield (label, bytes) that must be equal on ranks with the same samples; the index is included, as a field may be unset."""
    candidates = () if sample.candidates is None else (sample.candidates.ids, sample.candidates.logprobs)
    tensors = [*(sample.token_fields() | sample.image_fields()).items(), *(("candidates", rows) for rows in candidates)]
    tensors += [("routed_experts", sample.routed_experts), ("allowed", sample.allowed)]
    for label, values in tensors:
        if values is not None:
            yield label, index.to_bytes(8, "little") + values.numpy().tobytes()
    if sample.temperature != 1:
        yield "temperature", f"{index} {sample.temperature}".encode()
    yield "adapter", f"{index} {name}".encode()
    if sample.label is not None:
        label = sample.label.tolist() if isinstance(sample.label, Tensor) else sample.label
        yield "label", f"{index} {label}".encode()
    if pair is not None:
        yield "pair", f"{index} {pair} {sample.chosen}".encode()


def exchange(local: RankReport, topology: Topology, groups: ProcessGroups, call: str) -> Agreement:
    """Exchange reports with all ranks; all return or raise the same. ``call``: name and arguments that must be equal."""
    return reconcile(gather_objects(local, "world", groups, call), topology)


def reconcile(reports: Sequence[RankReport], topology: Topology) -> Agreement:
    """Combine the reports of all ranks, or raise their first problem. Pure."""
    problems = [(rank, entry.problem) for rank, entry in enumerate(reports) if entry.problem is not None]
    if problems:
        rank, problem = problems[0]
        suffix = f" ({len(problems)} ranks have problems)" if len(problems) > 1 else ""
        raise DataError(f"rank {rank}: {problem}{suffix}")
    replicas = topology.groups("tensor", "context", "pipeline")
    for leader, *ranks in replicas:
        # The lowest rank of each replica represents it; the other ranks must have the same samples.
        first = reports[leader].checksums
        for rank in ranks:
            second = reports[rank].checksums
            if first != second:
                different = [label for label in {**first, **second} if first.get(label) != second.get(label)]
                raise DataError(
                    f"ranks {leader} and {rank} differ only in tensor, pipeline or context parallelism but got different "
                    f"samples (their {', '.join(different)} differ); pass the same list on both"
                )
    shares = [reports[leader] for leader, *_ in replicas]
    if not any(share.counts for share in shares):
        raise DataError("the batch is empty on every rank")
    # Ranks with fewer split theirs, or add dummies (split_to).
    count = max(share.micro_batches for share in shares)
    if topology.virtual_pipeline > 1:  # the interleaved schedule works in rounds of one micro batch per stage
        count = round_up(count, topology.pipeline)
    counts: dict[str, TokenCounts] = {}
    for share in shares:
        for name, sums in share.counts.items():
            counts[name] = counts.get(name, TokenCounts()) + sums
    for name, sums in counts.items():
        if sums.weight and not 1 / WEIGHT_LIMIT <= sums.weight <= WEIGHT_LIMIT:
            owner = f" of adapter {name!r}" if name else ""
            raise DataError(
                f"the weights of all samples{owner} sum to {sums.weight:g}, outside [{1 / WEIGHT_LIMIT:g}, {WEIGHT_LIMIT:g}]: "
                "the loss would overflow in float32; scale all weights by one factor"
            )
    # Sorted: the order is the adapters' index on all ranks.
    return Agreement(count, dict(sorted(counts.items())))
