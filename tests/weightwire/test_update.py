"""Updates are atomic: states, versions, owners, digests, and recovery from failures."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_process import ADAPTER, TIMEOUT_S, Engine, Trainer, manifest_of, same, tensors
from torch.cuda._utils import _get_device_index

from support.forked_programs import run_forked
from weightwire import group, staging
from weightwire.errors import (
    CommitError,
    DigestError,
    ManifestError,
    NotServingError,
    OwnerError,
    TransportError,
    UpdateError,
    VersionError,
)
from weightwire.offer import Seal
from weightwire.receiver import Receiver
from weightwire.sender import Buffers
from weightwire.staging import StagingMemory

OLD, NEW = tensors(1), tensors(2)


@pytest.fixture
def served():
    """Build a receiver whose engine has OLD as version 1."""
    receiver, engine = Receiver("engine"), Engine()
    seal = Trainer([receiver]).push(1, OLD)
    receiver.commit(seal.update, engine.load, engine.restore)
    receiver.settle(seal.update)
    assert same(engine.weights, OLD)
    return receiver, engine


def works_again(receiver: Receiver, engine: Engine, version: int) -> None:
    """Check that the next update works."""
    seal = Trainer([receiver]).push(version, NEW)
    receiver.commit(seal.update, engine.load, engine.restore)
    assert same(engine.weights, NEW)
    assert receiver.version() == version
    assert receiver.serving


def test_nothing_changes_before_the_commit(served):
    receiver, engine = served
    seal = Trainer([receiver]).push(2, NEW)
    assert same(engine.weights, OLD)
    assert receiver.version() == 1
    assert receiver.status()["update"]["state"] == "verified"
    receiver.drop(seal.update)
    assert same(engine.weights, OLD)
    with pytest.raises(UpdateError, match="is dropped"):
        receiver.commit(seal.update, engine.load)
    works_again(receiver, engine, 2)


def test_receiver_calls_are_idempotent(served):
    receiver, engine = served
    seal = Trainer([receiver]).push(2, NEW)
    receiver.verify(seal, TIMEOUT_S)
    receiver.commit(seal.update, engine.load)
    receiver.commit(seal.update, lambda tensors: pytest.fail("loaded twice"))
    receiver.drop(seal.update)
    assert same(engine.weights, NEW)
    assert receiver.version() == 2


@pytest.mark.parametrize("version", [0, 1])
def test_an_older_or_equal_version_is_refused(served, version):
    receiver, engine = served
    with pytest.raises(VersionError, match=f"version {version} of model is offered, and version 1 is already active"):
        receiver.open(Trainer([receiver]).offers(manifest_of(NEW, version))[0])
    works_again(receiver, engine, 2)


def test_adapters_have_separate_versions(served):
    receiver, engine = served
    factors = {"q.lora_A.weight": torch.ones(4, 8), "q.lora_B.weight": torch.zeros(8, 4)}
    adapter_engine = Engine()
    seal = Trainer([receiver]).push(1, factors, adapter=ADAPTER)
    receiver.commit(seal.update, adapter_engine.load)
    assert same(adapter_engine.weights, factors)
    assert (receiver.version("adapter alice"), receiver.version()) == (1, 1)
    with pytest.raises(VersionError, match="adapter alice"):
        receiver.open(Trainer([receiver]).offers(manifest_of(factors, 1, adapter=ADAPTER))[0])
    receiver.forget("adapter alice")
    receiver.commit(Trainer([receiver]).push(1, factors, adapter=ADAPTER).update, adapter_engine.load)
    assert same(engine.weights, OLD)


def test_update_of_another_owner_is_refused_while_one_is_open(served):
    receiver, engine = served
    first, second = Trainer([receiver], owner="trainer-1"), Trainer([receiver], owner="trainer-2")
    seal = first.push(2, NEW)
    with pytest.raises(OwnerError, match=r"trainer-2 offers an update while .* of trainer-1, is verified"):
        receiver.open(second.offers(manifest_of(OLD, 3))[0])
    with pytest.raises(UpdateError, match="still verified"):
        receiver.open(first.offers(manifest_of(OLD, 3))[0])
    receiver.commit(seal.update, engine.load)
    assert same(engine.weights, NEW)


def test_flipped_bit_is_detected_and_its_bucket_named(served, monkeypatch):
    receiver, engine = served
    from weightwire.transports import gloo

    honest = gloo.GlooTransport.receive
    count = iter(range(1000))

    class Flipping:
        def __init__(self, work, buffer):
            self.work, self.buffer = work, buffer

        def wait(self, timeout_s):
            self.work.wait(timeout_s)
            self.buffer[17] ^= 64

    def receive(self, buffer):
        work = honest(self, buffer)
        return Flipping(work, buffer) if next(count) == 1 else work

    monkeypatch.setattr(gloo.GlooTransport, "receive", receive)
    trainer = Trainer([receiver])
    seal = trainer.send(manifest_of(NEW, 2), NEW.items())
    with pytest.raises(
        DigestError, match=r"1 of \d+ buckets differ in multilinear64, the first is bucket 2 \(embed.weight"
    ):
        receiver.verify(seal, TIMEOUT_S)
    with pytest.raises(UpdateError):
        receiver.commit(seal.update, engine.load)
    monkeypatch.undo()
    assert same(engine.weights, OLD)
    works_again(receiver, engine, 2)


def test_a_seal_of_another_manifest_is_refused(served):
    receiver, engine = served
    seal = Trainer([receiver]).send(manifest_of(NEW, 2), NEW.items())
    with pytest.raises(ManifestError, match="the seal is of version 3"):
        receiver.verify(Seal(seal.update, 3, seal.manifest, seal.digests), TIMEOUT_S)
    works_again(receiver, engine, 2)


def changed(kind):
    """Send these tensors instead of the manifest's, and compare the error."""
    items = list(NEW.items())
    name, tensor = items[3]
    if kind == "wrong shape":
        return items[:3] + [(name, tensor.t())] + items[4:], r"layers.0.linear.weight, float16 \[7, 19\]; .* \[19, 7\]"
    if kind == "wrong dtype":
        return items[:3] + [(name, tensor.bfloat16())] + items[4:], "bfloat16 .* float16"
    if kind == "missing":
        return items[:-1], "after 6 of 7 tensors there are no more; head.weight is missing"
    if kind == "extra":
        return [*items, ("more", tensor)], "more comes after the last tensor of the manifest, head.weight"
    return items[:3] + [items[4], items[3]] + items[5:], "tensor 4 of 7 is empty"


@pytest.mark.parametrize("kind", ["wrong shape", "wrong dtype", "missing", "extra", "wrong order"])
def test_tensors_that_differ_from_the_manifest_raise_manifest_error(served, kind):
    receiver, engine = served
    weights, text = changed(kind)
    with pytest.raises(ManifestError, match=text):
        Trainer([receiver]).send(manifest_of(NEW, 2), iter(weights))
    until_dropped(receiver)
    assert "the sender (trainer-1" in receiver.status()["update"]["problem"]
    assert same(engine.weights, OLD)
    works_again(receiver, engine, 2)


def until_dropped(receiver):
    until = time.monotonic() + TIMEOUT_S
    while receiver.status()["update"]["state"] != "dropped":
        assert time.monotonic() < until, receiver.status()
        time.sleep(0.01)


def test_unsupported_offers_are_refused():
    expected = manifest_of(OLD, 0)
    receiver = Receiver("engine", check=lambda manifest: manifest.expect(expected.tensors))
    other = dict(NEW)
    other["step"] = other["step"].double()
    other["more"] = other.pop("empty")
    with pytest.raises(
        ManifestError, match=r"empty is missing; more is not .*; step comes as float64 \[\], not int64 \[\]"
    ):
        receiver.open(Trainer([receiver]).offers(manifest_of(other, 1))[0])
    small = Receiver("engine", max_bytes=100)
    with pytest.raises(ManifestError, match="at most 100 are taken"):
        small.open(Trainer([small]).offers(manifest_of(NEW, 1))[0])
    with pytest.raises(TransportError, match=r"unknown transport 'pigeon'; known: .*gloo"):
        receiver.open(Trainer([receiver], "pigeon").offers(manifest_of(NEW, 1))[0])
    with pytest.raises(ManifestError, match=r"unknown digest 'xxh3'; known: multilinear64, sha256"):
        receiver.open(Trainer([receiver]).offers(manifest_of(NEW, 1, digest="xxh3"))[0])
    assert receiver.status()["update"] is None


def test_source_exception_ends_the_update_on_both_sides(served):
    receiver, engine = served

    def export():
        yield from list(NEW.items())[:4]
        raise FloatingPointError("an export of its own")

    with pytest.raises(FloatingPointError):
        Trainer([receiver]).send(manifest_of(NEW, 2, 100), export())
    until_dropped(receiver)
    assert "FloatingPointError: an export of its own" in receiver.status()["update"]["problem"]
    works_again(receiver, engine, 2)


# --- commits that fail ---


def half(tensors):
    """Load some tensors, and raise."""
    for number, (_, tensor) in enumerate(tensors):
        tensor.clone()
        if number == 2:
            raise ValueError("the third tensor")


def test_failed_commit_restores_the_old_weights(served):
    receiver, engine = served

    def load(tensors):
        engine.backup = dict(engine.weights)
        engine.weights["embed.weight"] = torch.zeros(1)
        half(tensors)

    seal = Trainer([receiver]).push(2, NEW)
    with pytest.raises(
        CommitError, match=r"ValueError: the third tensor\. The weights from before it are active"
    ) as caught:
        receiver.commit(seal.update, load, engine.restore)
    assert not isinstance(caught.value, NotServingError)
    assert same(engine.weights, OLD)
    assert receiver.serving
    assert receiver.version() == 1
    works_again(receiver, engine, 2)


@pytest.mark.parametrize("with_restore", [False, True])
def test_failed_restore_stops_serving(served, with_restore):
    receiver, engine = served

    def restore():
        raise MemoryError("no room")

    seal = Trainer([receiver]).push(2, NEW)
    with pytest.raises(NotServingError, match="must not answer"):
        receiver.commit(seal.update, half, restore if with_restore else None)
    assert not receiver.serving
    assert receiver.version() is None
    factors = {"q.lora_A.weight": torch.ones(4, 8)}
    seal = Trainer([receiver]).push(3, factors, adapter=ADAPTER)
    receiver.commit(seal.update, Engine().load)
    assert not receiver.serving, "an adapter does not restore a model"
    works_again(receiver, engine, 2)


def test_a_commit_is_undone_when_another_worker_failed(served):
    receiver, engine = served
    seal = Trainer([receiver]).push(2, NEW)
    receiver.commit(seal.update, engine.load, engine.restore)
    receiver.revert(seal.update, "worker 1 failed")
    assert same(engine.weights, OLD)
    assert receiver.version() == 1
    works_again(receiver, engine, 2)
    seal = Trainer([receiver]).push(3, OLD)
    receiver.commit(seal.update, engine.load, engine.restore)
    receiver.settle(seal.update)
    with pytest.raises(NotServingError):
        receiver.revert(seal.update, "too late")


# --- time ---


def test_update_is_dropped_when_its_lease_lapses(served):
    receiver, engine = served
    trainer = Trainer([receiver])
    trainer.lease_s = 2.0
    trainer.push(2, NEW)
    until_dropped(receiver)
    assert "nobody continued it for 2 s" in receiver.status()["update"]["problem"]
    assert same(engine.weights, OLD)
    works_again(receiver, engine, 2)


def test_a_drop_ends_the_wait_for_a_trainer(served):
    receiver, engine = served
    (offer,) = Trainer([receiver]).offers(manifest_of(NEW, 2))
    receiver.open(offer)
    receiver.drop(offer.update)
    until = time.monotonic() + 60
    while any(offer.update in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < until, "the receiver still waits"
        time.sleep(0.02)
    works_again(receiver, engine, 2)


def test_memory_and_connections_serve_the_next_update(monkeypatch):
    receiver, engine, trainer, buffers = Receiver("engine"), Engine(), Trainer([Receiver("unused")]), Buffers()
    trainer.receivers, trainer.transport = [receiver], "shared_memory"
    connections = []
    monkeypatch.setattr(group, "connect", lambda *address, real=group.connect: connections.append(1) or real(*address))

    def update(version, weights):
        seal = trainer.send(manifest_of(weights, version), weights.items(), buffers=buffers)
        address = receiver.staging(seal.update).data_ptr()
        receiver.verify(seal, TIMEOUT_S)
        receiver.commit(seal.update, engine.load, engine.restore)
        receiver.settle(seal.update)
        assert same(engine.weights, weights)
        count = len(connections)
        connections.clear()
        return address, buffers.nbytes, count

    (first, nbytes, _), (second, _, _), (third, last, count) = (update(version, NEW) for version in (1, 2, 3))
    assert first == second == third
    assert nbytes == last == 512
    assert count == 2, "one of the transport on each side; the groups use those of the last update"
    smaller = dict(list(NEW.items())[:3])
    engine.weights = {}
    assert update(4, smaller)[0] == first
    receiver.release()
    assert update(5, smaller)[1] == 512


@pytest.mark.parametrize(("device", "index"), [("cuda", 3), ("cuda:1", 1)])
def test_receiving_thread_selects_the_device_of_the_receiver(monkeypatch, device, index):
    """A new thread starts on device 0; without an index the device is the current one of the thread that made the receiver."""
    selected = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: selected.append(_get_device_index(device)))
    monkeypatch.setattr("weightwire.receiver.side_stream", lambda device: contextlib.nullcontext())
    monkeypatch.setattr("weightwire.receiver.receive", lambda update, note_arrival: None)
    events = {name: threading.Event() for name in ("arrived", "left")}
    update: Any = SimpleNamespace(**events, is_open=False, offer=SimpleNamespace(lease_s=1.0))
    Receiver("engine", device=device)._run(update)
    assert selected == [index]


@pytest.mark.parametrize("base", [None, ("plan", 1)], ids=["no base", "base kept"])
@pytest.mark.parametrize("adapter", [False, True])
def test_new_memory_is_waited_for_before_transports_write_to_it(monkeypatch, base, adapter):
    """Its last kernels may still run on the stream that allocates it, and transports use streams of their own."""
    waits = []
    monkeypatch.setattr(staging, "synchronise_stream", waits.append)
    memory = StagingMemory(torch.device("meta"))
    memory.base, memory.spare = base, None
    assert memory.take(1000, adapter=adapter).numel() == 1000
    assert waits == [torch.device("meta")]
    assert memory.base == (base if adapter else None)


def test_memory_of_an_incomplete_update_is_not_used_again(served):
    receiver, engine = served
    trainer = Trainer([receiver])
    (offer,) = trainer.offers(manifest_of(NEW, 2))
    receiver.open(offer)
    memory = receiver.staging(offer.update)
    receiver.drop(offer.update)  # a transport may still write into it
    (offer,) = Trainer([receiver]).offers(manifest_of(NEW, 3))
    receiver.open(offer)
    assert receiver.staging(offer.update).data_ptr() != memory.data_ptr()
    receiver.drop(offer.update)
    works_again(receiver, engine, 4)


def test_connection_to_a_listener_that_has_ended_is_not_used_again():
    trainer = Trainer([Receiver("engine")])
    trainer.push(1, NEW)
    address = trainer.listener.host, trainer.listener.port
    deadline = time.monotonic() + 30
    while not (idle := group._idle.get((os.getpid(), *address))):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(idle) <= group.MAX_IDLE
    while group._take_idle(*address) is not None:
        pass
    assert group._take_idle(*address) is None


def test_many_updates_leak_no_threads_or_files():
    """Leave no threads and no open files; one listener serves all updates."""
    # In a process of its own: sockets and threads of earlier tests come and go in this one.
    completed = run_forked(Path(__file__).with_name("many_updates.py"))
    assert completed.returncode == 0, completed.stderr[-4000:]
