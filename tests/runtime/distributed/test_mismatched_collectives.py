"""Real ranks in different object collectives: all of them raise at once and name every rank's position.

The groups' timeout is 240 s and a test's deadline a quarter of it, so no rank can have waited for the timeout.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from megascend.config import Parallel
from megascend.errors import OutOfStepError
from megascend.runtime.bootstrap.runtime import Runtime
from megascend.runtime.distributed import channels
from megascend.runtime.distributed.objects import (
    agree,
    all_reduce_numbers,
    broadcast_object,
    collect_objects,
    gather_objects,
)
from megascend.runtime.distributed.process_groups import ProcessGroups, initialize
from megascend.runtime.topology.topology import plan
from megascend.testing import run_distributed

pytestmark = pytest.mark.waiting

TIMEOUT_S, DEADLINE_S = 240.0, 60.0

Call = Callable[[ProcessGroups], Any]
CALLS: dict[str, tuple[str, Call]] = {
    "gather": ("loads (gather_objects, ", lambda g: gather_objects("g", "world", g, "loads")),
    "gather of much": ("sizes (gather_objects, ", lambda g: gather_objects("m" * 9999, "world", g, "sizes")),
    "collect": ("loads (collect_objects, ", lambda g: collect_objects("c", "world", g, "loads")),
    "broadcast": ("loads (broadcast_object from its rank 0, ", lambda g: broadcast_object("b", "world", g, 0, "loads")),
    "from 1": ("loads (broadcast_object from its rank 1, ", lambda g: broadcast_object("b", "world", g, 1, "loads")),
    "sum": ("loads (all_reduce_numbers, sum of 1, ", lambda g: all_reduce_numbers([1], "world", g, "sum", "loads")),
    "max": ("loads (all_reduce_numbers, max of 1, ", lambda g: all_reduce_numbers([1], "world", g, "max", "loads")),
    "sum of 2": (
        "loads (all_reduce_numbers, sum of 2",
        lambda g: all_reduce_numbers([1, 2], "world", g, "sum", "loads"),
    ),
    "agree": ("loads (agree, ", lambda g: agree("loads", g)),
    "another group": ("of tp, step 1", lambda g: gather_objects("g", "tp", g, "loads")),
    "another step": ("of world, step 2", lambda g: collect_objects("g", "world", g, "loads", 2)),
    "no purpose": ("an unnamed call", lambda g: gather_objects("n", "world", g)),
}


def test_every_pair_of_collectives_raises_on_both_ranks(runtime: Runtime) -> None:
    pairs = list(itertools.permutations(CALLS, 2))

    def work() -> list[str]:
        groups = initialize(plan(Parallel(tensor=2), 2), runtime.platform, TIMEOUT_S)
        messages = []
        for pair in pairs:
            with pytest.raises(OutOfStepError) as caught:
                CALLS[pair[groups.rank]][1](groups)
            messages.append(str(caught.value))
            assert gather_objects(groups.rank, "world", groups) == [0, 1]  # the group still works
        return messages

    from_0, from_1 = run_distributed(work, 2, init=False, timeout_s=DEADLINE_S)
    for pair, *messages in zip(pairs, from_0, from_1, strict=True):
        for rank, message in enumerate(messages):
            first, second = message.split("; rank 1 is in ")
            assert first.startswith(f"rank {rank}: the ranks are out of step: rank 0 is in "), message
            assert CALLS[pair[0]][0] in first, message
            assert CALLS[pair[1]][0] in second, message


def test_one_mismatched_rank_of_four_is_named(runtime: Runtime) -> None:
    def work() -> str:
        groups = initialize(plan(Parallel(tensor=2), 4), runtime.platform, TIMEOUT_S)
        groups.monitor.step = 7

        def save() -> None:
            with groups.monitor.phase("save"):
                gather_objects(None, "world", groups, "the check of a path")

        def forward() -> None:
            with groups.monitor.phase("forward"):
                all_reduce_numbers([1.0] * 5000, "world", groups, "sum", "tokens")

        with pytest.raises(OutOfStepError) as caught:
            (save if groups.rank == 2 else forward)()
        return str(caught.value)

    for rank, message in enumerate(run_distributed(work, 4, init=False, timeout_s=DEADLINE_S)):
        assert message == (
            f"rank {rank}: the ranks are out of step: ranks 0, 1, 3 are in tokens inside forward (all_reduce_numbers, sum of "
            "5000, collective 1 of world, step 7); rank 2 is in the check of a path inside save (gather_objects, collective 1 "
            "of world, step 7); make the same calls in the same order on all ranks, with matching arguments; nothing was "
            "exchanged"
        )


PLANS = (("world", "tp", "world", "world"), ("world", "tp", "world", "tp"), ("tp", "dp", "dp", "tp"))
"""Groups that the four ranks call collectives on; tp is ranks 0, 1 and 2, 3, dp is 0, 2 and 1, 3."""


@pytest.mark.parametrize("relayed_above", [channels.RELAYED_ABOVE, 1])
@pytest.mark.nightly_cases("1")  # covered: 256
def test_deadlock_over_several_groups_raises_on_all_ranks(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, relayed_above: int
) -> None:
    """Let rank 0 wait for rank 1 in one group and rank 1 for rank 0 in another, which would deadlock."""
    monkeypatch.setattr(channels, "RELAYED_ABOVE", relayed_above)

    def work() -> list[str]:
        groups = initialize(plan(Parallel(tensor=2), 4), runtime.platform, TIMEOUT_S)
        messages = []
        for number, names in enumerate(PLANS):
            if number == 2 and groups.rank == 3:
                time.sleep(1.5)  # enters a collective that the others abandoned
            with pytest.raises(OutOfStepError) as caught:
                gather_objects(number, names[groups.rank], groups, f"from {groups.rank}")
            messages.append(str(caught.value))
            for name in ("world", "tp", "dp"):
                assert gather_objects(groups.rank, name, groups, "afterwards") == groups.ranks(name)
        return messages

    messages = run_distributed(work, 4, init=False, timeout_s=DEADLINE_S)
    for number, names in enumerate(PLANS):
        for rank, rank_messages in enumerate(messages):
            # A rank learns of collectives that it did not enter from other ranks.
            peers = [other for other in range(4) if f"is in from {other} (gather_objects, " in rank_messages[number]]
            assert rank in peers, rank_messages[number]
            assert len(peers) > 1, rank_messages[number]
            assert any(f"of {name}, step 1)" in rank_messages[number] for name in {*names} - {names[rank]}), (
                rank_messages[number]
            )


def test_rank_that_continues_after_a_mismatch_raises_again(runtime: Runtime) -> None:
    def work() -> list[str]:
        groups = initialize(plan(Parallel(), 2), runtime.platform, TIMEOUT_S)
        order = ["load", "step", "save"] if groups.rank == 0 else ["step", "save", "step"]
        messages = []
        for purpose in order:
            with pytest.raises(OutOfStepError) as caught:
                broadcast_object(purpose, "world", groups, purpose=purpose)
            messages.append(str(caught.value))
        return messages

    for messages in run_distributed(work, 2, init=False, timeout_s=DEADLINE_S):
        for number, (on_0, on_1) in enumerate([("load", "step"), ("step", "save"), ("save", "step")], 1):
            assert (
                f"rank 0 is in {on_0} (broadcast_object from its rank 0, collective {number} of world"
                in messages[number - 1]
            )
            assert (
                f"rank 1 is in {on_1} (broadcast_object from its rank 0, collective {number} of world"
                in messages[number - 1]
            )


@pytest.mark.parametrize("size", [0, 1, 700, 5000, 300_000])
def test_objects_of_every_size(runtime: Runtime, size: int) -> None:
    def work() -> tuple[object, ...]:
        groups = initialize(plan(Parallel(tensor=2), 4), runtime.platform, TIMEOUT_S)
        payload = bytes([groups.rank]) * (size * (groups.rank + 1))
        return (
            gather_objects(payload, "world", groups) == [bytes([r]) * (size * (r + 1)) for r in range(4)],
            broadcast_object(payload, "dp", groups, source=1)
            == bytes([2 + groups.rank % 2]) * (size * (3 + groups.rank % 2)),
            [len(part) for part in collect_objects(payload, "tp", groups) or []],
            all_reduce_numbers([0.5 + groups.rank] * size, "world", groups) == [8.0] * size,
        )

    results = run_distributed(work, 4, init=False, timeout_s=DEADLINE_S)
    assert [result[:2] + result[3:] for result in results] == [(True, True, True)] * 4
    assert [result[2] for result in results] == [[size, 2 * size], [], [3 * size, 4 * size], []]
