"""Which CPUs a process runs on: those of one NUMA node, its device's where that is known.

Linux gives a process memory of the node that it runs on, so that binding CPUs binds memory, too, and libnuma is not needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")
THREADS = Path("/proc/self/task")


@dataclass(frozen=True)
class NodeCpus:
    """CPUs for a process: those of NUMA node ``node`` that it may use."""

    node: int
    cpus: frozenset[int]


def cpus_of(text: str) -> frozenset[int]:
    """CPUs of a list as the kernel writes it: ``0-3,8,10-11``; none of an empty one."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def nodes_with_cpus(folder: Path = NODES) -> dict[int, frozenset[int]]:
    """Return the CPUs of every NUMA node that has some (GB200 GPUs and CXL add nodes of memory alone); empty without nodes."""
    found = {}
    for path in folder.glob("node*/cpulist"):
        if (name := re.fullmatch(r"node(\d+)", path.parent.name)) and (
            cpus := cpus_of(path.read_text(encoding="utf-8"))
        ):
            found[int(name[1])] = cpus
    return dict(sorted(found.items()))


def node_of_device(address: str | None, folder: Path = PCI_DEVICES) -> int | None:
    """NUMA node of a device from its PCI address (``0000:1b:00.0``); None where neither is known."""
    path = folder / (address or "") / "numa_node"
    if address is None or not path.is_file():
        return None
    node = int(path.read_text(encoding="utf-8"))
    return node if node >= 0 else None  # -1: the firmware does not say


def place(
    nodes: Mapping[int, Set[int]], allowed: Set[int], local_rank: int, local_size: int, device_node: int | None
) -> NodeCpus | str:
    """Return where one of a host's processes runs, or why it stays where it is. Pure.

    ``allowed``: CPUs that the process may use now. Without a device's node (``device_node``), local ranks are dealt out over the
    nodes in order, equally many to each.
    """
    usable = {node: frozenset(cpus & allowed) for node, cpus in sorted(nodes.items()) if cpus & allowed}
    if len(usable) < 2:
        return "all CPUs that this process may use are of one NUMA node" if usable else "the kernel shows no NUMA nodes"
    if not 0 <= local_rank < local_size:
        return f"local rank {local_rank} is none of {local_size} processes on this host"
    if device_node in usable:
        return NodeCpus(device_node, usable[device_node])
    node = list(usable)[local_rank * len(usable) // local_size]
    return NodeCpus(node, usable[node])


def bind(placement: NodeCpus) -> None:
    """Have all threads of this process run on these CPUs; those that it starts later do so by themselves."""
    for thread in THREADS.iterdir():
        try:
            os.sched_setaffinity(int(thread.name), placement.cpus)
        except ProcessLookupError:  # it has ended meanwhile
            continue


def bind_to_node(local_rank: int, local_size: int, address: str | None, nodes: Path = NODES) -> str:
    """Bind this process to the NUMA node of the device at PCI ``address``, if known; return what was done, in a line."""
    if not hasattr(os, "sched_setaffinity"):
        return "affinity: nothing is bound: this system binds no processes to CPUs"
    allowed = os.sched_getaffinity(0)
    found = place(nodes_with_cpus(nodes), allowed, local_rank, local_size, node_of_device(address))
    if isinstance(found, str):
        return f"affinity: nothing is bound: {found}"
    bind(found)
    return f"affinity: all threads run on NUMA node {found.node}, {len(found.cpus)} of {len(allowed)} CPUs"
