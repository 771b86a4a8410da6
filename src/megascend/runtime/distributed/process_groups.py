"""Create the process groups of a run: torch's default group, the engine's groups, and Gloo channels for objects.

Creating them is collective: every rank calls :func:`initialize` with the same topology.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from megascend.errors import CollectiveTimeoutError, ProcessGroupError, TopologyError
from megascend.runtime.diagnostics.hang_monitor import HangMonitor
from megascend.runtime.distributed.channels import RELAYED_ABOVE, Channel
from megascend.runtime.distributed.engine_groups import GroupFactory, PlainGroups
from megascend.runtime.distributed.groups import OBJECT_GROUPS, ProcessGroups
from megascend.runtime.distributed.launch import Launch, reconnect
from megascend.runtime.distributed.object_redirect import ObjectCollectiveRedirect
from megascend.runtime.distributed.rendezvous import (
    addresses_of,
    agree_on_start,
    did_not_arrive,
    gloo_problem,
    interfaces_here,
    wait_for_all,
)
from megascend.runtime.topology.topology import GROUP_AXES, Topology, axes_of, rank_lists
from megascend.surroundings import open_file_limit

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megascend.runtime.platforms.base import Platform

LAZY_CONNECTIONS_ABOVE = RELAYED_ABOVE
"""Ranks above which Gloo connects two ranks when they first communicate. Below, each rank stores an address for every other, and
reads all of them: 8 n^3 bytes for a group of n ranks, 134 MB for 256 and 9 GB for 1024."""
WORLD_GROUPS = 3
"""Further Gloo groups of all ranks, created on demand: two for checkpoints, one for another thread."""
OTHER_FILES = 256
"""Open files and sockets of a rank besides those of Gloo groups: the store, data, logs, libraries, devices."""


def initialize(
    topology: Topology,
    platform: Platform,
    timeout_s: float = 600,
    launch: Launch | None = None,
    factory: GroupFactory | None = None,
) -> ProcessGroups:
    """Create all groups of ``topology`` on the platform's backend.

    A process without launcher variables is a world of one and needs no network. A default group that the trainer has already
    created is used, and not destroyed by :meth:`ProcessGroups.destroy`.

    Args:
        timeout_s: timeout of the start-up and of every later collective, in seconds.
        launch: rank, world size and store; default: read from the environment.
        factory: creates the engine's groups; default: plain ones.

    Raises:
        TopologyError: the number of processes started is not the topology's; nothing has been created.
        CollectiveTimeoutError: ranks did not arrive in time, or were lost; the message names them.
        ProcessGroupError: the default group that exists is on another backend, or the engine's groups cannot be created.
    """
    launch = _adopted_launch() if dist.is_initialized() else launch or Launch.from_environment()
    if launch.world_size != topology.world_size:
        raise TopologyError(
            f"rank {launch.rank}: the topology is for {topology.world_size} ranks, but {launch.world_size} "
            f"were started (WORLD_SIZE); start {topology.world_size} processes or plan for {launch.world_size}"
        )
    _check_open_files(topology, launch.rank, platform)
    if topology.world_size > LAZY_CONNECTIONS_ABOVE:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # torch has no argument for it
    # Selects the device before any group exists: NCCL and HCCL create their communicators on the current device.
    device = platform.device(launch.local_rank)
    owns_default = not dist.is_initialized()
    if not owns_default:
        _require_backend(platform)
    store, own_connection = (_open if owns_default else _adopted_store)(launch, timeout_s)
    # Before the groups, so that an error of the start-up can already name the ranks that are missing.
    monitor = HangMonitor(
        launch.rank,
        launch.world_size,
        timeout_s,
        own_connection,
        attempt=launch.attempt,
        waits_on_host=platform.backend == "gloo",
    )
    factory = factory or PlainGroups()
    groups = ProcessGroups(topology, launch, device, timeout_s, monitor, owns_default, factory)
    try:
        with monitor.phase("start-up"):
            if owns_default:
                _join(groups, store, platform)
            _check_binding(platform)
            engine_groups = factory.create(topology, launch.rank, timeout_s)
            groups.add(engine_groups.device, _create_channels(groups, engine_groups.cpu))
            # All must be connected before any rank leaves, even with an error: to a rank still connecting it would seem lost.
            if launch.world_size > 1:
                dist.barrier(groups.channel("world").group)
            _check_ranks(groups, engine_groups.device, factory)
            _redirect_objects(groups)
            # Last: by now the engine's libraries have created all their groups.
            groups.limit_timeouts()
    # KeyboardInterrupt too: a default group left behind would be adopted by the next initialize() of this process.
    except BaseException:
        monitor.close()
        groups.cleanup.close()
        factory.forget(destroy=not owns_default)
        if owns_default and dist.is_initialized():
            dist.destroy_process_group()
        raise
    return groups


def gloo_sockets(topology: Topology, rank: int, *, device_groups: bool) -> int:
    """Count the sockets of a rank's Gloo groups: one to each member that it communicates with, and one that listens. Pure.

    Args:
        device_groups: the groups for tensors are on Gloo, too.
    """
    object_groups, axis_groups = (
        {tuple(topology.group_of(rank, *axes_of(name))) for name in names} for names in (OBJECT_GROUPS, GROUP_AXES)
    )
    total = sum(object_group_sockets(rank, ranks) for ranks in object_groups)
    total += WORLD_GROUPS * object_group_sockets(rank, range(topology.world_size))
    if device_groups:
        total += sum(len(ranks) for ranks in axis_groups if len(ranks) > 1)
    return total


def object_group_sockets(rank: int, ranks: Sequence[int]) -> int:
    """Count the sockets of a rank's Gloo group that carries objects. Pure."""
    size = len(ranks)
    if size == 1:
        return 0
    # The first rank collects objects that do not fit into frames from each of the others.
    if size <= LAZY_CONNECTIONS_ABOVE or rank == ranks[0]:
        return size
    # Barriers, relayed frames, rings and trees connect a rank to those 2^k before and after it; one more is the first rank.
    return min(size, 2 * (size - 1).bit_length() + 2)


def _check_open_files(topology: Topology, rank: int, platform: Platform) -> None:
    """Raise this process's limit of open files to what the groups need, or ProcessGroupError if the host forbids it."""
    if topology.world_size == 1:
        return
    required = gloo_sockets(topology, rank, device_groups=platform.backend == "gloo") + OTHER_FILES
    limit = open_file_limit(required)
    if limit < required:
        raise ProcessGroupError(
            f"rank {rank}: in a world of {topology.world_size} ranks a process has up to {required} open files and sockets, and "
            f"{socket.gethostname()} allows {limit} (ulimit -Hn): raise the hard limit"
        )


def _open(launch: Launch, timeout_s: float) -> tuple[dist.Store, dist.Store | None]:
    """Open the store of this world, and a second connection to it for the monitor."""
    start = None
    if launch.several_hosts:
        host = socket.gethostname()
        if problem := gloo_problem(os.environ, host, addresses_of, interfaces_here):
            raise ProcessGroupError(f"rank {launch.rank} on {host}: {problem}")
        starts = launch.store(timeout_s, "starts")  # open until the next one is: keeps rank 0's server alive
        start = "start-" + agree_on_start(starts, launch.rank, launch.world_size, timeout_s)
    opened = launch.store(timeout_s, start)
    # Numbered, because an earlier group may have left keys in the same store (after destroy()).
    prefix = f"megascend/{opened.add(f'megascend/times/{launch.rank}', 1)}"
    # A store serializes the requests of a connection: a wait of the main thread would block the monitor's on the same one.
    second = dist.PrefixStore(prefix, launch.store(timeout_s, start)) if launch.world_size > 1 else None
    return dist.PrefixStore(prefix, opened), second


def _join(groups: ProcessGroups, store: dist.Store, platform: Platform) -> None:
    """Wait for all ranks at the store, then create the default group."""
    launch, timeout_s = groups.launch, groups.timeout_s
    # init_process_group waits too, but its error does not name the ranks that are missing.
    missing = wait_for_all(store, launch.rank, launch.world_size, timeout_s)
    if missing:
        headline = did_not_arrive(launch.rank, "start-up", missing, launch.world_size, timeout_s)
        raise groups.monitor.explain(CollectiveTimeoutError(headline), headline, suspects=missing)
    dist.init_process_group(
        platform.backend,
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout_s),
        # With a device NCCL creates its communicators eagerly; a single rank needs none. Not for HCCL: Gloo subgroups would
        # inherit the device and fail.
        device_id=groups.device if platform.bind_device and launch.world_size > 1 else None,
    )


def _adopted_launch() -> Launch:
    from_launcher = Launch.from_environment()
    rank = dist.get_rank()
    same_world = from_launcher.world_size == dist.get_world_size()
    return Launch(
        rank=rank,
        # The trainer created the group: the launcher's variables apply only if they describe the same world.
        local_rank=from_launcher.local_rank if same_world else rank,
        world_size=dist.get_world_size(),
        attempt=from_launcher.attempt,
    )


def _require_backend(platform: Platform) -> None:
    default_backend = dist.get_backend()
    backend = backend_for(default_backend, platform.device_type)
    if backend != platform.backend:
        raise ProcessGroupError(
            f"the default process group that exists already is on {default_backend}, but platform {platform.name} "
            f"communicates over {platform.backend}; let megascend create it, or create it with {platform.backend}"
        )


def backend_for(backend: str, device_type: str) -> str | None:
    """Return the part of a backend, ``nccl`` or ``cpu:gloo,cuda:nccl``, that serves tensors of a device. Pure."""
    if ":" not in backend:
        return backend
    # torch's form for a backend per device type: "cpu:gloo,cuda:nccl".
    return dict(entry.split(":", 1) for entry in backend.split(",")).get(device_type)


def _adopted_store(launch: Launch, timeout_s: float) -> tuple[dist.Store, dist.Store | None]:
    """Return the default group's store, and a second connection to it for the monitor; None if the store allows none."""
    default = dist.distributed_c10d._get_default_store()
    # As in _open(): a second set of groups in the same store must not read the keys of the first.
    times = default.add(f"megascend/times/{launch.rank}", 1)
    store = dist.PrefixStore(f"megascend/adopted/{times}", default)
    if launch.world_size == 1:
        return store, None
    second = reconnect(store, timeout_s)
    if second is None:
        logging.getLogger(__name__).warning(
            f"rank {launch.rank}: the default process group's store, a {type(default).__name__}, allows no second "
            "connection: errors of collectives will not name the ranks to blame"
        )
        return store, None
    # The second connection lacks the prefixes that torch put in front of the store: rank 0 chooses a new one for all.
    if launch.rank == 0:
        store.set("monitor", secrets.token_hex(8))
    return store, dist.PrefixStore(f"megascend/monitor/{store.get('monitor').decode()}", second)


def _check_binding(platform: Platform) -> None:
    bound = getattr(dist.distributed_c10d._get_default_group(), "bound_device_id", None)
    if bound is not None and not platform.bind_device:
        raise ProcessGroupError(
            f"the default process group is bound to {bound}, which Gloo groups on platform {platform.name} would "
            "inherit; call init_process_group without device_id"
        )


def _check_ranks(groups: ProcessGroups, device_groups: dict[str, ProcessGroup], factory: GroupFactory) -> None:
    """Raise ProcessGroupError unless every group of the engine has the ranks that the topology gives it."""
    for name, group in device_groups.items():
        actual, expected = dist.get_process_group_ranks(group), groups.ranks(name)
        if actual != expected:
            raise ProcessGroupError(
                f"rank {groups.rank}: {type(factory).__name__} created group {name} with ranks {actual}, the topology has "
                f"{expected}; check patches to the engine's library"
            )


def _create_channels(groups: ProcessGroups, cpu_groups: dict[str, ProcessGroup]) -> dict[str, Channel]:
    """Create a channel for every distinct set of ranks, in the same order on all ranks; return them by the names of groups.

    Args:
        cpu_groups: existing groups on Gloo, by name; the same names on all ranks.
    """
    timeout = timedelta(seconds=groups.timeout_s)
    # Reversed: of several names with the same ranks, the first one's group counts, as in rank_lists().
    gloo_groups = {tuple(groups.ranks(name)): cpu_groups[name] for name in reversed(cpu_groups)}
    existing = rank_lists(groups.topology, cpu_groups)
    for ranks, name in rank_lists(groups.topology, OBJECT_GROUPS).items():
        if ranks not in existing:
            # On all ranks, members or not: new_group is collective over the world.
            group = dist.new_group([*ranks], timeout=timeout, backend="gloo", group_desc=f"{name.upper()}_OBJECTS")
            if groups.rank in ranks:
                gloo_groups[ranks] = group  # type: ignore[reportArgumentType]
                groups.register(group)  # type: ignore[reportArgumentType]
    channels: dict[tuple[int, ...], Channel] = {}
    for name in OBJECT_GROUPS:
        ranks = tuple(groups.ranks(name))
        if ranks not in channels:
            channels[ranks] = Channel(name, ranks, groups.rank, gloo_groups.get(ranks), groups.timeout_s)
    return {name: channels[tuple(groups.ranks(name))] for name in OBJECT_GROUPS}


def _redirect_objects(groups: ProcessGroups) -> None:
    """Redirect upstream's object collectives away from the device groups, unless those are on Gloo anyway."""
    if dist.get_backend(groups.device_group("world")) != "gloo":
        ObjectCollectiveRedirect(groups).install()
