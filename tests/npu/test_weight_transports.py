"""Weights over HCCL on the simulated device: from a trainer to an engine; lost peers; a disabled communicator."""

from __future__ import annotations

import json
import os
import signal
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from wire_members import LISTENERS, next_group, publish, run_meeting, run_members, wait_for, wait_until

from megascend.testing import Lost, run_distributed, write_tiny_checkpoint
from weightwire.digest import digest
from weightwire.errors import DeadlineError, PeerLostError, TransportError
from weightwire.group import Listener
from weightwire.manifest import Manifest, TensorSpec
from weightwire.offer import Offer, Seal
from weightwire.receiver import Receiver
from weightwire.sender import Sender, spec_of
from weightwire.transports import Setup, hccl, make_transport
from weightwire.transports.base import make_pairs
from weightwire.vllm.hccl_transport import require_working

pytestmark = pytest.mark.usefixtures("npu")
MANIFEST = Manifest(1, (TensorSpec("a", "uint8", (1000,)),))
DOUBLE = Path(__file__).resolve().parents[1] / "doubles" / "vllm_ascend_packages"


def transport(name: str, group: Any, timeout_s: float = 20.0) -> tuple[Any, torch.device]:
    device = torch.device("npu", group.rank)
    torch.npu.set_device(device)
    return make_transport(name, Setup(group, MANIFEST, device, timeout_s)), device


def buckets(name: str, group: Any) -> list[bool]:
    """Send buckets of several sizes; check content and digest of each."""
    medium, device = transport(name, group)
    checks = []
    for number, size in enumerate((1, 5001, 200_000)):
        content = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
        buffer = (content if group.rank == 0 else torch.zeros_like(content)).to(device)
        (medium.send if group.rank == 0 else medium.receive)(buffer).wait(20)
        checks.append(torch.equal(buffer.cpu(), content))
        checks.append(digest("multilinear64", buffer) == digest("multilinear64", content))
    medium.close()
    assert not torch.distributed.is_initialized()
    return checks


def messages(group: Any) -> list[bool]:
    """Send a message from every member to every other one, in one order, and check what arrives."""
    device = torch.device("npu", group.rank)
    torch.npu.set_device(device)
    medium, checks = make_pairs("hccl", Setup(group, MANIFEST, device, 20.0)), []
    for sender in range(group.size):
        for receiver in range(group.size):
            content = torch.full((1000 + sender,), 10 * sender + receiver, dtype=torch.uint8)
            if sender != receiver and group.rank == sender:
                medium.send_to(content.to(device), receiver).wait(20)
            elif sender != receiver and group.rank == receiver:
                buffer = torch.zeros_like(content).to(device)
                medium.receive_from(buffer, sender).wait(20)
                checks.append(torch.equal(buffer.cpu(), content))
    medium.close()
    return checks


def test_messages_between_any_two_members() -> None:
    assert run_members(messages, 3) == [[True] * 2] * 3


def test_next_update_reuses_the_communicator() -> None:
    def on_member(meet: Any) -> list[Any]:
        first = meet()
        checks = buckets("hccl", first) + buckets("hccl", next_group(first))
        (communicator,) = hccl.COMMUNICATORS._cached.values()
        return [all(checks), communicator.made_in == first.name]

    assert run_meeting(on_member, 2) == [[True, True]] * 2


def test_update_from_two_trainer_ranks_to_an_engine(tmp_path: Path) -> None:
    """Send from TP2 on npu:0 and npu:1 to an engine process on npu:2, which gets the checkpoint's tensors bitwise."""
    checkpoint = write_tiny_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=2)
    paths = {name: tmp_path / name for name in ("offer", "seal", "verified", "committed")}

    def trainer() -> int:
        from megascend import Parallel
        from megascend.backends import MegatronBackend

        backend = MegatronBackend(checkpoint, Parallel(tensor=2), precision="fp32", platform="npu", self_check=False)

        def weights() -> Any:
            return backend.named_weights(receivers="main")

        specs = tuple(spec_of(name, tensor) for name, tensor in weights())
        if torch.distributed.get_rank() != 0:
            for _ in weights():
                raise AssertionError("a rank that has nothing to send was given a tensor")
            torch.distributed.barrier()
            return 0
        listener = Listener()
        LISTENERS.append(listener)
        manifest = Manifest(7, specs, bucket_bytes=100_000)
        name = listener.new_group(["trainer", "engine"])
        offer = Offer(name, "test", listener.host, listener.port, 1, 1, "hccl", 60.0, 60.0, manifest)
        publish(paths["offer"], offer.to_json())
        with Sender(offer, device="npu:0") as sender:
            publish(paths["seal"], sender.send(weights()).to_json())
        wait_for(paths["committed"])
        torch.distributed.barrier()  # the trainer's own group works as before
        return sender.traffic.nbytes

    def engine() -> None:
        torch.npu.set_device(2)
        receiver = Receiver("engine", device="npu:2", version=6)
        offer = Offer.from_json(wait_for(paths["offer"]))
        receiver.open(offer)
        seal = Seal.from_json(wait_for(paths["seal"]))
        receiver.verify(seal, 60.0)
        received: dict[str, torch.Tensor] = {}
        receiver.commit(offer.update, lambda tensors: received.update((name, tensor.cpu()) for name, tensor in tensors))
        expected = load_file(checkpoint / "model.safetensors")
        publish(
            paths["committed"],
            {
                "names": sorted(received) == sorted(expected),
                "equal": all(torch.equal(received[name], expected[name].float()) for name in received),
                "version": receiver.version(),
            },
        )

    receiving = get_context("fork").Process(target=engine, daemon=True)
    receiving.start()
    try:
        sent_bytes = run_distributed(trainer, 2, init=False, timeout_s=200)
    finally:
        receiving.join(20)
        receiving.kill()
    assert json.loads(paths["committed"].read_text()) == {"names": True, "equal": True, "version": 7}
    assert sent_bytes == [sum(tensor.numel() * 4 for tensor in load_file(checkpoint / "model.safetensors").values()), 0]


def test_abort_ends_the_wait_for_a_silent_sender(tmp_path: Path) -> None:
    """The library's own wait ends with an error, long before the timeout of the group, in which nothing else would end it."""

    def on_member(group: Any) -> list[Any]:
        medium, device = transport("hccl", group, 3600.0)
        if group.rank == 0:
            wait_until((tmp_path / "aborted").exists)
            return []
        received = medium.receive(torch.zeros(1000, dtype=torch.uint8, device=device))._work
        pending = not received.is_completed()
        medium.abort()
        with pytest.raises(RuntimeError):
            received.wait()
        (tmp_path / "aborted").touch()
        medium.close()
        return [pending, hccl.COMMUNICATORS._cached == {}]

    assert run_members(on_member, 2) == [[], [True, True]]


@pytest.mark.parametrize(
    ("failure", "error"), [("dies", PeerLostError), ("is silent", DeadlineError)], ids=["dies", "is silent"]
)
def test_lost_sender_raises_in_time(failure: str, error: type[Exception], tmp_path: Path) -> None:
    def on_member(group: Any) -> list[Any]:
        medium, device = transport("hccl", group)
        if group.rank == 0:
            if failure == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            wait_until((tmp_path / "named").exists)
            return []
        work = medium.receive(torch.zeros(1000, dtype=torch.uint8, device=device))
        try:
            work.wait(2.0)
        except TransportError as caught:
            explanation = group.explain(caught, "receiving bucket 1")
        (tmp_path / "named").touch()
        medium.abort()
        medium.close()
        return [
            type(explanation).__name__,
            "the sender (trainer" in str(explanation),
            int(torch.ones(3, device=device).sum()),
        ]

    sender, receiver = run_members(on_member, 2, **({"expect_lost": {0}} if failure == "dies" else {}))
    assert receiver == [error.__name__, True, 3]
    assert sender == (Lost(-9) if failure == "dies" else [])


@pytest.fixture
def vllm_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the double of vllm-ascend importable; remove its modules afterwards."""
    monkeypatch.syspath_prepend(str(DOUBLE))
    monkeypatch.setenv("HCCL_SO_PATH", str(DOUBLE / "no libhccl.so"))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("vllm", "vllm_ascend"):
            del sys.modules[name]


@pytest.mark.usefixtures("vllm_ascend")
def test_disabled_communicator_is_refused() -> None:
    """Use the double without libhccl: like the real one it returns from every broadcast without sending."""
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm_ascend.distributed.device_communicators.pyhccl import PyHcclCommunicator

    group = StatelessProcessGroup()
    group.rank, group.world_size = 1, 2
    silent = PyHcclCommunicator(group, "npu:1")
    buffer = torch.zeros(10, dtype=torch.uint8, device="npu:1")
    assert silent.broadcast(buffer, src=0) is None  # no error, and no bytes
    with pytest.raises(TransportError, match=r"disabled: it could not load libhccl\.so"):
        require_working(silent)

    def on_member(group: Any) -> str:
        with pytest.raises(TransportError) as caught:
            transport("vllm_hccl", group)
        return str(caught.value)

    for message in run_members(on_member, 2):
        assert "PyHcclCommunicator is disabled" in message


@pytest.mark.usefixtures("vllm_ascend")
def test_working_communicator_sends_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the unique id as bytes: nothing is pickled."""
    monkeypatch.setenv("HCCL_SO_PATH", str(DOUBLE / "vllm" / "__init__.py"))  # any file: the double loads nothing

    def on_member(group: Any) -> list[bool]:
        import pickle

        monkeypatch.setattr(pickle, "loads", None)
        monkeypatch.setattr(pickle, "load", None)
        try:
            return buckets("vllm_hccl", group)
        finally:
            monkeypatch.undo()

    assert run_members(on_member, 2) == [[True] * 6] * 2
