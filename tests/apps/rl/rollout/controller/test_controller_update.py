"""Weight updates through the controller: a trainer in this process, two engines with 2 and 1 members over Gloo."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from controller_doubles import KEY, Blocking, BlockingClient
from safetensors.torch import load_file

from megascend import Parallel, WeightSync
from megascend.apps.rl.rollout.controller.client import ControllerEngine
from megascend.apps.rl.rollout.controller.controller import Controller
from megascend.apps.rl.rollout.controller.server import ControllerServer
from megascend.errors import EngineError, WeightSyncError
from megascend.sync.push import PushResult
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint
from support.trainers import make_trainer
from weightwire.engine import InferenceEngine
from weightwire.engine_calls import LoopThread
from weightwire.group import Listener
from weightwire.keys import Key
from weightwire.manifest import Manifest
from weightwire.offer import Offer, Seal
from weightwire.receiver import Receiver
from weightwire.sender import Sender, spec_of

pytestmark = pytest.mark.waiting

TIMEOUT_S = 60.0


class ReceivingEngine(InferenceEngine):
    """An engine whose members each have a receiver and store the weights they load."""

    def __init__(self, name: str, members: int) -> None:
        self.name = name
        self.spoil = False
        self.start(members)

    def start(self, members: int) -> None:
        """Start the members, or others in their place, behind the same client."""
        self.weights: list[dict[str, torch.Tensor]] = [{} for _ in range(members)]
        self._receivers = [Receiver(f"{self.name}/{member}") for member in range(members)]

    async def receivers(self) -> int:
        return len(self._receivers)

    async def begin_update(self, offer: Offer) -> None:
        for worker, receiver in enumerate(self._receivers):
            receiver.open(offer, worker)

    async def verify(self, seal: Seal, timeout_s: float) -> None:
        if self.spoil:
            seal = Seal(seal.update, seal.version, seal.manifest, ("0" * len(seal.digests[0]), *seal.digests[1:]))
        for receiver in self._receivers:
            await asyncio.to_thread(receiver.verify, seal, timeout_s)

    async def commit(self, update: str) -> None:
        for receiver, weights in zip(self._receivers, self.weights, strict=True):
            receiver.commit(update, lambda tensors, weights=weights: weights.update((n, t.clone()) for n, t in tensors))

    async def drop(self, update: str) -> None:
        for receiver in self._receivers:
            receiver.drop(update)


def push(listener: Listener, claim: Blocking, version: int, weights: dict[str, torch.Tensor]) -> None:
    """Send one update as a trainer does."""
    names = ["trainer", *(f"member {number}" for number in range(1, claim.receivers() + 1))]
    assert len(names) == 4
    manifest = Manifest(version, tuple(spec_of(*item) for item in weights.items()), bucket_bytes=64)
    update = listener.new_group(names)
    endpoint = (listener.host, listener.port, 1, len(names) - 1)
    offer = Offer(update, "trainer", *endpoint, "gloo", TIMEOUT_S, TIMEOUT_S, manifest)
    claim.begin_update(offer)
    with Sender(offer) as sender:
        seal = sender.send(weights.items())
    claim.verify(seal, TIMEOUT_S)
    claim.commit(update)


def test_weights_arrive_on_all_members_or_on_none() -> None:
    engines = [ReceivingEngine("one", 2), ReceivingEngine("two", 1)]
    thread, listener = LoopThread("controller"), Listener()
    old, spoiled, new = (
        {"a": torch.full((5, 7), number), "b": torch.arange(9.0) * number} for number in (1.0, 2.0, 3.0)
    )

    async def start() -> ControllerServer:
        server = ControllerServer(Controller(engines), Key(KEY))
        await server.start()
        return server

    def in_force() -> list[float]:
        return [weights["a"].unique().item() for engine in engines for weights in engine.weights]

    server = thread.run(start())
    try:
        with (
            BlockingClient(str(server.address), Key(KEY), caller="trainer") as client,
            client.claim("trainer") as claim,
        ):
            push(listener, claim, 1, old)
            assert in_force() == [1.0, 1.0, 1.0]
            engines[1].spoil = True
            with pytest.raises(EngineError, match=r"verify failed: engine 'two': DigestError: .*\(done by one\)"):
                push(listener, claim, 2, spoiled)
            assert in_force() == [1.0, 1.0, 1.0]
            engines[1].spoil = False
            push(listener, claim, 3, new)
            assert in_force() == [3.0, 3.0, 3.0]
            assert all(torch.equal(weights["b"], new["b"]) for engine in engines for weights in engine.weights)
    finally:
        thread.run(server.close())
        thread.close()
        listener.close()


@pytest.mark.usefixtures("megatron_imported")
def test_trainer_of_two_ranks_sends_whole_tensors_through_a_controller(parity_folder: Path, tmp_path: Path) -> None:
    """Sharded updates are the default of several ranks; the engines of a controller refuse them, and are not lost by that."""
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    engines, thread = [ReceivingEngine("one", 2), ReceivingEngine("two", 1)], LoopThread("controller")

    async def start() -> ControllerServer:
        server = ControllerServer(Controller(engines), Key(KEY))
        await server.start()
        return server

    server = thread.run(start())

    def on_rank() -> tuple[PushResult, str]:
        backend = make_trainer(checkpoint, Parallel(tensor=2))
        controlled = ControllerEngine(str(server.address), Key(KEY), owner="trainer") if backend.rank == 0 else None
        served = [] if controlled is None else [controlled]
        with WeightSync(backend, served, bucket_bytes=50_000) as sync:
            result = sync.push(1)
        with WeightSync(backend, served, sharded=True) as sync, pytest.raises(WeightSyncError) as caught:
            sync.push(2)
        backend.export_hf(tmp_path / "hf")
        if controlled is not None:
            controlled.close()
        return result, str(caught.value)

    try:
        results = run_distributed(on_rank, 2, init=False, timeout_s=120)
        expected = load_file(tmp_path / "hf" / "model.safetensors")
        for weights in (weights for engine in engines for weights in engine.weights):
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    finally:
        thread.run(server.close())
        thread.close()
    for result, refusal in results:
        assert not result.sharded
        assert "engines of a controller take whole tensors" in result.why_not_sharded
        assert "sharded=True is not possible" in refusal
