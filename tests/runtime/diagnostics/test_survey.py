"""One rank reads the records of a large world for all ranks that ask, and its summary leads to the same diagnosis."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megascend.config import Parallel
from megascend.errors import PeerLostError
from megascend.runtime.bootstrap.runtime import Runtime
from megascend.runtime.diagnostics import heartbeat, survey
from megascend.runtime.diagnostics.collective_sequence import CollectiveCounts
from megascend.runtime.diagnostics.diagnosis import PeerStatus, PhaseFailure, RankRecord, diagnose, not_arrived
from megascend.runtime.diagnostics.survey import Pace, Survey, decode, encode
from megascend.runtime.distributed.objects import agree
from megascend.runtime.distributed.process_groups import initialize
from megascend.runtime.topology.topology import plan
from megascend.testing import Lost, run_distributed
from weightwire.liveness import Identity

pytestmark = pytest.mark.waiting

WORLD = 300
LOCAL = RankRecord(
    heartbeat=7, label="barrier", outer="barrier", counts={"forward": 3, "barrier": 3}, open=["barrier"], waiting=True
)


def random_status(rank: int, generator: random.Random, faults: float) -> PeerStatus | None:
    """Return the status of a rank that waits as :data:`LOCAL` does, or, with this probability, of a late, lost or failed one."""
    record = replace(
        LOCAL,
        heartbeat=generator.randrange(50),
        seconds=generator.randrange(99) / 10,
        frame=f"wait (objects.py:{generator.randrange(9)})",
        collectives=CollectiveCounts({"world": 5, "tp": generator.randrange(2)}, "world"),
        process=Identity(f"node-{rank // 8}", f"boot-{rank // 8}", 100 + rank, 5),
        clock=1000.0 + rank,
    )
    if generator.random() > faults:
        return PeerStatus(record, 0.2, generator.random())
    late = replace(record, outer="forward", label="forward", open=["forward"], counts={"forward": 3, "barrier": 2})
    late = replace(
        late, collectives=CollectiveCounts({"world": 4}, "tp"), frame=f"read (data.py:{rank})", waiting=False
    )
    failure = PhaseFailure("forward of step 1", "forward", f"DataError: rank {rank}", generator.random() < 0.8)
    return generator.choice(
        [
            None,
            PeerStatus(late, 0.1),
            PeerStatus(record, 3.5, 4.0),
            PeerStatus(late, 9.0, 9.5, "stopped"),
            PeerStatus(replace(late, failure=failure), 0.3),
            PeerStatus(replace(record, ended=True), 5.0),
        ]
    )


@pytest.mark.parametrize("faults", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_summary_leads_to_the_diagnosis_of_the_records(seed: int, faults: float) -> None:
    generator = random.Random(seed)
    statuses = {rank: random_status(rank, generator, faults) for rank in range(1, WORLD)}
    decoded = decode(encode(statuses), Pace(1))
    assert decoded.keys() == statuses.keys()
    late = not_arrived("world", 5, statuses)
    assert not_arrived("world", 5, decoded) == late
    for suspects in (None, late or None):
        assert diagnose(0, LOCAL, decoded, suspects) == diagnose(0, LOCAL, statuses, suspects)


class CountingStore:
    """A store that counts the keys that are read."""

    def __init__(self) -> None:
        self._store, self.reads = dist.HashStore(), Counter[str]()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.reads["records"] += len(keys)
        return self._store.multi_get(keys)

    def get(self, key: str) -> bytes:
        self.reads[key] += 1
        return self._store.get(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class World:
    """Ranks of a large world in one process, with a clock that advances by a look of all of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.store, self.now, self.pace = CountingStore(), 0.0, Pace(size)
        monkeypatch.setattr(survey, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now))
        keys = [f"monitor/{rank}" for rank in range(size)]
        self.surveys = [Survey(self.store, rank, keys, self.pace) for rank in range(size)]  # type: ignore[arg-type]

    def look(self, silent: set[int]) -> None:
        """Advance the clock; every rank that is not ``silent`` sends a heartbeat, and does its step."""
        self.now += self.pace.urgent_poll_s
        for rank in range(len(self.surveys)):
            if rank not in silent:
                record = replace(LOCAL, heartbeat=int(self.now / self.pace.heartbeat_s), clock=self.now)
                self.store.set(f"monitor/{rank}", record.encode())
        for rank, part in enumerate(self.surveys):
            if rank not in silent:
                part.step()

    def ask(self, silent: set[int]) -> float:
        """Let every rank that is not ``silent`` ask, and return the seconds until all have their answers."""
        start = self.now
        for rank, part in enumerate(self.surveys):
            if rank not in silent:
                part.request()
        while any(part.pending for rank, part in enumerate(self.surveys) if rank not in silent):
            self.look(silent)
            assert self.now - start < 100 * self.pace.silent_s
        return self.now - start


def lost_ranks(part: Survey) -> set[int]:
    return {rank for rank, status in part.statuses.items() if status is not None and status.gone}


def test_one_rank_reads_the_records_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, WORLD)
    for _ in range(8):
        world.look({17})
    world.store.set("monitor/17", LOCAL.encode())
    seconds = world.ask({17})
    assert all(lost_ranks(part) == {17} for rank, part in enumerate(world.surveys) if rank != 17)
    assert seconds <= world.pace.answer_s
    looks = seconds / world.pace.urgent_poll_s
    assert world.store.reads["records"] <= (looks + 1) * WORLD
    assert world.store.reads["survey/summary"] <= WORLD


def test_collector_that_dies_is_replaced_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 100)
    world.look(set())
    world.surveys[4].request()
    world.look(set())
    assert world.surveys[4].pending
    assert world.ask({4}) <= world.pace.answer_s
    assert all(lost_ranks(part) == {4} for rank, part in enumerate(world.surveys) if rank != 4)


def test_collector_that_leaves_is_replaced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 100)
    world.surveys[4].request()
    world.look(set())
    world.surveys[5].request()
    world.surveys[4].close()
    world.look({4})
    assert (world.surveys[5].active, world.surveys[5]._collecting is None) == (True, False)


def test_later_request_is_answered_by_later_records(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 100)
    world.ask(set())
    first = {rank: status.record.heartbeat for rank, status in world.surveys[50].statuses.items() if status}
    world.ask(set())
    second = {rank: status.record.heartbeat for rank, status in world.surveys[50].statuses.items() if status}
    # Ranks beyond the first ones of a set have the record of another one.
    assert all(second[rank] > first[rank] for rank in range(16))


def test_collector_that_was_stopped_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 100)
    world.surveys[4].request()
    world.look(set())
    world.ask({4})
    world.surveys[9].request()
    world.look({4})  # a third turn
    world.surveys[4].step()
    assert world.surveys[4]._collecting is None
    world.ask({4})
    assert lost_ranks(world.surveys[9]) == {4}


def test_dead_rank_of_a_large_world_is_named(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "SURVEY_ABOVE", 1)

    def work() -> str:
        groups = initialize(plan(Parallel(), 4), runtime.platform, 60.0)
        if groups.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError) as caught:
            agree("a call", groups)
        groups.destroy()
        return str(caught.value)

    results = run_distributed(work, 4, init=False, expect_lost={2})
    assert results.pop(2) == Lost(-signal.SIGKILL)
    for message in results:
        assert "rank 2 is gone: its process has ended, last heard of" in message.replace("Rank 2", "rank 2")
        assert "Ranks: 0 " in message
        assert "; 2 gone, last " in message
