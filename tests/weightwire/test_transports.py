"""Every transport moves the same bytes, reports why it cannot, and cleans up."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from in_process import ADAPTER, TIMEOUT_S, Engine, Trainer, manifest_of, same, tensors
from safetensors import safe_open
from safetensors.torch import load_file
from wire_members import run_members

from weightwire.errors import ManifestError, PeerLostError, TransportError, WireError
from weightwire.manifest import Manifest, TensorSpec
from weightwire.receiver import Receiver
from weightwire.transports import Setup, base, make_transport, register_transport, transport_names
from weightwire.transports.gloo import GlooTransport
from weightwire.transports.shared_memory import SharedSlots

NEW = tensors(2)
ON_CPU = ["gloo", "shared_memory", "files"]


def options_of(name, tmp_path):
    return {"directory": str(tmp_path / "weights")} if name == "files" else {}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ON_CPU)
def test_weights_arrive_bit_for_bit(name, count, tmp_path):
    receivers, engines = [Receiver(f"engine-{n}") for n in range(count)], [Engine() for _ in range(count)]
    trainer = Trainer(receivers, name, **options_of(name, tmp_path))
    for version, weights in ((1, tensors(1)), (2, NEW)):
        seal = trainer.push(version, weights, 300)
        for receiver, engine in zip(receivers, engines, strict=True):
            receiver.commit(seal.update, engine.load)
            assert same(engine.weights, weights)
        payload = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        assert trainer.sender.traffic.nbytes == payload


@pytest.mark.parametrize("name", ON_CPU)
def test_a_failure_leaves_nothing_behind_and_the_next_update_works(name, tmp_path):
    receiver, engine = Receiver("engine"), Engine()
    trainer = Trainer([receiver], name, **options_of(name, tmp_path))
    with pytest.raises(ManifestError, match="is missing"):
        trainer.send(manifest_of(NEW, 1), list(NEW.items())[:-1])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    until = time.monotonic() + TIMEOUT_S
    while receiver.status()["update"]["state"] != "dropped":
        assert time.monotonic() < until
        time.sleep(0.01)
    seal = trainer.push(1, NEW)
    receiver.commit(seal.update, engine.load)
    assert same(engine.weights, NEW)


@pytest.mark.parametrize("name", ["gloo", "shared_memory"])
@pytest.mark.parametrize("dying", [0, 2])
def test_a_killed_member_is_named(name, dying):
    manifest = Manifest(1, (TensorSpec("a", "uint8", (100_000,)),), 1000)

    def on_member(group):
        medium = make_transport(name, Setup(group, manifest, torch.device("cpu"), 20.0))
        try:
            for number in range(100):
                if group.rank == dying and number == 5:
                    os.kill(os.getpid(), 9)
                buffer = torch.full((1000,), number, dtype=torch.uint8)
                (medium.send if group.rank == 0 else medium.receive)(buffer).wait(20)
                group.progress(number + 1)
        except WireError as error:
            explanation = group.explain(error, "busy")
            group.fail(str(error), at_fault=False)
            medium.close()
            return type(explanation).__name__, str(explanation)
        return "nothing", ""

    results = run_members(on_member, 3, expect_lost={dying})
    member = "the sender (trainer, process" if dying == 0 else "receiver 2 (engine-2, process"
    for rank in {0, 1, 2} - {dying}:
        kind, text = results[rank]
        assert kind == "PeerLostError", text
        assert member in text


def test_files_are_a_checkpoint_that_safetensors_reads(tmp_path):
    receiver, engine = Receiver("engine"), Engine()
    trainer = Trainer([receiver], "files", directory=str(tmp_path), keep=2)
    for version in (1, 2, 10):
        weights = tensors(version)
        receiver.commit(trainer.push(version, weights, 128).update, engine.load)
        path = tmp_path / f"v{version:019d}" / "model.safetensors"
        stored = load_file(path)
        assert same({name: stored[name] for name in weights}, weights)
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt", "version": str(version)}
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"v{version:019d}" for version in (2, 10)]
    factors = {"q.lora_A.weight": torch.ones(4, 8)}
    receiver.commit(trainer.push(1, factors, adapter=ADAPTER).update, Engine().load)
    folder = tmp_path / "alice" / f"v{1:019d}"
    assert same(load_file(folder / "adapter_model.safetensors"), factors)
    assert (folder / "adapter_config.json").read_text() == '{"r": 4, "lora_alpha": 8}'


@pytest.mark.parametrize("keep", [1, 2])
def test_greater_versions_of_an_earlier_run_do_not_remove_new_files(tmp_path, keep):
    for versions in ((8, 9), (1, 2, 3)):
        receiver, engine = Receiver("engine"), Engine()
        trainer = Trainer([receiver], "files", directory=str(tmp_path), keep=keep)
        trainer.timeout_s = 5.0
        for version in versions:
            seal = trainer.push(version, NEW)
            receiver.commit(seal.update, engine.load)
            receiver.settle(seal.update)
        assert same(engine.weights, NEW)
    assert sorted(int(path.name[1:]) for path in tmp_path.iterdir()) == [2, 3][-keep:]


def test_tampered_files_raise_wire_error(tmp_path, monkeypatch):
    receiver = Receiver("engine")
    trainer = Trainer([receiver], "files", directory=str(tmp_path))
    from weightwire.transports.files import FilesTransport

    complete = FilesTransport._complete

    def tampered(self):
        complete_path, replace = self.path, Path.replace

        def replacing(path, target):
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
            return replace(path, target)

        monkeypatch.setattr(Path, "replace", replacing)
        complete(self)
        assert complete_path.exists()

    monkeypatch.setattr(FilesTransport, "_complete", tampered)
    seal = trainer.send(manifest_of(NEW, 1), NEW.items())
    with pytest.raises(WireError, match="1 of 6 buckets differ"):
        receiver.verify(seal, TIMEOUT_S)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "must be an absolute path"),
        ({"directory": "here"}, "an absolute path"),
        ({"directory": "/proc/1/no"}, "cannot be written"),
    ],
)
def test_invalid_file_directories_raise_errors(options, text):
    with pytest.raises((TransportError, PeerLostError), match=text):
        Trainer([Receiver("engine")], "files", **options).send(manifest_of(NEW, 1), NEW.items())


def test_foreign_shared_memory_is_refused():
    memory = SharedSlots.create(100)
    space, pid, number, mark, size = memory.address()
    opened, content = SharedSlots.open([space, pid, number, mark, size], "the sender"), torch.arange(101).byte()
    memory.write(1, content[:100])
    received = torch.zeros_like(content)
    opened.read(1, received[:100])
    assert torch.equal(received[:100], content[:100])
    with pytest.raises(TransportError, match="bucket 2 has 101 bytes, a slot 100"):
        opened.read(1, received)
    with pytest.raises(TransportError, match="on another machine"):
        SharedSlots.open(["elsewhere", pid, number, mark, size], "the sender")
    with pytest.raises(TransportError, match="does not have the mark"):
        SharedSlots.open([space, pid, number, "0" * 32, size], "the sender")
    with pytest.raises(TransportError, match="is not 266 bytes long"):
        SharedSlots.open([space, pid, number, mark, 101], "the sender")
    with pytest.raises(TransportError, match="cannot be opened"):
        SharedSlots.open([space, pid, 9999, mark, size], "the sender")
    memory.close()


class Shouting(GlooTransport):
    """Transport of a third party."""


def test_registered_transport_serves_an_update(monkeypatch):
    """Register a factory under a name on both sides, as docs/extend.md describes."""
    monkeypatch.setattr(base, "TRANSPORTS", dict(base.TRANSPORTS))
    setups = []

    def factory(setup):
        setups.append((setup.group.rank, dict(setup.options), setup.manifest.version))
        return Shouting(setup)

    register_transport("shouting", factory, device_types=["cpu"])
    assert "shouting" in transport_names()
    receiver, engine = Receiver("engine"), Engine()
    seal = Trainer([receiver], "shouting", loud=True).push(4, NEW)
    receiver.commit(seal.update, engine.load)
    assert same(engine.weights, NEW)
    assert sorted(setups) == [(0, {"loud": True}, 4), (1, {"loud": True}, 4)]
    for name in ("shouting", "gloo"):
        with pytest.raises(TransportError, match=f"{name}' is already registered; known: .*gloo"):
            register_transport(name, factory, ["cpu"])


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, IndexError])
def test_error_of_a_library_on_its_thread_is_raised_by_the_wait(kind):
    def fails():
        raise kind("no such interface")

    group = SimpleNamespace(check=lambda: None)
    work = base.ThreadWork(fails, torch.zeros(1), group, "library")  # type: ignore[reportArgumentType]
    with pytest.raises(TransportError, match="library: no such interface") as caught:
        work.wait(5.0)
    assert type(caught.value.__cause__) is kind
