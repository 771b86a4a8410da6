"""Process groups of real ranks: members, ownership, and missing ranks."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascend.config import Parallel
from megascend.errors import (
    CollectiveTimeoutError,
    PeerLostError,
    ProcessGroupError,
    TopologyError,
)
from megascend.runtime.bootstrap.runtime import Runtime
from megascend.runtime.distributed import process_groups
from megascend.runtime.distributed.engine_groups import PlainGroups
from megascend.runtime.distributed.launch import Launch
from megascend.runtime.distributed.objects import all_reduce_numbers, gather_objects
from megascend.runtime.distributed.process_groups import (
    OBJECT_GROUPS,
    OTHER_FILES,
    WORLD_GROUPS,
    backend_for,
    gloo_sockets,
    initialize,
)
from megascend.runtime.topology.topology import plan
from megascend.testing import run_distributed

pytestmark = pytest.mark.waiting


def open_groups(runtime: Runtime, world: int, timeout_s: float = 30, **parallel: Any) -> process_groups.ProcessGroups:
    return initialize(plan(Parallel(**parallel), world), runtime.platform, timeout_s)


def test_one_process_needs_no_variables_and_can_initialize_again(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "MEGASCEND_STORE"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        groups = open_groups(runtime, 1)
        try:
            assert groups.ranks("dp_cp") == [0]
            assert groups.coordinates.data == 0
        finally:
            groups.destroy()
        groups.destroy()
        with pytest.raises(ProcessGroupError, match="no channel for objects 'dp': these process groups were destroyed"):
            groups.channel("dp")


def test_ranks_can_initialize_again_with_another_layout(runtime: Runtime) -> None:
    def twice() -> list[list[int]]:
        results = []
        for parallel in ({"tensor": 2}, {"pipeline": 2}):
            groups = open_groups(runtime, 2, **parallel)
            (value,) = all_reduce_numbers([1.0], "tp", groups)
            results.append([int(value), groups.ranks("dp")[0]])
            groups.destroy()
        return results

    assert run_distributed(twice, 2, init=False) == [[[2, 0], [1, 0]], [[2, 1], [1, 1]]]


def test_existing_default_group_is_adopted_and_not_destroyed(runtime: Runtime) -> None:
    def adopt() -> tuple[list[int], bool]:
        groups = open_groups(runtime, 2)
        ranks = groups.ranks("dp")
        groups.destroy()
        return ranks, dist.is_initialized()

    assert run_distributed(adopt, 2) == [([0, 1], True)] * 2


def test_wrong_world_size_raises_before_groups_are_created(runtime: Runtime) -> None:
    def start() -> None:
        with pytest.raises(TopologyError, match=r"for 4 ranks, but 2 were started \(WORLD_SIZE\); start 4 processes"):
            open_groups(runtime, 4)
        assert not dist.is_initialized()

    run_distributed(start, 2, init=False)


def open_sockets() -> int:
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.path.lexists(link) and os.readlink(link).startswith("socket:") for link in links)


def test_large_world_connects_ranks_when_they_communicate(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "LAZY_CONNECTIONS_ABOVE", 3)

    def start() -> tuple[int, int, int, list[float]]:
        inherited = open_sockets()  # a rank is a fork
        groups = open_groups(runtime, 4)
        opened = open_sockets() - inherited
        totals = all_reduce_numbers([groups.rank], "world", groups)
        dist.all_reduce(torch.ones(1), group=groups.device_group("dp"))
        connected = open_sockets() - inherited
        dist.barrier()  # a peer that ends would close its side
        groups.destroy()
        return opened, connected, gloo_sockets(groups.topology, groups.rank, device_groups=True), totals

    for opened, connected, bound, totals in run_distributed(start, 4, init=False):
        assert opened < connected <= bound
        assert totals == [6.0]


def with_limits(runtime: Runtime, soft: int, hard: int) -> list[str]:
    """Start two ranks under limits of open files; return what each is told, or its limit afterwards."""

    def start() -> str:
        # Less than what is open already: the first group would fail with "Too many open files".
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft or len(os.listdir("/proc/self/fd")) - 1, hard))
        try:
            initialize(plan(Parallel(), 2), runtime.platform, 60).destroy()
        except ProcessGroupError as error:
            return str(error)
        return str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    return run_distributed(start, 2, init=False)


def test_limit_of_open_files_is_raised_as_far_as_needed(runtime: Runtime) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert with_limits(runtime, 0, hard) == [str((WORLD_GROUPS + 2) * 2 + OTHER_FILES)] * 2


def test_hard_limit_of_open_files_is_named_before_groups_are_created(runtime: Runtime) -> None:
    for rank, message in enumerate(with_limits(runtime, 200, 200)):
        assert message.startswith(f"rank {rank}: in a world of 2 ranks a process has up to 266 open files and sockets")
        assert "allows 200 (ulimit -Hn)" in message


def test_missing_ranks_are_named_within_the_timeout(runtime: Runtime) -> None:
    def late() -> tuple[str, float]:
        start = time.monotonic()
        if os.environ["RANK"] in ("1", "3"):
            return "", 0.0
        with pytest.raises(CollectiveTimeoutError) as caught:
            open_groups(runtime, 4, timeout_s=4.0)
        assert not dist.is_initialized()
        return str(caught.value), time.monotonic() - start

    results = run_distributed(late, 4, init=False, timeout_s=120)
    for rank in (0, 2):
        message, seconds = results[rank]
        assert f"rank {rank}: 2 of 4 ranks did not arrive at start-up within 4 s: ranks 1, 3." in message
        assert 3.9 < seconds < 60


def gloo_as_device_backend(*arguments: Any) -> Any:
    """Create Gloo in place of NCCL, for a backend of another name."""
    store, rank, size, timeout = arguments
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def test_a_device_backend_carries_no_objects(runtime: Runtime) -> None:
    """Open extra Gloo groups for objects if the backend, here an alias of Gloo in place of NCCL, is not named gloo."""

    class DevicePlatform(type(runtime.platform)):
        backend = "pretend"

    def start() -> None:
        dist.Backend.register_backend("pretend", gloo_as_device_backend, devices=["cpu"])
        groups = initialize(plan(Parallel(tensor=2), 2), DevicePlatform(), 30)
        assert dist.get_backend(groups.device_group("tp")) == "pretend"
        for name in OBJECT_GROUPS:
            assert groups.channel(name).ranks == groups.ranks(name)
            group = groups.channel(name).group
            if group is not None:
                assert dist.get_backend(group) == "gloo"
                assert dist.get_process_group_ranks(group) == groups.ranks(name)
        groups.destroy()

    run_distributed(start, 2, init=False)


def test_failed_start_restores_the_functions_for_objects(runtime: Runtime) -> None:
    """Let a start on a device backend fail in its last step; object collectives of other groups then work as before it."""

    device_platform: Any = type("DevicePlatform", (type(runtime.platform),), {"backend": "pretend"})

    class Fails(PlainGroups):
        def limit_timeouts(self, timeout_s: float) -> None:
            raise ProcessGroupError("no timeouts, on purpose")

    def start() -> list[Any]:
        dist.Backend.register_backend("pretend", gloo_as_device_backend, devices=["cpu"])
        function = dist.all_gather_object
        with pytest.raises(ProcessGroupError, match="no timeouts"):
            initialize(plan(Parallel(), 2), device_platform(), 30, factory=Fails())
        assert dist.all_gather_object is function
        groups, gathered = open_groups(runtime, 2), [None, None]
        dist.all_gather_object(gathered, groups.rank)
        groups.destroy()
        return gathered

    assert run_distributed(start, 2, init=False) == [[0, 1]] * 2


def test_an_existing_group_on_another_backend_is_refused(runtime: Runtime) -> None:
    class DevicePlatform(type(runtime.platform)):
        backend = "pretend"

    def start() -> None:
        with pytest.raises(ProcessGroupError, match="exists already is on gloo, but platform cpu commun"):
            initialize(plan(Parallel(), 1), DevicePlatform(), 30)

    run_distributed(start, 1)


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [
        ("nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
        ("cpu:gloo,npu:hccl", "cuda", None),
    ],
)
def test_the_backend_of_an_existing_group_for_a_device(backend: str, device: str, expected: str | None) -> None:
    """Select the backend for a device from strings such as verl's ``cpu:gloo,cuda:nccl``."""
    assert backend_for(backend, device) == expected


def test_an_existing_group_with_a_backend_for_each_device_is_adopted(runtime: Runtime, tmp_path: Path) -> None:
    def start() -> float:
        launch = Launch.from_environment()
        store = dist.FileStore(str(tmp_path / "store"), launch.world_size)
        dist.init_process_group("cpu:gloo", store=store, rank=launch.rank, world_size=launch.world_size)
        assert dist.get_backend() == "cpu:gloo"
        groups = initialize(plan(Parallel(), 2), runtime.platform, 30)
        total = torch.ones(1)
        dist.all_reduce(total, group=groups.device_group("world"))
        groups.destroy()
        dist.destroy_process_group()
        return float(total)

    assert run_distributed(start, 2, init=False) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "of RANK and WORLD_SIZE only RANK is set"),
        ({"WORLD_SIZE": "2"}, "only WORLD_SIZE is set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is outside WORLD_SIZE=2"),
        ({"RANK": "a", "WORLD_SIZE": "2"}, "RANK='a' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}, "without MASTER_PORT"),
    ],
)
def test_incomplete_launcher_variables_raise_process_group_error(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ProcessGroupError, match=message):
        Launch.from_environment(environment)


def test_launch_from_environment() -> None:
    assert Launch.from_environment({}) == Launch()
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "5"}
    assert Launch.from_environment(torchrun) == Launch(3, 1, 4, None, ("h", 5), False, local_size=4)
    assert Launch.from_environment(torchrun | {"LOCAL_WORLD_SIZE": "2"}).local_size == 2
    agent = Launch.from_environment(torchrun | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent.agent_store
    assert Launch.from_environment(torchrun | {"TORCHELASTIC_RESTART_COUNT": "2"}).attempt == 2


def test_attempts_have_separate_store_keys(tmp_path: Any) -> None:
    first, second = (Launch(world_size=2, store_path=str(tmp_path / "store"), attempt=attempt) for attempt in (0, 1))
    assert [first.store(5).add("times", 1), first.store(5).add("times", 1), second.store(5).add("times", 1)] == [
        1,
        2,
        1,
    ]


def test_unreachable_store_raises_collective_timeout_error() -> None:
    import socket

    with socket.socket() as bound:  # bound, not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        launch = Launch(rank=1, local_rank=1, world_size=2, master=("127.0.0.1", bound.getsockname()[1]))
        with pytest.raises(CollectiveTimeoutError, match=r"rank 1: no store answers at .*rank 0 has not started"):
            launch.store(1.0)


def test_rank_that_leaves_is_noticed_although_its_connections_stay(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As NCCL does, whose groups are destroyed only together with the other ranks of the host.
    destroy = dist.destroy_process_group

    def destroy_together(*arguments: Any) -> None:
        (tmp_path / str(dist.get_rank())).touch()
        until = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < until, "the other rank waits for one that left"
            time.sleep(0.01)
        destroy(*arguments)

    def leave_or_wait() -> str:
        monkeypatch.setattr(dist, "destroy_process_group", destroy_together)
        groups = open_groups(runtime, 2, timeout_s=120)
        gather_objects(0, "world", groups)
        message = ""
        if groups.rank == 1:
            with pytest.raises(PeerLostError) as caught:
                gather_objects(0, "world", groups, purpose="step 7")
            message = str(caught.value)
        groups.destroy()
        return message

    message = run_distributed(leave_or_wait, 2, init=False, timeout_s=90)[1]
    assert message.startswith(
        "rank 1: gather_objects for step 7 cannot complete without rank 0. Look at the first error in the logs"
    )
    assert "Rank 0 has ended: it left its process groups after gather_objects" in message


def test_failed_rank_does_not_wait_for_others_to_destroy_their_groups(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> str:
        groups = open_groups(runtime, 1)
        destroy = dist.destroy_process_group
        released = threading.Event()
        monkeypatch.setattr(dist, "destroy_process_group", lambda: released.wait() and destroy())
        groups.destroy(0.05)
        released.set()
        return caplog.text

    (log,) = run_distributed(fail, 1, init=False)
    assert "rank 0: its process groups were not destroyed within 0.05 s, since other ranks have not left theirs" in log
