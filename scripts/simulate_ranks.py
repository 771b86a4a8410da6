"""Work and memory of one rank of a large world, computed for real in one process: groups, exchanges, errors, plans, sockets.

    python scripts/simulate_ranks.py [--ranks 1024 4096 16384] [--json FILE]

The layout is that of a mixture of experts: TP8 PP16 EP64, and data parallelism over the remaining ranks. What the network does is
not simulated; benchmarks/large_worlds has the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import platform
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import HashStore
from torch.distributed.checkpoint.planner import SavePlan

from megascend.apps.train.run_backend import bootstrap
from megascend.config import Parallel, TrainerConfig
from megascend.runtime.diagnostics import survey
from megascend.runtime.diagnostics.collective_sequence import CollectiveCounts
from megascend.runtime.diagnostics.diagnosis import PeerStatus, PhaseFailure, RankRecord
from megascend.runtime.distributed import frames
from megascend.runtime.distributed.process_groups import LAZY_CONNECTIONS_ABOVE, gloo_sockets, object_group_sockets
from megascend.runtime.distributed.rendezvous import Arrivals
from megascend.runtime.topology.topology import Topology, participants, plan, rank_lists, route
from megascend.training.batch.agreement import RankReport, reconcile
from megascend.training.batch.results import TokenCounts
from megascend.training.checkpoint.manifest import CheckpointManifest, entry
from megascend.training.checkpoint.manifest import parse as parse_manifest
from megascend.training.checkpoint.slices import OPTIMIZER_KEY, TensorSlices, slices_of_run
from megascend.training.checkpoint.torch_io import SliceSavePlanner
from weightwire.liveness import Identity
from weightwire.manifest import TensorSpec
from weightwire.plan import Region
from weightwire.plan import plan as plan_transfer

T = TypeVar("T")

PARALLEL = Parallel(tensor=8, pipeline=16, expert=64, expert_tensor=1)
REPEATS = 3
HOST = 8
"""Ranks of a host, of which one is lost in the simulated errors."""
ADDRESS_BYTES = 192
"""Bytes that Gloo stores for a rank of a group: measured with a FileStore on 4, 8 and 16 ranks."""
WIDTH, EXPERTS, EXPERT_WIDTH, TENSOR = 4096, 128, 1024, 8
"""Of the layers whose weights are planned to be sent, one on each pipeline stage, to engines of TP8, one for every 64 ranks."""
LAYERS = 4
"""Layers of a pipeline stage whose state is saved."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    topologies = [plan(PARALLEL, ranks) for ranks in options.ranks]
    rows = [figures(topology) for topology in topologies]
    # Last, so that the figures' memory is without Megatron.
    for row, milliseconds in zip(rows, megatron_groups_ms(topologies), strict=True):
        row["Megatron's groups, created as fake ones, ms"] = milliseconds
    for name in rows[0]:
        print(f"{name:60}", *(f"{row[name]:>12,}" for row in rows))
    if options.json is not None:
        content = {"device": f"one core, {platform.machine()}", "layout": "TP8 PP16 EP64", "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def figures(topology: Topology) -> dict[str, Any]:
    """Return counts, bytes and milliseconds of the last rank."""
    size = topology.world_size
    rank = size - 1
    groups, groups_ms = timed(lambda: rank_lists(topology))
    _, routes_ms = timed(lambda: [route(topology, rank, {0}, expert=expert) for expert in (False, True)])
    _, participants_ms = timed(lambda: participants(topology, {0}))
    received = [report_frame(topology, number) for number in range(size)]

    def agree() -> None:
        assert not frames.pending_of(received)
        members = frames.aligned_frames(received, range(size), rank)
        reconcile([pickle.loads(frame.content) for frame in members], topology)

    _, agree_ms = timed(agree)
    sockets = object_group_sockets(rank, range(size))
    addresses, infos = (sockets, ADDRESS_BYTES) if size > LAZY_CONNECTIONS_ABOVE else (size, ADDRESS_BYTES + 8 * size)
    statuses = statuses_without_host(size)
    summary, summary_ms = timed(lambda: survey.encode(statuses))
    _, summary_read_ms = timed(lambda: survey.decode(summary, survey.Pace(size)))
    records = sum(len(status.record.encode()) for status in statuses.values() if status is not None)
    pace = survey.Pace(size)
    looks = pace.silent_s / pace.urgent_poll_s + 1
    index, index_ms = timed(lambda: checkpoint_index(size))
    _, index_read_ms = timed(lambda: parse_manifest(index, Path("checkpoint")))
    transfer, transfer_ms = timed(lambda: transfer_plan(topology), 1)
    return {
        "ranks": size,
        "groups that every rank creates": len(groups),
        "their ranks, ms": groups_ms,
        "routes of weights, ms": routes_ms,
        "participants of an export, ms": participants_ms,
        "sockets of Gloo groups, on the last rank": gloo_sockets(topology, rank, device_groups=False),
        "the same, on rank 0": gloo_sockets(topology, 0, device_groups=False),
        "store traffic of a world's Gloo group, MB": size * addresses * infos // 10**6,
        "requests of a rank for the names of a missing host's": missing_requests(size),
        "bytes of a world's exchange, received": frames.SIZE * size,
        "reading a step's exchange, ms": agree_ms,
        "summary of the ranks' records after an error, bytes": len(summary),
        "writing it on one rank, ms": summary_ms,
        "reading it on every other, ms": summary_read_ms,
        "store traffic of the error, MB": round((looks * records + size * len(summary)) / 10**6),
        "limit of the wait for it, s": round(pace.answer_s, 1),
        "index of a checkpoint's files, bytes": len(index),
        "writing it on rank 0, ms": index_ms,
        "reading it on every rank, ms": index_read_ms,
        **checkpoint_plan(topology),
        "plan of a transfer of weights, ms": transfer_ms,
        "its messages": transfer,
        "peak memory of all this, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


@dataclass(frozen=True)
class LocalTensor:
    """A model parallel rank's part of a tensor: its offsets in the tensor, and its shape."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def local_tensors(topology: Topology, rank: int) -> tuple[list[LocalTensor], list[LocalTensor]]:
    """Return the parts of a rank's stage of LAYERS layers: those outside experts, and of experts."""
    coordinates = topology.coordinates(rank)
    dense, experts = [], []
    for layer in range(coordinates.pipeline * LAYERS, (coordinates.pipeline + 1) * LAYERS):
        for name, shape, divided in (
            ("qkv", (WIDTH * 3 // 2, WIDTH), 0), ("proj", (WIDTH, WIDTH), 1),
            ("norm", (WIDTH,), None), ("mlp_norm", (WIDTH,), None), ("router", (EXPERTS, WIDTH), None),
        ):  # fmt: skip
            offsets, sizes = [0] * len(shape), list(shape)
            if divided is not None:
                sizes[divided] //= topology.tensor
                offsets[divided] = coordinates.tensor * sizes[divided]
            elif coordinates.tensor:
                sizes[0] = 0  # the first tensor parallel rank writes what all have
            dense.append(LocalTensor(f"{layer}.{name}", shape, tuple(offsets), tuple(sizes)))
        local = EXPERTS // topology.expert
        for name, shape in (("fc1", (2 * EXPERT_WIDTH, WIDTH)), ("fc2", (WIDTH, EXPERT_WIDTH))):
            for expert in range(coordinates.expert * local, (coordinates.expert + 1) * local):
                experts.append(LocalTensor(f"{layer}.experts.{expert}.{name}", shape, (0, 0), shape))
    return dense, experts


def save_plan(topology: Topology, rank: int) -> SavePlan:
    """Return a rank's plan of a save: its run, in fp32, of the parameters and moments of its stage, as Megatron divides them."""
    coordinates = topology.coordinates(rank)
    dense, experts = local_tensors(topology, rank)
    state: dict[str, TensorSlices] = {}
    replicas = topology.data * topology.context
    for tensors, member, members in (
        (dense, coordinates.data * topology.context + coordinates.context, replicas),
        (experts, coordinates.expert_data, topology.expert_data),
    ):
        total = sum(math.prod(tensor.sizes) for tensor in tensors)
        begin, end, before = total * member // members, total * (member + 1) // members, 0
        for tensor in tensors:
            size = math.prod(tensor.sizes)
            start, stop = max(begin - before, 0), min(end - before, size)
            before += size
            for name in ("param", "exp_avg", "exp_avg_sq") if start < stop else ():
                slices = TensorSlices(tensor.shape, torch.float32)
                for part in slices_of_run(tensor.sizes, start, stop):
                    offsets = [a + b for a, b in zip(tensor.offsets, part.offsets, strict=True)]
                    slices.add(offsets, torch.empty(part.sizes, device="meta"))
                state[OPTIMIZER_KEY.format(state=name, key=tensor.name)] = slices
    planner = SliceSavePlanner()
    planner.set_up_planner(state, None, rank == 0)
    return planner.create_local_plan()


def checkpoint_plan(topology: Topology) -> dict[str, Any]:
    """Return what rank 0 does to plan a save of all ranks, and what every rank reads to load it."""
    plans = [save_plan(topology, rank) for rank in range(topology.world_size)]
    planner = SliceSavePlanner()
    planner.set_up_planner({}, None, True)
    (_, metadata), plan_ms = timed(lambda: planner.create_global_plan(plans), 1)
    content, pickled_ms = timed(lambda: pickle.dumps(metadata), 1)
    _, read_ms = timed(lambda: pickle.loads(content), 1)
    return {
        "slices of a checkpoint": sum(len(plan.items) for plan in plans),
        "plans that rank 0 receives for a save, MB": round(sum(len(pickle.dumps(plan)) for plan in plans) / 1e6, 1),
        "planning it on rank 0, ms": plan_ms,
        "its metadata, MB": round(len(content) / 1e6, 1),
        "writing them on rank 0, ms": pickled_ms,
        "reading them on every rank of a load, ms": read_ms,
    }


def megatron_groups_ms(topologies: Sequence[Topology]) -> list[float]:
    """Return the time in which Megatron creates its groups on rank 0, on a backend that communicates nothing."""
    bootstrap(TrainerConfig(model=Path("model"), output=Path("run")))
    from megascend.engines.megatron.groups import fake_groups

    def create(topology: Topology) -> None:
        with fake_groups(topology):
            pass

    return [timed(lambda topology=topology: create(topology))[1] for topology in topologies]


def statuses_without_host(size: int) -> dict[int, PeerStatus | None]:
    """Return the statuses of all ranks when the host of the middle one is gone: half of the others have failed already."""
    waiting = RankRecord(
        label="the check for finite gradients",
        outer="optimizer step",
        counts={"forward and backward": 70, "optimizer step": 70},
        open=["optimizer step"],
        collectives=CollectiveCounts({"world": 400, "tp": 12}, "world"),
        waiting=True,
    )
    statuses: dict[int, PeerStatus | None] = {}
    for rank in range(size):
        text = f"PeerLostError: rank {rank}: the check for finite gradients failed after {rank % 100 / 10} s"
        failure = PhaseFailure("optimizer step of step 70", "optimizer step", text, secondary=True)
        record = RankRecord(
            **{
                **vars(waiting),
                "heartbeat": rank,
                "seconds": rank % 100 / 10,
                "frame": "_wait (channels.py:171)",
                "process": Identity(f"node-{rank // HOST}", f"boot-{rank // HOST}", 1000 + rank, 5),
                "failure": failure if rank % 2 else None,
            }
        )
        absent = rank // HOST == size // 2 // HOST
        statuses[rank] = (
            PeerStatus(RankRecord(**{**vars(record), "failure": None}), 60.0) if absent else PeerStatus(record)
        )
    return statuses


class CountedStore:
    """A store that counts its requests."""

    def __init__(self) -> None:
        self._store, self.requests = HashStore(), 0

    def add(self, key: str, amount: int) -> int:
        self.requests += 1
        return self._store.add(key, amount)


def missing_requests(size: int) -> int:
    """Count the requests by which a rank learns, after a start-up's timeout, which ranks of a host did not arrive."""
    store: Any = CountedStore()
    arrivals = Arrivals(store, "started", size)
    missing = range(size // 2, size // 2 + HOST)
    for rank in range(size):
        if rank not in missing:
            arrivals.announce(rank)
    store.requests = 0
    assert arrivals.missing() == [*missing]
    return store.requests


def checkpoint_index(size: int) -> str:
    """Write the index of a checkpoint as rank 0 does, from what each rank reports: its file's size and digest."""
    files = {f"__{rank}_0.distcp": entry(2**30 + rank, f"{rank:032x}") for rank in range(size)}
    return CheckpointManifest(
        step=100,
        precision="bf16",
        model={"layers": 61, "hidden_size": 7168, "vocab_size": 129280},
        layout={"tensor": 8, "pipeline": 16, "expert": 64, "data": size // 128},
        optimizer={"step": 100},
        adapters=[],
        versions={"megascend": "0.3.0", "torch": "2.13.0"},
        files=files,
    ).to_text()


def transfer_plan(topology: Topology) -> int:
    """Plan, as rank 0 does, which rank sends which slices to which worker; return the number of messages."""
    names = ["up", "down"]
    layer = [("qkv", (2 * WIDTH, WIDTH)), ("o", (WIDTH, 2 * WIDTH))]
    layer += [(f"{expert}.{name}", (2 * EXPERT_WIDTH, WIDTH)) for expert in range(EXPERTS) for name in names]
    specs = [
        TensorSpec(f"{stage}.{name}", "bfloat16", shape) for stage in range(topology.pipeline) for name, shape in layer
    ]
    experts = EXPERTS // topology.expert
    holdings = []
    for rank in range(topology.world_size):
        coordinates = topology.coordinates(rank)
        first = coordinates.pipeline * len(layer)
        rows = 2 * WIDTH // topology.tensor
        pieces = [
            Region(first, (coordinates.tensor * rows, 0), (rows, WIDTH)),
            Region(first + 1, (0, coordinates.tensor * rows), (WIDTH, rows)),
        ]
        start = first + 2 + 2 * experts * coordinates.expert
        pieces += [Region(number, (0, 0), specs[number].shape) for number in range(start, start + 2 * experts)]
        holdings.append(pieces)
    kinds = []
    for part in range(TENSOR):
        pieces = []
        for number, spec in enumerate(specs):
            rows = spec.shape[0] // TENSOR
            pieces.append(Region(number, (part * rows, 0), (rows, spec.shape[1])))
        kinds.append(pieces)
    workers = [kinds[worker % TENSOR] for worker in range(topology.world_size // TENSOR)]
    result = plan_transfer(specs, holdings, workers, chunk_bytes=2**28)
    return sum(len(share.operations) for share in result.shares()) // 2


def report_frame(topology: Topology, rank: int) -> bytes:
    """Build the frame by which a rank takes part in the exchange before ``forward_backward``."""
    data = topology.coordinates(rank).data
    counts = TokenCounts(weight=4096.0 + data, trained=4096, tokens=8192)
    checksums = {
        name: 1000 * number + data for number, name in enumerate(("token_ids", "targets", "weights", "adapter"))
    }
    position = frames.Position("gather_objects", "world", 7, 3, "forward_backward(loss='cross_entropy')")
    return frames.encode(position, pickle.dumps(RankReport(None, 4, {"": counts}, checksums)))


def timed(function: Callable[[], T], repeats: int = REPEATS) -> tuple[T, float]:
    """Return a result, and the shortest of the durations in ms."""
    durations = []
    for _ in range(repeats):
        start = time.process_time()
        result = function()
        durations.append(time.process_time() - start)
    return result, round(1000 * min(durations), 1)


if __name__ == "__main__":
    main()
