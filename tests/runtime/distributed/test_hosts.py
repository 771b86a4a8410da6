"""Ranks of several hosts agree on their start, and a host with an unreachable address is detected at once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from megascend.apps.train.run_directory import not_shared
from megascend.errors import CollectiveTimeoutError
from megascend.runtime.diagnostics.diagnosis import PeerStatus, RankRecord, judge
from megascend.runtime.distributed.launch import Launch
from megascend.runtime.distributed.rendezvous import agree_on_start, gloo_problem
from weightwire.liveness import Identity

pytestmark = pytest.mark.waiting


def start(
    store: dist.Store, ranks: tuple[int, ...], world_size: int, timeout_s: float = 20
) -> dict[int, str | Exception]:
    """Run ``agree_on_start`` for several ranks in threads; return their results by rank."""
    results: dict[int, str | Exception] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = agree_on_start(store, rank, world_size, timeout_s)
        except CollectiveTimeoutError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_every_start_has_a_unique_name_shared_by_all_ranks() -> None:
    store = dist.HashStore()
    names = [set(start(store, (0, 1, 2), 3).values()) for _ in range(3)]
    assert all(len(name) == 1 for name in names)
    assert len(set.union(*names)) == 3


def test_rank_of_an_earlier_start_does_not_count() -> None:
    store = dist.HashStore()
    (before,) = set(start(store, (0, 1), 2).values())
    error = start(store, (0,), 2, timeout_s=0.5)[0]  # rank 1's key of the previous start is still in the store
    assert isinstance(error, CollectiveTimeoutError)
    assert "has not restarted" in str(error)
    (after,) = set(start(store, (0, 1), 2).values())
    assert after != before


def test_missing_ranks_are_named() -> None:
    errors = start(dist.HashStore(), (0, 2), 4, timeout_s=2.0)
    assert all("2 of 4 ranks did not arrive at start-up" in str(error) for error in errors.values())
    assert all("ranks 1, 3" in str(error) for error in errors.values())


def test_launch_detects_several_hosts() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "5"}
    assert Launch.from_environment(torchrun | {"LOCAL_WORLD_SIZE": "2"}).several_hosts
    assert not Launch.from_environment(torchrun | {"LOCAL_WORLD_SIZE": "4"}).several_hosts
    assert not Launch.from_environment({}).several_hosts


INTERFACES = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.7"], "ib0": ["192.168.3.7"]}


@pytest.mark.parametrize(("leads_to", "reason"), [(["127.0.1.1"], "leads to 127.0.1.1"), ([], "leads to no address")])
def test_loopback_host_name_is_refused_with_the_setting(leads_to, reason) -> None:
    problem = gloo_problem({}, "node-a", lambda _: leads_to, lambda: INTERFACES)
    assert problem is not None
    for part in ("node-a", reason, "GLOO_SOCKET_IFNAME", "eth0 (10.0.0.7)", "ib0 (192.168.3.7)"):
        assert part in problem
    assert "lo (" not in problem
    assert gloo_problem({"GLOO_SOCKET_IFNAME": "eth0"}, "node-a", lambda _: leads_to, lambda: INTERFACES) is None
    assert gloo_problem({}, "node-a", lambda _: ["10.0.0.7", "127.0.0.1"], lambda: INTERFACES) is None


def test_rank_of_another_host_is_named_with_the_host() -> None:
    def record(host: str) -> RankRecord:
        return RankRecord(process=Identity(host, "", 1, -1) if host else None)

    local = record("node-a")
    reasons = {host: judge(3, local, PeerStatus(record(host), silent=9.0))[1] for host in ("node-a", "node-b", "")}
    assert reasons["node-b"].startswith("rank 3 on node-b is gone")
    assert reasons["node-a"].startswith("rank 3 is gone")
    assert reasons[""].startswith("rank 3 is gone")


def test_hosts_with_another_directory_are_named_with_their_ranks() -> None:
    observed = [("node-a", True), ("node-a", True), ("node-b", False), ("node-b", False)]
    problem = not_shared(Path("/data/run"), observed)
    assert problem is not None
    assert problem.startswith("output: /data/run on node-a (rank 0) is another directory than on node-b (ranks 2, 3)")
    assert not_shared(Path("/data/run"), [(host, True) for host, _ in observed]) is None
