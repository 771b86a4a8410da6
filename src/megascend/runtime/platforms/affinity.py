"""CPU affinity: bind a process to the CPUs of one NUMA node, the one of its device where that is known.

Linux allocates memory on the node that a thread runs on, so binding CPUs also binds memory, and libnuma is not needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")
# sched_setaffinity(0) would bind the calling thread only: each thread has to be bound by its id.
THREADS = Path("/proc/self/task")


@dataclass(frozen=True)
class NodeCpus:
    """The CPUs of NUMA node ``node`` that a process may use."""

    node: int
    cpus: frozenset[int]


def cpus_of(text: str) -> frozenset[int]:
    """Parse a CPU list in the kernel's format, ``0-3,8,10-11``; an empty text is an empty list."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def nodes_with_cpus(folder: Path = NODES) -> dict[int, frozenset[int]]:
    """Return the CPUs of every NUMA node that has CPUs (GB200 GPUs and CXL add memory-only nodes); empty without NUMA."""
    nodes = {}
    for path in folder.glob("node*/cpulist"):
        if (name := re.fullmatch(r"node(\d+)", path.parent.name)) and (
            cpus := cpus_of(path.read_text(encoding="utf-8"))
        ):
            nodes[int(name[1])] = cpus
    return dict(sorted(nodes.items()))


def node_of_device(address: str | None, folder: Path = PCI_DEVICES) -> int | None:
    """Return the NUMA node of a device from its PCI address (``0000:1b:00.0``); None if either is unknown."""
    path = folder / (address or "") / "numa_node"
    if address is None or not path.is_file():
        return None
    node = int(path.read_text(encoding="utf-8"))
    return node if node >= 0 else None  # -1: not reported by the firmware


def choose_node(
    nodes: Mapping[int, Set[int]], allowed: Set[int], local_rank: int, local_size: int, device_node: int | None
) -> NodeCpus | str:
    """Return the node for one of a host's processes, or the reason why it is not bound. Pure.

    ``allowed``: CPUs that the process may use now. If the device's node (``device_node``) is unknown, local ranks are
    distributed evenly over the nodes, in order.
    """
    usable = {node: frozenset(cpus & allowed) for node, cpus in sorted(nodes.items()) if cpus & allowed}
    # A container or a launcher may have restricted the process to one node already.
    if len(usable) < 2:
        return "all CPUs that this process may use are of one NUMA node" if usable else "the kernel shows no NUMA nodes"
    if not 0 <= local_rank < local_size:
        return f"local rank {local_rank} is out of range for {local_size} processes on this host"
    if device_node in usable:
        return NodeCpus(device_node, usable[device_node])
    # Consecutive ranks share a node, as consecutive devices do on most hosts.
    node = list(usable)[local_rank * len(usable) // local_size]
    return NodeCpus(node, usable[node])


def bind(placement: NodeCpus) -> None:
    """Bind all threads of this process to these CPUs; threads started later inherit the binding."""
    for thread in THREADS.iterdir():
        try:
            os.sched_setaffinity(int(thread.name), placement.cpus)
        except ProcessLookupError:  # the thread has ended since the listing
            continue


def bind_to_node(local_rank: int, local_size: int, address: str | None, nodes: Path = NODES) -> str:
    """Bind this process to the NUMA node of the device at PCI ``address``, if known; return a one-line report."""
    if not hasattr(os, "sched_setaffinity"):
        return "affinity: nothing is bound: this system does not support CPU affinity"
    allowed = os.sched_getaffinity(0)
    placement = choose_node(nodes_with_cpus(nodes), allowed, local_rank, local_size, node_of_device(address))
    if isinstance(placement, str):
        return f"affinity: nothing is bound: {placement}"
    bind(placement)
    return f"affinity: all threads run on NUMA node {placement.node}, {len(placement.cpus)} of {len(allowed)} CPUs"
