"""Work and memory of one rank of a large world, computed for real in one process: groups, routes, exchanges, sockets.

    python scripts/simulate_ranks.py [--ranks 1024 4096 16384] [--json FILE]

The layout is that of a mixture of experts: TP8 PP16 EP64, and data parallelism over the remaining ranks. What the network does is
not simulated; docs/benchmarks.md has the figures.
"""

from __future__ import annotations

import argparse
import json
import pickle
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from megascend.batch.agreement import RankReport, reconcile
from megascend.batch.results import TokenCounts
from megascend.config import Parallel
from megascend.distributed import frames
from megascend.distributed.process_groups import gloo_sockets
from megascend.topology.topology import Topology, participants, plan, rank_lists, route

T = TypeVar("T")

PARALLEL = Parallel(tensor=8, pipeline=16, expert=64, expert_tensor=1)
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    rows = [figures(plan(PARALLEL, ranks)) for ranks in options.ranks]
    for name in rows[0]:
        print(f"{name:40}", *(f"{row[name]:>12,}" for row in rows))
    if options.json is not None:
        content = {"device": f"one core, {platform.machine()}", "layout": "TP8 PP16 EP64", "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def figures(topology: Topology) -> dict[str, Any]:
    """Return counts, bytes and milliseconds of the last rank."""
    rank = topology.world_size - 1
    groups, groups_ms = timed(lambda: rank_lists(topology))
    _, routes_ms = timed(lambda: [route(topology, rank, {0}, expert=expert) for expert in (False, True)])
    _, participants_ms = timed(lambda: participants(topology, {0}))
    received = [report_frame(topology, rank) for rank in range(topology.world_size)]

    def agree() -> None:
        assert not frames.pending_of(received)
        members = frames.contents(received, range(topology.world_size), rank)
        reconcile([pickle.loads(frame.content) for frame in members], topology)

    _, agree_ms = timed(agree)
    # What Gloo stores for its connections: measured with a FileStore on 4, 8 and 16 ranks.
    eager, lazy = (topology.world_size**2 * (192 + size) for size in (8 * topology.world_size, 0))
    return {
        "ranks": topology.world_size,
        "groups that every rank creates": len(groups),
        "their ranks, ms": groups_ms,
        "routes of weights, ms": routes_ms,
        "participants of an export, ms": participants_ms,
        "sockets of Gloo groups": gloo_sockets(topology, rank, device_groups=False),
        "bytes of a world's exchange, sent": frames.SIZE * topology.world_size,
        "reading a step's exchange, ms": agree_ms,
        "store traffic of a world's Gloo group, MB": eager // 10**6,
        "the same, connected lazily, MB": lazy // 10**6,
    }


def report_frame(topology: Topology, rank: int) -> bytes:
    """Build the frame by which a rank takes part in the exchange before ``forward_backward``."""
    data = topology.coordinates(rank).data
    counts = TokenCounts(weight=4096.0 + data, trained=4096, tokens=8192)
    checksums = {
        name: 1000 * number + data for number, name in enumerate(("token_ids", "targets", "weights", "adapter"))
    }
    position = frames.Position("gather_objects", "world", 7, 3, "forward_backward(loss='cross_entropy')")
    return frames.encode(position, pickle.dumps(RankReport(None, 4, {"": counts}, checksums)))


def timed(function: Callable[[], T]) -> tuple[T, float]:
    """Return a result, and the shortest of the durations in ms."""
    durations = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = function()
        durations.append(time.perf_counter() - start)
    return result, round(1000 * min(durations), 1)


if __name__ == "__main__":
    main()
