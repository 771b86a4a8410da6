"""Owners, pauses and updates of vLLM's server with a double of its engine that has two workers.

The double stands for vLLM's engine client: it pauses, resumes, and calls the workers' methods. Workers receive with real
receivers; their "model" is a dictionary. ``tests/real_vllm`` tests a real vLLM, mostly with one worker.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_process import TIMEOUT_S

from weightwire.errors import (
    CommitError,
    ManifestError,
    NotServingError,
    OwnerError,
    UpdateError,
    WireError,
)
from weightwire.group import Listener
from weightwire.manifest import Manifest
from weightwire.offer import Offer, Seal
from weightwire.receiver import Receiver
from weightwire.reception import RECEIVING
from weightwire.sender import Sender, spec_of
from weightwire.vllm import contract
from weightwire.vllm import control as module
from weightwire.vllm.__main__ import arguments
from weightwire.vllm.checkpoint import ExpectedTensors
from weightwire.vllm.control import Control
from weightwire.vllm.worker import WorkerExtension


class Updates:
    """Double of a worker's updates: a real receiver, and a dictionary as the model."""

    def __init__(self, number: int) -> None:
        self.number, self.weights, self.faults = number, {"w": torch.zeros(1000)}, set()
        self.receiver = Receiver(f"worker {number}")

    def location(self) -> dict[str, Any]:
        return self.receiver.location().to_json()

    def forget(self, target: str) -> None:
        if "forget" in self.faults:
            raise RuntimeError("not now")
        self.receiver.forget(target)

    def begin(self, offer: dict[str, Any]) -> None:
        if "refuse" in self.faults:
            raise ManifestError("not for this worker")
        self.receiver.open(Offer.from_json(offer), self.number)

    def verify(self, seal: dict[str, Any]) -> dict[str, bool]:
        update = self.receiver.status()["update"]
        arrived = update is None or update["state"] != RECEIVING
        if arrived:
            self.receiver.verify(Seal.from_json(seal), TIMEOUT_S)
        return {"verified": arrived}

    def commit(self, update: str) -> dict[str, Any]:
        before = self.weights

        def load(tensors: Any) -> None:
            self.weights = {"w": torch.full((1000,), torch.nan)}  # half of it
            if "load" in self.faults:
                raise RuntimeError("a shape")
            self.weights = {name: tensor.clone() for name, tensor in tensors}

        def restore() -> None:
            if "restore" in self.faults:
                raise RuntimeError("no memory")
            self.weights = before

        self.receiver.commit(update, load, restore)
        return {"way": "reload", "seconds": 0.0, "reload_reason": "a double"}

    def revert(self, update: str, reason: str) -> None:
        if self.receiver.status()["update"]["state"] == "committed":
            self.receiver.revert(update, reason)
        elif not self.receiver.serving:
            raise NotServingError("not serving")

    def settle(self, update: str) -> None:
        if "settle" in self.faults:
            raise RuntimeError("not now")
        self.receiver.settle(update)

    def drop(self, update: str) -> None:
        self.receiver.drop(update)

    def release(self) -> None:
        self.receiver.release()


class Worker(WorkerExtension):
    def __init__(self, number: int) -> None:
        self.updates, self.model_runner = Updates(number), SimpleNamespace()

    def weightwire_updates(self) -> Any:
        return self.updates


class Engine:
    """Double of vLLM's engine client, with the methods that the control uses."""

    def __init__(self, workers: int = 2) -> None:
        self.workers = [Worker(number) for number in range(workers)]
        parallel = SimpleNamespace(world_size=workers, world_size_across_dp=workers)
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel,
            device_config=SimpleNamespace(device_type="cpu"),
            model_config=SimpleNamespace(enable_sleep_mode=True, model="double", hf_config=SimpleNamespace()),
        )
        self.paused, self.asleep, self.no_memory, self.calls = False, False, False, []
        self.messages: list[str] = []
        """All messages, calls of the workers included."""
        self.failing_stamp = ""
        self.engine_core = self.renderer = self

    async def clear_mm_cache_async(self) -> None: ...

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        await self.pause_scheduler_async(mode, clear_cache)

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        assert clear_cache
        self.paused = True
        self.messages.append("pause")
        self.calls.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self.paused = False
        self.messages.append("resume")
        self.calls.append("resume")

    async def sleep(self, level: int, mode: str) -> None:
        assert self.paused
        self.asleep = True
        self.calls.append(f"sleep {level} {mode}")

    async def wake_up(self) -> None:
        if self.no_memory:
            raise RuntimeError("out of memory")
        self.asleep = False
        self.calls.append("wake up")

    async def is_paused(self) -> bool:
        return self.paused

    async def update_weight_version(self, version: str) -> None:
        self.messages.append("stamp")
        if version == self.failing_stamp:
            raise RuntimeError("no stamp")
        self.calls.append(f"version {version}")

    async def collective_rpc(self, method: str, timeout: float, args: tuple[Any, ...]) -> list[Any]:
        assert method == "weightwire"
        self.messages.append(args[0])
        if args[0] == "commit":
            assert self.paused
        return [worker.weightwire(*args) for worker in self.workers]

    @property
    def values(self) -> list[float]:
        return [float(worker.updates.weights["w"][0]) for worker in self.workers]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def control(engine: Engine) -> Control:
    return Control(engine)


LISTENER: list[Listener] = []


def offer_of(value: float, version: int, owner: str = "a#1", workers: int = 2) -> tuple[Offer, dict[str, torch.Tensor]]:
    if not LISTENER:
        LISTENER.append(Listener())
    weights = {"w": torch.full((1000,), value)}
    manifest = Manifest(version, (spec_of("w", weights["w"]),), 1024)
    name = LISTENER[0].new_group(["trainer", "worker 0", "worker 1"][: workers + 1])
    return Offer(name, owner, "127.0.0.1", LISTENER[0].port, 1, workers, "gloo", TIMEOUT_S, 60.0, manifest), weights


async def push(control: Control, value: float, version: int, owner: str = "a#1", workers: int = 2) -> None:
    offer, weights = offer_of(value, version, owner, workers)
    await owned(control, owner, "begin_update", offer)
    seal = await asyncio.to_thread(send, offer, weights)
    await owned(control, owner, "verify", seal, TIMEOUT_S)
    await owned(control, owner, "commit", offer.update)


async def owned(control: Control, owner: str, call: str, *arguments: Any) -> None:
    """Make a call that changes the engine, as its owner."""
    async with control.owned(owner) as engine:
        await getattr(engine, call)(*arguments)


def send(offer: Offer, weights: dict[str, torch.Tensor]) -> Seal:
    with Sender(offer) as sender:
        return sender.send(weights.items())


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 100))


@pytest.mark.parametrize("workers", [1, 2])
def test_only_the_commit_and_the_stamp_are_within_the_pause(workers):
    """Count the messages for which generation waits: two at the same time, and the one that ends the pause."""
    engine = Engine(workers)
    control = Control(engine)

    async def act():
        await control.claim("a#1", 60)
        for version in (1, 2):
            engine.messages.clear()
            await push(control, float(version), version, workers=workers)
            await asyncio.sleep(0)
            begin, end = engine.messages.index("pause"), engine.messages.index("resume")
            assert sorted(engine.messages[begin + 1 : end]) == ["commit", "stamp"]
            assert engine.messages[end + 1 :] == ["settle"]
            assert engine.values == [float(version)] * workers

    run(act())


def test_commit_whose_version_cannot_be_stamped_is_undone(control, engine):
    async def act():
        await control.claim("a#1", 60)
        await push(control, 3.0, 1)
        engine.failing_stamp = "2"
        with pytest.raises(RuntimeError, match="no stamp"):
            await push(control, 4.0, 2)
        assert (engine.values, control.active_version(), engine.paused, control.not_serving) == (
            [3.0, 3.0],
            1,
            False,
            None,
        )
        assert engine.calls[-2:] == ["version 1", "resume"]
        engine.failing_stamp = ""
        await push(control, 5.0, 2)
        assert (engine.values, control.active_version()) == ([5.0, 5.0], 2)

    run(act())


def test_commit_that_is_cancelled_is_undone(control, engine):
    async def act():
        await control.claim("a#1", 60)
        await push(control, 3.0, 1)
        gate, stamp = asyncio.Event(), engine.update_weight_version

        async def hanging(version):
            if version == "2":
                await gate.wait()
            await stamp(version)

        engine.update_weight_version = hanging
        pushing = asyncio.ensure_future(push(control, 4.0, 2))
        while engine.values != [4.0, 4.0]:
            await asyncio.sleep(0.01)
        pushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pushing
        assert (engine.values, control.active_version(), engine.paused) == ([3.0, 3.0], 1, False)
        await push(control, 5.0, 3)
        assert (engine.values, control.active_version()) == ([5.0, 5.0], 3)

    run(act())


def test_update_that_its_owner_has_left_open_is_dropped_after_its_lease(engine):
    clock = {"now": 0.0}
    control = Control(engine, lambda: clock["now"])

    async def act():
        await control.claim("a#1", 3600)
        left, _ = offer_of(1.0, 1)
        await owned(control, "a#1", "begin_update", left)
        clock["now"] = 59.0
        offer, _ = offer_of(2.0, 2)
        with pytest.raises(UpdateError, match="is under way"):
            await owned(control, "a#1", "begin_update", offer)
        clock["now"] = 61.0
        await push(control, 3.0, 3)
        assert (engine.values, control.active_version()) == ([3.0, 3.0], 3)
        with pytest.raises(UpdateError, match=f"{left.update} is not under way"):
            await owned(control, "a#1", "commit", left.update)

    run(act())


@pytest.mark.parametrize("failing", [0, 1])
def test_failed_worker_reverts_all_workers(control, engine, failing):
    async def act():
        await control.claim("a#1", 60)
        await push(control, 3.0, 1)
        engine.workers[failing].updates.faults = {"load"}
        with pytest.raises(CommitError, match=rf"worker {failing}: .*a shape") as caught:
            await push(control, 4.0, 2)
        assert not isinstance(caught.value, NotServingError)
        assert (engine.values, control.active_version(), engine.paused, control.not_serving) == (
            [3.0, 3.0],
            1,
            False,
            None,
        )
        engine.workers[failing].updates.faults = set()
        await push(control, 5.0, 2)
        assert (engine.values, control.active_version()) == ([5.0, 5.0], 2)

    run(act())


def test_failed_restore_of_a_worker_stops_serving(control, engine):
    async def act():
        await control.claim("a#1", 60)
        engine.workers[1].updates.faults = {"load", "restore"}
        with pytest.raises(NotServingError, match="could not be restored"):
            await push(control, 4.0, 1)
        assert "pause abort" in engine.calls
        assert control.not_serving is not None
        assert engine.values[0] == 0.0
        engine.workers[1].updates.faults = set()
        await push(control, 5.0, 2)
        assert (engine.values, control.not_serving, engine.paused) == ([5.0, 5.0], None, False)

    run(act())


def test_offer_refused_by_one_worker_is_dropped_by_all(control, engine):
    async def act():
        await control.claim("a#1", 60)
        engine.workers[1].updates.faults = {"refuse"}
        offer, _ = offer_of(1.0, 1)
        with pytest.raises(ManifestError, match="worker 1: not for this worker"):
            await owned(control, "a#1", "begin_update", offer)
        states = [worker.updates.receiver.status()["update"] for worker in engine.workers]
        assert (states[0]["state"], states[1]) == ("dropped", None)
        with pytest.raises(UpdateError, match="was dropped"):
            await owned(control, "a#1", "commit", offer.update)
        engine.workers[1].updates.faults = set()
        await push(control, 5.0, 1)

    run(act())


def test_only_the_owner_updates_the_engine(control, engine):
    async def act():
        await control.claim("a#1", 60)
        with pytest.raises(OwnerError, match=r"owned by a#1.*b#1 can claim it then"):
            await control.claim("b#1", 60)
        await push(control, 1.0, 7)
        offer, _ = offer_of(2.0, 8)
        await owned(control, "a#1", "begin_update", offer)
        await control.claim("a#2", 60)  # a restarted trainer: its update is dropped and its versions restart
        with pytest.raises(OwnerError, match="its owner is a#2"):
            await owned(control, "a#1", "commit", offer.update)
        await push(control, 3.0, 1, owner="a#2")
        await control.claim("b#1", 0.05, take_over=True)
        await asyncio.sleep(0.1)
        with pytest.raises(OwnerError, match="nobody has claimed it, or the claim has lapsed"):
            await owned(control, "b#1", "resume")
        await control.claim("c#1", 60)
        control.release("c#1")
        await control.claim("d#1", 60)
        foreign, _ = offer_of(2.0, 8, owner="e#1")
        with pytest.raises(OwnerError, match="e#1 does not own the engine: its owner is d#1"):
            await owned(control, "d#1", "begin_update", foreign)

    run(act())


def test_claim_ends_a_verify_of_the_last_owner(control):
    async def act():
        await control.claim("a#1", 60)
        offer, _ = offer_of(1.0, 1)
        await owned(control, "a#1", "begin_update", offer)
        seal = Seal(offer.update, 1, offer.manifest.identity, ("0" * 16,) * 4)
        verifying = asyncio.ensure_future(owned(control, "a#1", "verify", seal, TIMEOUT_S))
        await asyncio.sleep(0.1)
        await asyncio.wait_for(control.claim("b#1", 60, take_over=True), TIMEOUT_S / 4)
        with pytest.raises(OwnerError, match=r"b#1 has claimed it"):
            await verifying
        await push(control, 3.0, 1, owner="b#1")

    run(act())


async def lapsed(engine):
    while engine.paused:
        await asyncio.sleep(0.01)


def test_a_pause_lapses_and_a_commit_within_it_leaves_it(control, engine):
    async def act():
        await control.claim("a#1", 60)
        await owned(control, "a#1", "pause", 0.05)
        await owned(control, "a#1", "pause", 3600)  # renewed
        await asyncio.sleep(0.2)
        await push(control, 1.0, 1)
        assert engine.paused
        await owned(control, "a#1", "pause", 0.05)
        await asyncio.wait_for(lapsed(engine), 60)
        await owned(control, "a#1", "pause", 60)
        await owned(control, "a#1", "resume")
        assert not engine.paused
        for lease_s in (0, -1, float("nan"), 1e9):
            with pytest.raises(WireError, match="a lease of"):
                await owned(control, "a#1", "pause", lease_s)

    run(act())


def test_engine_sleeps_and_wakes_up_for_an_update(control, engine):
    async def act():
        await control.claim("a#1", 60)
        await push(control, 1.0, 1)
        engine.calls.clear()
        await owned(control, "a#1", "sleep", 60)
        await owned(control, "a#1", "sleep", 60)  # renewed
        assert (engine.paused, engine.asleep, (await control.info())["asleep"]) == (True, True, True)
        assert [worker.updates.receiver.keeps_memory for worker in engine.workers] == [False, False]
        with pytest.raises(UpdateError, match="asleep"):
            await push(control, 2.0, 2)
        await owned(control, "a#1", "resume")
        assert engine.calls == ["pause keep", "sleep 1 keep", "wake up", "resume"]
        await push(control, 2.0, 2)
        assert engine.values == [2.0, 2.0]

    run(act())


def test_sleep_ends_with_its_lease_or_with_another_owner(control, engine, monkeypatch):
    monkeypatch.setattr(module, "WAKE_RETRY_S", 0.05)

    async def act():
        await control.claim("a#1", 60)
        engine.no_memory = True
        await owned(control, "a#1", "sleep", 0.05)
        await asyncio.sleep(0.3)
        assert engine.asleep  # the trainer holds the memory
        engine.no_memory = False
        await asyncio.wait_for(lapsed(engine), 60)
        assert not engine.asleep
        await owned(control, "a#1", "sleep", 60)
        await control.claim("b#1", 60, take_over=True)
        assert (engine.paused, engine.asleep) == (False, False)

    run(act())


def test_sleep_is_refused_during_an_update_and_without_the_mode(control, engine):
    async def act():
        await control.claim("a#1", 60)
        offer, _ = offer_of(1.0, 1)
        await owned(control, "a#1", "begin_update", offer)
        with pytest.raises(UpdateError, match="is under way: the engine cannot sleep"):
            await owned(control, "a#1", "sleep", 60)
        await owned(control, "a#1", "drop", offer.update)
        engine.vllm_config.model_config.enable_sleep_mode = False
        with pytest.raises(WireError, match="--enable-sleep-mode"):
            await owned(control, "a#1", "sleep", 60)
        assert not engine.paused

    run(act())


# --- pure functions ---


@pytest.mark.parametrize("version", ["0.24.0", "0.25.1", "0.26.0", "0.33.0", "0.33.1.post1"])
def test_supported_versions(version):
    release = contract.supported(version)
    assert contract.stages(release) == (release >= (0, 26))
    options = arguments(["--model", "m"], release, "cuda")
    assert ("--weight-transfer-config" in options) == (release >= (0, 26))


@pytest.mark.parametrize("version", ["0.23.0", "0.34.0", "1.0", "dev"])
def test_other_versions_are_refused(version):
    with pytest.raises(WireError, match=r"not supported: weightwire knows how versions 0\.24 to 0\.33"):
        contract.supported(version)


def test_server_options():
    options = arguments(["--model", "m", "--port=1"], (0, 32), "cuda")
    assert options[options.index("--host") + 1] == "127.0.0.1"
    assert options[options.index("--middleware") + 1] == "weightwire.vllm.guard.Guard"
    assert "127.0.0.1" not in arguments(["--host", "10.0.0.1"], (0, 32), "cuda")
    # torch's generators for the CPU have no offset, which vLLM sets back for a seeded prompt that it splits.
    assert "--no-enable-chunked-prefill" not in options
    assert "--no-enable-chunked-prefill" in arguments(["--max-num-batched-tokens=64"], (0, 32), "cpu")
    assert "--no-enable-chunked-prefill" not in arguments(["--enable-chunked-prefill"], (0, 32), "cpu")
    for option in ("--worker-extension-cls", "--weight_transfer_config={}", "--api-server-count"):
        with pytest.raises(SystemExit):
            arguments([option, "x"], (0, 32), "cuda")


def test_tied_head_is_optional_and_untied_head_is_required(tmp_path):
    from safetensors.torch import save_file

    head, body = {"lm_head.weight": torch.ones(3, 2)}, {"embed.weight": torch.ones(3, 2), "norm": torch.ones(2)}
    for stored in (body, body | head):
        save_file(dict(stored), tmp_path / "model.safetensors")
        tied = ExpectedTensors(str(tmp_path), SimpleNamespace(tie_word_embeddings=True))
        for manifest_parts in (body, body | head):
            tied.check(Manifest(1, tuple(spec_of(*item) for item in manifest_parts.items())))
    untied = ExpectedTensors(str(tmp_path), SimpleNamespace(tie_word_embeddings=False))
    with pytest.raises(ManifestError, match=r"lm_head\.weight is missing"):
        untied.check(Manifest(1, tuple(spec_of(*item) for item in body.items())))


def test_prediction_head_comes_whole_or_not_at_all(tmp_path):
    from safetensors.torch import save_file

    body = {"model.layers.0.w": torch.ones(2), "model.layers.1.w": torch.ones(2)}
    head = {"model.layers.2.w": torch.ones(2), "model.layers.2.enorm.weight": torch.ones(2)}
    save_file(body | head, tmp_path / "model.safetensors")
    config = SimpleNamespace(tie_word_embeddings=False, num_hidden_layers=2, num_nextn_predict_layers=1)
    expected = ExpectedTensors(str(tmp_path), config)
    for manifest_parts in (body, body | head):
        expected.check(Manifest(1, tuple(spec_of(*item) for item in manifest_parts.items())))
    part = {name: tensor for name, tensor in (body | head).items() if "enorm" not in name}
    with pytest.raises(ManifestError, match=r"model\.layers\.2\.enorm\.weight is missing"):
        expected.check(Manifest(1, tuple(spec_of(*item) for item in part.items())))
    baseline = ExpectedTensors(str(tmp_path), SimpleNamespace(tie_word_embeddings=False, num_hidden_layers=3))
    with pytest.raises(ManifestError, match=r"model\.layers\.2\.\S+ is missing"):
        baseline.check(Manifest(1, tuple(spec_of(*item) for item in body.items())))
