"""Ranks of several hosts agree on which start they belong to, and a host on whose address nobody can connect is found at once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from megascend.app.run_directory import not_shared
from megascend.diagnostics.diagnosis import PeerStatus, RankRecord, judge
from megascend.distributed.launch import Launch
from megascend.distributed.rendezvous import agree_on_start, gloo_problem
from megascend.errors import CollectiveTimeoutError
from weightwire.liveness import Identity


def start(
    store: dist.Store, ranks: tuple[int, ...], world_size: int, timeout_s: float = 20
) -> dict[int, str | Exception]:
    """What each of ``ranks`` finds, all at once."""
    found: dict[int, str | Exception] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = agree_on_start(store, rank, world_size, timeout_s)
        except CollectiveTimeoutError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_every_start_has_a_name_of_its_own_that_all_ranks_know() -> None:
    store = dist.HashStore()
    names = [set(start(store, (0, 1, 2), 3).values()) for _ in range(3)]
    assert all(len(name) == 1 for name in names)
    assert len(set.union(*names)) == 3


def test_a_rank_of_an_earlier_start_is_not_taken_for_one_of_this() -> None:
    store = dist.HashStore()
    (before,) = set(start(store, (0, 1), 2).values())
    alone = start(store, (0,), 2, timeout_s=0.5)[0]  # rank 1's number of before is still there
    assert isinstance(alone, CollectiveTimeoutError)
    assert "has not come back" in str(alone)
    (after,) = set(start(store, (0, 1), 2).values())
    assert after != before


def test_ranks_that_never_came_are_named() -> None:
    found = start(dist.HashStore(), (0, 2), 4, timeout_s=2.0)
    assert all("2 of 4 ranks did not arrive at start-up" in str(error) for error in found.values())
    assert all("ranks 1, 3" in str(error) for error in found.values())


def test_a_launch_knows_whether_there_are_other_hosts() -> None:
    of_torchrun = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "5"}
    assert Launch.from_environment(of_torchrun | {"LOCAL_WORLD_SIZE": "2"}).several_hosts
    assert not Launch.from_environment(of_torchrun | {"LOCAL_WORLD_SIZE": "4"}).several_hosts
    assert not Launch.from_environment({}).several_hosts


INTERFACES = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.7"], "ib0": ["192.168.3.7"]}


@pytest.mark.parametrize(("leads_to", "said"), [(["127.0.1.1"], "leads to 127.0.1.1"), ([], "leads to no address")])
def test_a_name_that_leads_to_the_loopback_interface_is_refused_with_what_to_set(leads_to, said) -> None:
    problem = gloo_problem({}, "node-a", lambda _: leads_to, lambda: INTERFACES)
    assert problem is not None
    for part in ("node-a", said, "GLOO_SOCKET_IFNAME", "eth0 (10.0.0.7)", "ib0 (192.168.3.7)"):
        assert part in problem
    assert "lo (" not in problem
    assert gloo_problem({"GLOO_SOCKET_IFNAME": "eth0"}, "node-a", lambda _: leads_to, lambda: INTERFACES) is None
    assert gloo_problem({}, "node-a", lambda _: ["10.0.0.7", "127.0.0.1"], lambda: INTERFACES) is None


def test_a_rank_of_another_host_is_named_with_it() -> None:
    def record(host: str) -> RankRecord:
        return RankRecord(process=Identity(host, "", 1, -1) if host else None)

    mine = record("node-a")
    gone = {host: judge(3, mine, PeerStatus(record(host), silent=9.0))[1] for host in ("node-a", "node-b", "")}
    assert gone["node-b"].startswith("rank 3 on node-b is gone")
    assert gone["node-a"].startswith("rank 3 is gone")
    assert gone[""].startswith("rank 3 is gone")


def test_hosts_that_see_another_directory_are_named_with_their_ranks() -> None:
    seen = [("node-a", True), ("node-a", True), ("node-b", False), ("node-b", False)]
    problem = not_shared(Path("/data/run"), seen)
    assert problem is not None
    assert problem.startswith("output: /data/run on node-a (rank 0) is another directory than on node-b (ranks 2, 3)")
    assert not_shared(Path("/data/run"), [(host, True) for host, _ in seen]) is None
