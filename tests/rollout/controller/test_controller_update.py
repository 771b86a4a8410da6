"""Weight updates through the controller: a trainer in this process, two engines with 2 and 1 members over Gloo."""

from __future__ import annotations

import asyncio

import pytest
import torch
from controller_doubles import KEY, Blocking, BlockingClient

from megascend.errors import EngineError
from megascend.rollout.controller.controller import Controller
from megascend.rollout.controller.server import ControllerServer
from weightwire.engine import InferenceEngine
from weightwire.engine_calls import LoopThread
from weightwire.group import Listener
from weightwire.keys import Key
from weightwire.manifest import Manifest
from weightwire.offer import Offer, Seal
from weightwire.receiver import Receiver
from weightwire.sender import Sender, spec_of

TIMEOUT_S = 60.0


class ReceivingEngine(InferenceEngine):
    """An engine whose members each have a receiver and store the weights they load."""

    def __init__(self, name: str, members: int) -> None:
        self.name = name
        self.weights: list[dict[str, torch.Tensor]] = [{} for _ in range(members)]
        self.spoil = False
        self._receivers = [Receiver(f"{name}/{member}") for member in range(members)]

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
    claim.begin_update(Offer(update, "trainer", *endpoint, "gloo", TIMEOUT_S, TIMEOUT_S, manifest))
    with Sender.connect(listener, update, manifest, transport="gloo", timeout_s=TIMEOUT_S) as sender:
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
