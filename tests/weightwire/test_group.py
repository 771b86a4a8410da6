"""Members join in any order, ranks and names are used once, and errors name a missing, silent or dead member."""

from __future__ import annotations

import os
import socket
import time

import pytest
import torch
from torch.distributed import HashStore
from wire_members import run_meeting, run_members, wait_until

from weightwire import liveness, peers
from weightwire.errors import DeadlineError, GroupError, PeerLostError, TransportError, WireError
from weightwire.group import Listener, join
from weightwire.manifest import Manifest, TensorSpec
from weightwire.transports import Setup, make_transport

MANIFEST = Manifest(1, (TensorSpec("a", "uint8", (1000,)),))


def transport(group, timeout_s=20.0, name="gloo"):
    return make_transport(name, Setup(group, MANIFEST, torch.device("cpu"), timeout_s))


def bucket(number: int, size: int = 100_000) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("last", [0, 1, 2])
def test_members_join_in_any_order(last):
    def on_member(meet):
        if int(os.environ["RANK"]) == last:
            time.sleep(0.3)
        group = meet()
        group.close()
        return group.members

    assert run_meeting(on_member, 3) == [("trainer", "engine-1", "engine-2")] * 3


@pytest.mark.nightly_cases("1")  # covered: 0
@pytest.mark.parametrize("first", [0, 1])
def test_missing_member_is_named_by_all(first, tmp_path):
    """Raise the same error on the member whose deadline passes first and on the one that it notifies."""

    def on_member(meet):
        rank = int(os.environ["RANK"])
        if rank == 2:
            wait_until(lambda: len(list(tmp_path.glob("failed-*"))) == 2)
        elif rank != first:
            wait_until((tmp_path / f"begun-{first}").exists)
            time.sleep(0.5)
        (tmp_path / f"begun-{rank}").touch()
        with pytest.raises(WireError) as caught:
            meet()
        (tmp_path / f"failed-{rank}").touch()
        return type(caught.value).__name__, str(caught.value)

    *failures, late = run_meeting(on_member, 3, join_timeout_s=5.0)
    for (kind, text), member in zip(failures, ("the sender (trainer,", "receiver 1 (engine-1,"), strict=True):
        assert kind == "DeadlineError"
        assert text.startswith(member)
        assert ": timed out waiting for members to join group " in text
        assert text.endswith(": receiver 2 (engine-2)")
    assert late[0] == "PeerLostError", "the late member finds a failed group"
    assert "has failed: " in late[1]
    assert late[1].endswith(": receiver 2 (engine-2)")


def test_group_names_and_ranks_are_used_once():
    listener = Listener()
    name = listener.new_group(["trainer", "engine"])
    assert name != listener.new_group(["trainer", "engine"])
    with pytest.raises(DeadlineError, match=r"receiver 1 \(engine\)"):
        join(listener.host, listener.port, name, 0, 1.0)
    with pytest.raises(GroupError, match="is taken"):
        join(listener.host, listener.port, name, 0, 60.0)
    with pytest.raises(GroupError, match="unknown group"):
        join(listener.host, listener.port, "update-1-of-yesterday", 1, 60.0)
    with pytest.raises(GroupError, match="not 2"):
        join(listener.host, listener.port, name, 2, 60.0)


def test_an_ended_group_cannot_be_joined(tmp_path):
    def on_member(group):
        host, port, name = group.host, group.port, group.name
        if group.rank == 0:
            wait_until((tmp_path / "refused").exists)
            return None
        group.close()
        with pytest.raises(GroupError, match="is taken"):
            join(host, port, name, 1, 60.0)
        (tmp_path / "refused").touch()
        return True

    assert run_members(on_member, 2)[1]


def test_unreachable_sender_raises_transport_error():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(TransportError, match="the sender is gone, or not reachable"):
            join("127.0.0.1", free.getsockname()[1], "update", 1, 0.5)


def test_listener_binds_to_its_address_only():
    listener = Listener("127.0.0.1")
    with socket.socket() as other:
        other.bind(("127.0.0.2", listener.port))  # fails if the listener is bound to every address


def test_silent_member_is_named_with_its_progress(tmp_path):
    def on_member(group):
        medium = transport(group, timeout_s=5.0)
        if group.rank == 1:
            medium.receive(bucket(0)).wait(20)
            group.progress(1)
            (tmp_path / "silent").touch()
            wait_until((tmp_path / "named").exists)
            return None
        big = torch.zeros(64 * 2**20, dtype=torch.uint8)
        medium.send(bucket(0)).wait(20)
        wait_until((tmp_path / "silent").exists)
        try:
            medium.send(big).wait(1.5)
        except WireError as error:
            explanation = group.explain(error, "sending bucket 2 of 2")
        (tmp_path / "named").touch()
        medium.close()
        return type(explanation).__name__, str(explanation)

    kind, text = run_members(on_member, 2)[0]
    assert kind in ("DeadlineError", "TransportError"), text
    assert "receiver 1 (engine-1" in text
    assert "has done 1 buckets" in text


def test_member_that_reports_nothing_within_the_deadline_is_named(tmp_path):
    def on_member(group):
        if group.rank == 1:
            group.acknowledge("loaded")
        if group.rank > 0:
            wait_until((tmp_path / "late").exists)
            return None
        with pytest.raises(DeadlineError) as caught:
            group.await_receivers("loaded", 0.5)
        (tmp_path / "late").touch()
        return str(caught.value)

    message = run_members(on_member, 3)[0]
    assert message.startswith("timed out after 0.5 s waiting for 'loaded' from receiver 2 (engine-2"), message


def test_failed_member_reports_its_reason():
    def on_member(group):
        if group.rank == 1:
            group.fail("no memory for 3 buckets")
            group.close()
            return None
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                group.check()
            except PeerLostError as error:
                return str(error)
            time.sleep(0.05)
        return "nothing"

    results = run_members(on_member, 3)
    for rank in (0, 2):
        assert "receiver 1 (engine-1" in results[rank]
        assert "no memory for 3 buckets" in results[rank]


def test_silence_counts_only_while_the_member_itself_looks(monkeypatch):
    """Count a peer as gone after 30 s of polls without a new heartbeat, but not after a stop of this process for 40 s."""
    store, now = HashStore(), [100.0]
    receiver = peers.Peers("g", 1, ("trainer", "engine"), "127.0.0.1", 1, store)
    receiver.identities[0] = liveness.Identity("far", "", 1, 0)  # of another machine: only its heartbeats tell
    monkeypatch.setattr(peers.time, "monotonic", lambda: now[0])

    def look(after_s: float, beat: int | None = None) -> PeerLostError | None:
        now[0] += after_s
        if beat is not None:
            store.set("g/alive/0", f"[{beat}, 7, 0]")
        receiver.poll()
        return receiver.lost

    assert look(0.0) is None
    assert look(1.0, beat=1) is None
    assert receiver.progress_of(0) == 7
    assert look(40.0) is None, "this process was stopped"
    assert [look(10.0) for _ in range(3)] == [None] * 3
    assert str(look(1.0)) == "the sender (trainer, process 1 on far) sends no heartbeats, for 30 s"
