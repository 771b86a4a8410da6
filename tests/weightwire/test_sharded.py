"""Sharded updates: every worker gets its own slices from all ranks of a trainer, verified, completely or not at all."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from in_process import TIMEOUT_S, Engine
from sharding import ShardedTrainer, engine_needs, model, specs_of
from wire_members import cross_messages, run_members

from weightwire.errors import (
    BaseError,
    CommitError,
    DigestError,
    ManifestError,
    PeerLostError,
    PlanError,
    TransportError,
    UpdateError,
    VersionError,
)
from weightwire.manifest import Manifest, TensorSpec
from weightwire.offer import Offer, Seal
from weightwire.plan import Region
from weightwire.receiver import Receiver
from weightwire.sender import Sender
from weightwire.sharded import ShardSender
from weightwire.slices import index_of
from weightwire.transports import Setup
from weightwire.transports.base import make_pairs
from weightwire.vllm.in_place import Copy, Recording

OLD, NEW = model(1), model(2)
SPECS = specs_of(NEW)


def workers(count: int, size: int = 2) -> tuple[list[Receiver], list[list[Region]], list[Engine]]:
    """Build workers of engines of ``size`` workers each, with their needs."""
    needs = [engine_needs(SPECS, size, number % size) for number in range(count)]
    receivers = [Receiver(f"worker-{n}", needs=lambda specs, need=need: need) for n, need in enumerate(needs)]
    return receivers, needs, [Engine() for _ in range(count)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def holds(engine: Engine, needs: list[Region], weights: dict[str, torch.Tensor]) -> bool:
    """Check that an engine has every bit of its slices, and nothing of the rest."""
    values = list(weights.values())
    if list(engine.weights) != list(weights):
        return False
    for index, tensor in enumerate(engine.weights.values()):
        outside = torch.ones(tensor.shape, dtype=torch.bool)
        for piece in needs:
            if piece.tensor == index:
                part = index_of(*piece.box)
                outside[part] = False
                if not torch.equal(bits(tensor[part]), bits(values[index][part])):
                    return False
        if (tensor.dtype, tensor.shape) != (values[index].dtype, values[index].shape):
            return False
        if tensor.is_floating_point() and not bool(tensor[outside].isnan().all()):
            return False
    return True


def commit(receivers: list[Receiver], engines: list[Engine], seal: Seal) -> None:
    for receiver, engine in zip(receivers, engines, strict=True):
        receiver.commit(seal.update, engine.load, engine.restore)
        receiver.settle(seal.update)


@pytest.mark.parametrize("relay", [False, True])
@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
@pytest.mark.parametrize(("ranks", "count", "size"), [(2, 2, 2), (3, 4, 2), (1, 2, 1)])
def test_workers_get_their_slices_bit_for_bit(ranks, count, size, transport, relay):
    receivers, needs, engines = workers(count, size)
    trainer = ShardedTrainer(receivers, needs, ranks=ranks, transport=transport, relay=relay)
    for version, weights in ((1, OLD), (2, NEW)):
        seal = trainer.push(version, weights)
        assert not any(holds(engine, need, weights) for engine, need in zip(engines, needs, strict=True))
        commit(receivers, engines, seal)
        for receiver, engine, need in zip(receivers, engines, needs, strict=True):
            assert holds(engine, need, weights)
            assert receiver.version() == version
    # Sent once to each worker that needs it: by the trainer, or forwarded.
    need_bytes = sum(piece.nbytes(SPECS) for need in needs for piece in need)
    assert trainer.plan is not None
    assert sum(chunk.nbytes * len(chunk.receivers) for chunk in trainer.plan.chunks) == need_bytes
    nbytes = sum(sender.traffic.nbytes for sender in trainer.senders)
    assert nbytes == sum(trainer.plan.traffic[0])
    assert (nbytes == need_bytes) or relay
    assert sum(sender.traffic.delivered for sender in trainer.senders) == need_bytes


@pytest.mark.parametrize("name", ["gloo", "shared_memory"])
def test_receivers_start_messages_of_several_senders_without_waiting(name):
    manifest = Manifest(1, (TensorSpec("a", "uint8", (1000,)),))

    def on_member(group):
        medium = make_pairs(name, Setup(group, manifest, torch.device("cpu"), 20.0))
        try:
            return cross_messages(medium, group, torch.device("cpu"))
        finally:
            medium.close()

    _, _, third, fourth = run_members(on_member, 4)
    assert (third, fourth) == ([[0], [1], [2], [3], [14]], [[10], [11], [12], [13], [4]])


@pytest.fixture
def served():
    """Build two workers with OLD as version 1, and their trainer."""
    receivers, needs, engines = workers(2)
    trainer = ShardedTrainer(receivers, needs)
    commit(receivers, engines, trainer.push(1, OLD))
    return trainer, receivers, needs, engines


def old_and_works_again(served, version: int = 2) -> None:
    trainer, receivers, needs, engines = served
    for engine, need in zip(engines, needs, strict=True):
        assert holds(engine, need, OLD)
    commit(receivers, engines, trainer.push(version, NEW))
    for receiver, engine, need in zip(receivers, engines, needs, strict=True):
        assert holds(engine, need, NEW)
        assert receiver.version() == version


@pytest.mark.parametrize("rank", [0, 1])
def test_flipped_bit_is_detected_and_its_tensor_named(served, rank):
    trainer, receivers, _, _ = served
    assert trainer.plan is not None
    (chunk, peer) = next((step.chunk, step.peer) for step in trainer.plan.shares()[rank].operations if step.chunk == 1)
    name = SPECS[trainer.plan.shares()[rank].chunks[chunk].pieces[0].tensor].name

    def adjust(sender):
        hand_over = sender._hand_over

        def flip(index, message, head, target):
            if sender._group.rank == rank and (index, target) == (chunk, peer):
                message = message.clone()
                message[3] ^= 16
            return hand_over(index, message, head, target)

        sender._hand_over = flip

    seal = trainer.send(2, NEW, adjust=adjust)
    damaged = receivers[peer - 2]
    with pytest.raises(DigestError, match=rf"1 of \d+ buckets differ in multilinear64, .*{name}"):
        damaged.verify(seal, TIMEOUT_S)
    with pytest.raises(UpdateError):
        damaged.commit(seal.update, lambda tensors: pytest.fail("loaded"))
    for receiver in receivers:
        receiver.drop(seal.update)
    old_and_works_again(served)


def test_wrong_versions_plans_and_needs_are_refused(served):
    trainer, receivers, _, _ = served
    manifest = Manifest(2, SPECS, 256)
    with pytest.raises(VersionError, match="version 1 of model is offered, and version 1"):
        receivers[0].open(trainer.offers(Manifest(1, SPECS, 256), NEW)[0])
    with pytest.raises(PlanError, match="plan other is not known here"):
        receivers[0].open(trainer.offers(manifest, NEW, shares=None, plan="other")[0])
    swapped = trainer.offers(manifest, NEW)[1]
    with pytest.raises(PlanError, match=r"worker-0: the plan (sends|leaves out) a part of"):
        receivers[0].open(swapped)
    with pytest.raises(BaseError, match=r"differences from version 1 .* nothing is kept"):
        receivers[0].open(trainer.offers(manifest, NEW, base=1)[0])
    trainer.transport = "files"
    with pytest.raises(TransportError, match="does not carry sharded updates"):
        receivers[0].open(trainer.offers(manifest, NEW)[0])
    trainer.transport = "gloo"
    old_and_works_again(served)


def test_a_seal_without_the_worker_is_refused(served):
    trainer, receivers, _, _ = served
    seal = trainer.send(2, NEW)
    for receiver, by_member in zip(receivers, ({}, {2: ("0",)}), strict=True):
        with pytest.raises(ManifestError, match="the seal is of 0 buckets"):
            receiver.verify(Seal(seal.update, 2, seal.manifest, (), by_member), TIMEOUT_S)
    old_and_works_again(served)


# --- differences ---


def stepped(weights, seed: int, share: float = 0.03):
    """Change a share of the elements by a few units in the last place, and a few by a lot."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, tensor in weights.items():
        new = tensor.clone()
        if new.dtype == torch.bfloat16 and new.numel():
            mask = torch.rand(new.shape, generator=generator) < share
            words = new.view(torch.int16)
            words[mask] += torch.randint(-2, 3, (int(mask.sum()),), generator=generator, dtype=torch.int16)
            new.view(-1)[int(torch.randint(new.numel(), (), generator=generator))] = 1000.0
        result[name] = new
    return result


@pytest.mark.parametrize("relay", [False, True])
@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
def test_differences_give_the_bits_of_complete_updates(transport, relay):
    receivers, needs, engines = workers(4)
    trainer = ShardedTrainer(receivers, needs, transport=transport, relay=relay, keep=True, bucket_bytes=1024)
    weights, shares = model(3), []
    for version in range(1, 7):
        base = version - 1 if version > 1 else None
        commit(receivers, engines, trainer.push(version, weights, base))
        trainer.succeeded(version)
        for engine, need in zip(engines, needs, strict=True):
            assert holds(engine, need, weights)
        traffic = [sender.traffic for sender in trainer.senders]
        shares.append(
            sum(traffic_of.delivered for traffic_of in traffic) / sum(traffic_of.content for traffic_of in traffic)
        )
        weights = stepped(weights, version)
    assert shares[0] == 1.0
    assert max(shares[1:]) < 0.6, shares  # small tensors: heads of messages are a large part


def test_differences_need_the_version_before(served):
    receivers, needs, engines = workers(2)
    trainer = ShardedTrainer(receivers, needs, keep=True)
    commit(receivers, engines, trainer.push(1, OLD))
    trainer.succeeded(1)
    manifest = Manifest(4, SPECS, 256)
    with pytest.raises(BaseError, match=r"differences from version 3 .* version 1 of plan"):
        receivers[0].open(trainer.offers(manifest, NEW, base=3)[0])
    # Refused before anything was touched: the base is still good.
    commit(receivers, engines, trainer.push(2, NEW, base=1))
    trainer.succeeded(2)
    assert all(holds(engine, need, NEW) for engine, need in zip(engines, needs, strict=True))
    # An update that fails uses the base up; the next one is complete.
    seal = trainer.push(3, OLD, base=2)
    for receiver in receivers:
        receiver.drop(seal.update)
    with pytest.raises(BaseError, match="nothing is kept"):
        receivers[0].open(trainer.offers(manifest, NEW, base=2)[0])
    commit(receivers, engines, trainer.push(4, OLD))
    assert all(holds(engine, need, OLD) for engine, need in zip(engines, needs, strict=True))


def test_a_damaged_difference_is_detected_by_the_digest_of_the_whole():
    receivers, needs, engines = workers(2)
    trainer = ShardedTrainer(receivers, needs, keep=True, bucket_bytes=1024)
    commit(receivers, engines, trainer.push(1, OLD))
    trainer.succeeded(1)
    new = stepped(OLD, 5)

    def adjust(sender):
        hand_over, shift = sender._hand_over, []

        def damage(index, message, head, target):
            if head is not None and int(head.view(torch.int64)[0]) == 1 and not shift:
                steps, changed = message[:16].view(torch.int64).tolist()
                short = [n for n in range(16 + steps, 16 + steps + changed) if 1 <= int(message[n]) < 100]
                if short:
                    shift.append(index)
                    message = message.clone()
                    message[short[0]] += 1  # a changed word's difference
            return hand_over(index, message, head, target)

        if sender._group.rank == 0:
            sender._hand_over = damage

    seal = trainer.send(2, new, base=1, adjust=adjust)
    outcomes = []
    for receiver in receivers:
        try:
            receiver.verify(seal, TIMEOUT_S)
        except DigestError as error:
            outcomes.append(str(error))
        receiver.drop(seal.update)
    assert len(outcomes) == 1
    assert "differ in multilinear64" in outcomes[0]
    assert all(holds(engine, need, OLD) for engine, need in zip(engines, needs, strict=True))
    commit(receivers, engines, trainer.push(2, new))
    assert all(holds(engine, need, new) for engine, need in zip(engines, needs, strict=True))


# --- commits in place ---


class ExchangingEngine:
    """A worker whose slices are exchanged with those in the receiver's memory."""

    def __init__(self, receiver: Receiver, needs: list[Region]) -> None:
        self.receiver = receiver
        self.weights = [
            (piece, torch.zeros(piece.sizes, dtype=getattr(torch, SPECS[piece.tensor].dtype))) for piece in needs
        ]
        self.recording = Recording([Copy(values, piece) for piece, values in self.weights], SPECS, {})

    def commit(self, update: str, *, fail: str = "", wait: threading.Event | None = None) -> None:
        exchange, staging = (
            self.recording.exchange(self.receiver.layout(update), keep=True),
            self.receiver.staging(update),
        )

        def load(tensors):
            exchange.run(staging)
            if fail == "load":
                raise ValueError("the device")

        def refill():
            if wait is not None:
                assert wait.wait(60)
            if fail == "refill":
                raise ValueError("the device")
            exchange.refill(staging)

        self.receiver.commit(update, load, exchange.undo, refill)

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        values = list(weights.values())
        return all(
            torch.equal(bits(tensor), bits(values[piece.tensor][index_of(*piece.box)]))
            for piece, tensor in self.weights
        )


@pytest.fixture
def exchanging():
    """Build two workers that commit in place, with OLD as version 1, and their trainer."""
    receivers, needs, _ = workers(2)
    trainer = ShardedTrainer(receivers, needs, keep=True, bucket_bytes=256)
    engines = [ExchangingEngine(*pair) for pair in zip(receivers, needs, strict=True)]
    seal = trainer.push(1, OLD)
    for engine in engines:
        engine.commit(seal.update)
        engine.receiver.settle(seal.update)
    trainer.succeeded(1)
    return trainer, engines


def commit_all(trainer: ShardedTrainer, engines: list[ExchangingEngine], version: int, weights, base=None) -> None:
    seal = trainer.push(version, weights, base)
    for engine in engines:
        engine.commit(seal.update)
    trainer.succeeded(version)
    assert all(engine.holds(weights) for engine in engines)
    # The other one's is settled by the next offer.
    engines[0].receiver.settle(seal.update)


def assert_next_is_complete(trainer: ShardedTrainer, engines: list[ExchangingEngine], base: int, version: int) -> None:
    """Check that no worker has a base, and that a complete update is one again."""
    for offer, engine in zip(trainer.offers(Manifest(version, SPECS, 256), NEW, base=base), engines, strict=True):
        with pytest.raises(BaseError, match="nothing is kept"):
            engine.receiver.open(offer)
    commit_all(trainer, engines, version, NEW)
    commit_all(trainer, engines, version + 1, stepped(NEW, 1), version)


def test_memory_of_an_exchange_is_the_base_of_differences(exchanging):
    trainer, engines = exchanging
    weights = OLD
    for version in range(2, 8):
        weights = stepped(weights, version)
        commit_all(trainer, engines, version, weights, version - 1 if version != 5 else None)


def test_exchange_that_fails_on_one_worker_leaves_no_base(exchanging):
    trainer, engines = exchanging
    seal = trainer.push(2, stepped(OLD, 2), base=1)
    engines[0].commit(seal.update)
    with pytest.raises(CommitError, match="the device"):
        engines[1].commit(seal.update, fail="load")
    for engine in engines:
        engine.receiver.revert(seal.update, "worker 1 failed")
        engine.receiver.drop(seal.update)
    assert all(engine.holds(OLD) for engine in engines)
    assert_next_is_complete(trainer, engines, 1, 3)


def test_memory_is_filled_again_while_the_engine_generates(exchanging):
    """Let the commit be settled before the memory is a base again; the next offer waits for it."""
    trainer, engines = exchanging
    new, may_fill = stepped(OLD, 2), threading.Event()
    seal = trainer.push(2, new, base=1)
    for engine in engines:
        engine.commit(seal.update, wait=may_fill)
        engine.receiver.settle(seal.update)
    trainer.succeeded(2)
    assert all(engine.holds(new) for engine in engines)
    pushing = threading.Thread(target=commit_all, args=(trainer, engines, 3, stepped(new, 3), 2), daemon=True)
    pushing.start()
    states = [engine.receiver.status()["update"]["version"] for engine in engines[1:]]  # the first one's lock is held
    may_fill.set()
    pushing.join(60)
    assert not pushing.is_alive()
    assert states == [2]
    assert all(engine.receiver.version() == 3 and engine.holds(stepped(new, 3)) for engine in engines)


@pytest.mark.parametrize("settled", [True, False])
def test_memory_that_cannot_be_filled_again_is_no_base(exchanging, settled):
    trainer, engines = exchanging
    new = stepped(OLD, 2)
    seal = trainer.push(2, new, base=1)
    for engine in engines:
        engine.commit(seal.update, fail="refill")
        if settled:
            engine.receiver.settle(seal.update)
    # The commit has succeeded all the same.
    assert all(engine.holds(new) and engine.receiver.version() == 2 for engine in engines)
    assert_next_is_complete(trainer, engines, 2, 3)


# --- attacks ---


class CutError(Exception):
    """The end of a rank in a test."""


def cut_at(rank: int, number: int):
    """Return an adjustment of senders: rank ``rank`` ends before its message ``number``."""

    def adjust(sender: ShardSender) -> None:
        hand_over, count = sender._hand_over, iter(range(1_000_000))

        def cutting(*arguments: Any) -> Any:
            if sender._group.rank == rank and next(count) == number:
                raise CutError(f"rank {rank}, message {number}")
            return hand_over(*arguments)

        sender._hand_over = cutting  # type: ignore[method-assign,reportAttributeAccessIssue]

    return adjust


@pytest.mark.nightly_cases("None")  # covered: 1, by changes
@pytest.mark.parametrize("base", [None, 1])
def test_an_exchange_follows_no_transfer_that_was_cut_at_any_message(exchanging, base):
    trainer, engines = exchanging
    new = stepped(OLD, 2)
    shares = trainer.make_plan(OLD).shares()
    cuts = [(rank, number) for rank in range(2) for number in range(len(shares[rank].operations))]
    assert len(cuts) > 10
    version = 1
    for rank, number in cuts[:: max(1, len(cuts) // 8)]:
        version += 1
        with pytest.raises((CutError, PeerLostError, TransportError)):
            trainer.push(version, new, base=version - 1 if base else None, adjust=cut_at(rank, number))
        for engine in engines:
            update = engine.receiver.status()["update"]["update"]
            engine.receiver.drop(update)
            assert engine.holds(OLD)
            with pytest.raises(UpdateError):
                engine.commit(update)
            assert engine.holds(OLD)
        for history in trainer.histories:
            history.forget()
        version += 1
        commit_all(trainer, engines, version, OLD)
    commit_all(trainer, engines, version + 1, new, version)


def test_a_version_that_was_forgotten_is_no_base(exchanging):
    """Forget before the commit was settled, as an engine that another trainer takes over."""
    trainer, engines = exchanging
    seal = trainer.push(2, stepped(OLD, 2), base=1)
    for engine in engines:
        engine.commit(seal.update)
        engine.receiver.forget("model")
    assert_next_is_complete(trainer, engines, 2, 3)


def test_changes_after_complete_weights_from_rank_0_are_refused(exchanging):
    """Send whole tensors between two sharded updates, as with a merged adapter."""
    trainer, engines = exchanging
    listener = trainer.listener
    manifest = Manifest(2, SPECS, 256)
    name = listener.new_group(["trainer", *(engine.receiver.name for engine in engines)])
    for number, engine in enumerate(engines):
        offer = Offer(name, "trainer", listener.host, listener.port, 1 + number, 1, "gloo", 30.0, 30.0, manifest)
        engine.receiver.open(offer)
    with Sender(offer) as sender:
        seal = sender.send(NEW.items())
    for engine in engines:
        engine.receiver.verify(seal, 30.0)
        engine.commit(name)
        engine.receiver.settle(name)
        assert engine.holds(NEW)
    for base in (1, 2):
        offers = trainer.offers(Manifest(3, SPECS, 256), OLD, base=base)
        for offer, engine in zip(offers, engines, strict=True):
            with pytest.raises(BaseError, match="nothing is kept"):
                engine.receiver.open(offer)
    commit_all(trainer, engines, 3, OLD)


def test_update_of_another_name_is_not_dropped_by_a_late_call(exchanging):
    trainer, engines = exchanging
    first = trainer.push(2, NEW)
    for engine in engines:
        engine.receiver.drop(first.update)
    second = trainer.push(3, NEW)
    for engine in engines:
        engine.receiver.drop(first.update)
        with pytest.raises(UpdateError, match="unknown update"):
            engine.receiver.verify(first, 1.0)
        engine.commit(second.update)
        engine.receiver.drop(second.update)  # active: a no-op
        assert engine.holds(NEW)
