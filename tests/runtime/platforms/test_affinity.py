"""NUMA affinity: CPUs from trees like the kernel's, and binding of real threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from megascend.runtime.platforms.affinity import (
    NODES,
    NodeCpus,
    bind_to_node,
    choose_node,
    node_of_device,
    nodes_with_cpus,
)
from megascend.testing import run_distributed
from support.forked_programs import run_forked

TWO_SOCKETS = {0: frozenset(range(32)), 1: frozenset(range(32, 64))}


def tree(folder: Path, *lists: str) -> Path:
    """Write a folder like /sys/devices/system/node, with the CPUs of each node and other files."""
    for number, cpus in enumerate(lists):
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
    (folder / "has_cpu").write_text("0-1\n")
    return folder


def dealt(nodes: dict[int, frozenset[int]], size: int) -> list[int]:
    all_cpus = frozenset().union(*nodes.values())
    placements = [choose_node(nodes, all_cpus, rank, size, None) for rank in range(size)]
    assert all(isinstance(placement, NodeCpus) and placement.cpus == nodes[placement.node] for placement in placements)
    return [placement.node for placement in placements if isinstance(placement, NodeCpus)]


def test_processes_are_dealt_out_over_nodes_in_order():
    assert dealt(TWO_SOCKETS, 8) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert dealt(TWO_SOCKETS, 3) == [0, 0, 1]
    assert dealt(TWO_SOCKETS, 1) == [0]


def test_memory_only_nodes_are_not_counted(tmp_path):
    """Build a GB200 host: two nodes with CPUs, and 32 of its GPUs' memory without any."""
    nodes = nodes_with_cpus(tree(tmp_path, "0-71", "72-143", *[""] * 32))
    assert list(nodes) == [0, 1]
    assert dealt(nodes, 4) == [0, 0, 1, 1]
    cpus = nodes[0] | nodes[1]
    assert choose_node(nodes, cpus, 3, 4, device_node=10) == NodeCpus(1, nodes[1])  # its memory, which has no CPUs


def test_device_node_precedes_the_rank_order(tmp_path):
    (tmp_path / "0000:1b:00.0").mkdir()
    file = tmp_path / "0000:1b:00.0" / "numa_node"
    file.write_text("1\n")
    assert node_of_device("0000:1b:00.0", tmp_path) == 1
    assert choose_node(TWO_SOCKETS, frozenset(range(64)), 0, 8, 1) == NodeCpus(1, TWO_SOCKETS[1])
    file.write_text("-1\n")
    assert node_of_device("0000:1b:00.0", tmp_path) is None
    assert node_of_device("0000:aa:00.0", tmp_path) is None
    assert node_of_device(None, tmp_path) is None


def test_existing_cpu_affinity_is_respected():
    placement = choose_node(TWO_SOCKETS, frozenset({3, 40, 41}), 1, 2, None)
    assert placement == NodeCpus(1, frozenset({40, 41}))
    assert "of one NUMA node" in str(choose_node(TWO_SOCKETS, frozenset({40, 41}), 0, 2, None))


def test_all_threads_of_real_processes_move(tmp_path):
    """Treat two CPUs of this machine as nodes, then use the machine's own tree."""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("this process may use one CPU only")
    folder = tree(tmp_path, *map(str, cpus))

    def on_rank() -> tuple[str, list[set[int]]]:
        rank, go = int(os.environ["LOCAL_RANK"]), threading.Event()
        older: list[set[int]] = []

        def look() -> None:
            go.wait(30)
            older.append(os.sched_getaffinity(0))

        thread = threading.Thread(target=look)
        thread.start()
        line = bind_to_node(rank, 2, None, folder)
        go.set()
        thread.join(30)
        return line, [*older, os.sched_getaffinity(0)]

    for rank, (line, affinities) in enumerate(run_distributed(on_rank, 2, init=False)):
        assert f"NUMA node {rank}, 1 of" in line
        assert affinities == [{cpus[rank]}] * 2
    if NODES.is_dir():
        nodes = nodes_with_cpus()
        assert os.sched_getaffinity(0) <= frozenset().union(*nodes.values())


def test_the_bootstrap_binds_where_it_is_asked_to():
    program = """
import os
import megascend
runtime = megascend.bootstrap("cpu", engine="single", affinity="numa")
print([line for line in runtime.changes if line.startswith("affinity: ")])
assert megascend.bootstrap() is runtime
try:
    megascend.bootstrap(affinity="none")
except megascend.errors.ConfigError as error:
    print(error)
"""
    completed = run_forked(program)
    assert completed.returncode == 0, completed.stderr[-3000:]
    line, refusal = completed.stdout.splitlines()
    assert line.startswith("['affinity: ")
    assert "bootstrapped with affinity='numa'; it cannot become 'none'" in refusal
