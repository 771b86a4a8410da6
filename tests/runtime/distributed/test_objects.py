"""Object collectives: values, refusal of other backends than Gloo, and errors that name missing ranks."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

from megascend.config import Parallel
from megascend.errors import CollectiveTimeoutError, DataError, PeerLostError, ProcessGroupError
from megascend.runtime.bootstrap.runtime import Runtime
from megascend.runtime.distributed.channels import Channel
from megascend.runtime.distributed.groups import OBJECT_GROUPS
from megascend.runtime.distributed.objects import (
    agree,
    all_reduce_numbers,
    broadcast_object,
    from_rank_0,
    gather_objects,
    raise_on_all_ranks,
)
from megascend.runtime.distributed.process_groups import ProcessGroups, initialize
from megascend.runtime.topology.topology import plan
from megascend.testing import Lost, run_distributed

pytestmark = pytest.mark.waiting

NEVER_S = 3600.0
"""Longer than any deadline here: a wait of this length fails the test."""


@pytest.fixture
def groups_of_two_by_two(runtime: Runtime):
    """Return a function that opens groups with a timeout; start-up gets at least 60 s for busy machines."""
    topology = plan(Parallel(tensor=2, context=2), 4)

    def make_groups(timeout_s: float = 30.0) -> ProcessGroups:
        groups = initialize(topology, runtime.platform, max(timeout_s, 60.0))
        for name in OBJECT_GROUPS:
            groups.channel(name).timeout_s = timeout_s
        return groups

    return make_groups


def test_collectives_return_expected_values(groups_of_two_by_two) -> None:
    def work() -> tuple[object, ...]:
        groups: ProcessGroups = groups_of_two_by_two()
        return (
            gather_objects({"rank": groups.rank}, "tp", groups),
            gather_objects("x" * groups.rank, "dp_cp", groups),
            broadcast_object(f"from {groups.rank}", "cp", groups, source=1),
            all_reduce_numbers([float(groups.rank), 0.1], "world", groups),
            all_reduce_numbers([float(groups.rank)], "tp", groups, op="max"),
            all_reduce_numbers([2.0**53 + 2 * groups.rank], "tp", groups, op="min"),
            all_reduce_numbers([], "world", groups),
        )

    results = run_distributed(work, 4, init=False)
    tenth = pytest.approx(0.4, abs=1e-15)  # float32 would be off by 1e-9 and more
    assert results[1] == (
        [{"rank": 0}, {"rank": 1}],
        ["x", "xxx"],
        "from 3",
        [6.0, tenth],
        [1.0],
        [2.0**53],
        [],
    )
    assert results[2][:3] == ([{"rank": 2}, {"rank": 3}], ["", "xx"], "from 2")
    assert results[2][5] == [2.0**53 + 4]


def test_missing_ranks_are_named(groups_of_two_by_two) -> None:
    def work() -> str:
        groups: ProcessGroups = groups_of_two_by_two(4.0)
        assert gather_objects(groups.rank, "world", groups) == [0, 1, 2, 3]
        if groups.rank == 2:
            time.sleep(NEVER_S)
        with pytest.raises(CollectiveTimeoutError) as caught:
            gather_objects(groups.rank, "world", groups)
        return str(caught.value)

    results = run_distributed(work, 4, init=False, expect_lost={2})
    for rank in (0, 1, 3):
        message = results[rank]
        assert message.startswith(f"rank {rank}: 1 of 4 ranks did not arrive at gather_objects within 4 s: rank 2."), (
            message
        )


def test_error_of_one_rank_is_raised_on_all(groups_of_two_by_two) -> None:
    def work() -> list[str]:
        groups: ProcessGroups = groups_of_two_by_two()
        raise_on_all_ranks(None, groups, "a check")
        error = DataError(f"rank {groups.rank} has no data") if groups.rank in (1, 3) else None
        with pytest.raises(DataError) as caught:
            raise_on_all_ranks(error, groups, "the read of data")
        assert (caught.value is error) == (groups.rank == 1)
        assert from_rank_0(lambda: groups.rank + 7, groups, "seven") == 7

        def refuse() -> int:
            raise DataError(f"refused on rank {groups.rank}")

        with pytest.raises(DataError) as refused:
            from_rank_0(refuse, groups, "a refusal")
        return [str(caught.value), str(refused.value)]

    assert run_distributed(work, 4, init=False) == [["rank 1 has no data", "refused on rank 0"]] * 4


def test_a_dead_peer_is_named_at_once(groups_of_two_by_two) -> None:
    def work() -> str:
        groups: ProcessGroups = groups_of_two_by_two(NEVER_S)
        agree("before rank 1 dies", groups)
        if groups.rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        if groups.rank > 1:
            assert gather_objects(groups.rank, "tp", groups) == [2, 3]
            return ""
        with pytest.raises(PeerLostError) as caught:
            gather_objects(groups.rank, "tp", groups)
        return str(caught.value)

    results = run_distributed(work, 4, init=False, expect_lost={1})
    message = results[0]
    assert "1 of 2 ranks did not arrive at gather_objects on group 'tp'" in message
    assert ": rank 1." in message
    assert "Rank 1 is gone: its process has ended, last heard of" in message
    assert results[1] == Lost(-signal.SIGKILL)


def test_other_groups_and_arguments_raise_process_group_error(runtime: Runtime) -> None:
    def work() -> None:
        groups = initialize(plan(Parallel(), 1), runtime.platform, 10)
        with pytest.raises(ProcessGroupError, match="group 'mp' has no channel for objects"):
            gather_objects(1, "mp", groups)
        dist.Backend.register_backend("pretend", lambda s, r, n, t: dist.ProcessGroupGloo(s, r, n, t), devices=["cpu"])
        with pytest.raises(ProcessGroupError, match="'dp' would go over pretend; objects travel on gloo only"):
            Channel("dp", [0], 0, dist.new_group([0], backend="pretend"), 10)
        with pytest.raises(ProcessGroupError, match="source 1 is not a rank of group 'tp', which has 1"):
            broadcast_object(1, "tp", groups, source=1)
        with pytest.raises(ProcessGroupError, match="knows sum, max, min, not 'mean'"):
            all_reduce_numbers([1.0], "tp", groups, op="mean")  # type: ignore[arg-type]

    run_distributed(work, 1, init=False)
