"""The ranks of a trainer and their slices, in one process: each rank sends on a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from in_process import LISTENERS, TIMEOUT_S

from weightwire.group import Listener
from weightwire.manifest import Manifest, TensorSpec
from weightwire.offer import Offer, Seal, Sharding
from weightwire.plan import Region, TransferPlan, complete, plan
from weightwire.receiver import Receiver
from weightwire.sender import spec_of
from weightwire.sharded import HeldSlice, History, ShardSender, digests_by_worker
from weightwire.slices import index_of

Weights = dict[str, torch.Tensor]
CPU = torch.device("cpu")


def model(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """Build weights that two ranks and two or four workers can divide, with other dtypes and an empty tensor among them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "embed.weight": normal(37, 8),
        "layers.0.norm.weight": normal(8),
        "layers.0.router.bias": torch.randn(4, generator=generator),
        "layers.0.up.weight": normal(24, 8),
        "layers.0.down.weight": normal(8, 24),
        "empty": normal(0, 4),
        "step": torch.randint(0, 9, (), generator=generator),
        "head.weight": normal(37, 8),
    }


def specs_of(weights: Weights) -> tuple[TensorSpec, ...]:
    return tuple(spec_of(*item) for item in weights.items())


def rows(specs: Sequence[TensorSpec], parts: int, rank: int, dims: dict[str, int] | None = None) -> list[Region]:
    """Return a rank's slices: matrices by rows, or by the given dimension; the rest is replicated."""
    pieces = []
    for index, spec in enumerate(specs):
        if 0 in spec.shape:
            continue
        offsets, sizes = [0] * len(spec.shape), list(spec.shape)
        if len(spec.shape) == 2:
            dim = (dims or {}).get(spec.name, 0)
            step = -(-spec.shape[dim] // parts)
            offsets[dim] = min(rank * step, spec.shape[dim])
            sizes[dim] = min(step, spec.shape[dim] - offsets[dim])
        if 0 not in sizes:
            pieces.append(Region(index, tuple(offsets), tuple(sizes)))
    return pieces


def engine_needs(specs: Sequence[TensorSpec], size: int, worker: int) -> list[Region]:
    """Return a worker's slices: row parallel ``down``, all else column parallel."""
    return rows(specs, size, worker, {"layers.0.down.weight": 1})


class ShardedTrainer:
    """A trainer of several ranks, each with its rows of the weights."""

    def __init__(
        self, receivers: Sequence[Receiver], needs: Sequence[Sequence[Region]] | None = None, *, ranks: int = 2,
        transport: str = "gloo", bucket_bytes: int = 256, relay: bool | None = None, keep: bool = False,
    ) -> None:  # fmt: skip
        self.listener, self.receivers, self.needs = Listener(), receivers, needs
        LISTENERS.append(self.listener)
        self.ranks, self.transport, self.bucket_bytes, self.relay, self.keep = (
            ranks,
            transport,
            bucket_bytes,
            relay,
            keep,
        )
        self.timeout_s, self.lease_s = TIMEOUT_S, 30.0
        self.plan: TransferPlan | None = None
        self.histories = [History() for _ in range(ranks)]
        self.senders: list[ShardSender] = []

    def slices_of(self, weights: Weights, rank: int) -> list[HeldSlice]:
        tensors = list(weights.values())
        pieces = rows(specs_of(weights), self.ranks, rank)
        return [HeldSlice(piece, tensors[piece.tensor][index_of(*piece.box)]) for piece in pieces]

    def make_plan(self, weights: Weights) -> TransferPlan:
        if self.plan is None:
            specs = specs_of(weights)
            holdings = [[source.piece for source in self.slices_of(weights, rank)] for rank in range(self.ranks)]
            needs = self.needs or [complete(specs)] * len(self.receivers)
            self.plan = plan(specs, holdings, needs, chunk_bytes=self.bucket_bytes, relay=self.relay)
        return self.plan

    def offers(self, manifest: Manifest, weights: Weights, base: int | None = None, **changes: Any) -> list[Offer]:
        result = self.make_plan(weights)
        shares = result.shares()
        names = [
            *(f"trainer rank {rank}" for rank in range(self.ranks)),
            *(receiver.name for receiver in self.receivers),
        ]
        name = self.listener.new_group(names, senders=self.ranks)
        return [
            Offer(
                update=name, owner="trainer", host=self.listener.host, port=self.listener.port, first=self.ranks + number,
                workers=1, transport=self.transport, timeout_s=self.timeout_s, lease_s=self.lease_s, manifest=manifest,
                sharded=Sharding(
                    **({"plan": result.identity, "senders": self.ranks, "shares": (shares[self.ranks + number],),
                        "base": base, "keep": self.keep} | changes)
                ),
            )
            for number in range(len(self.receivers))
        ]  # fmt: skip

    def send(
        self, version: int, weights: Weights, base: int | None = None,
        adjust: Callable[[ShardSender], object] = lambda sender: None, **changes: Any,
    ) -> Seal:  # fmt: skip
        """Offer, send from all ranks, and return the seal."""
        manifest = Manifest(version, specs_of(weights), self.bucket_bytes)
        offers = self.offers(manifest, weights, base, **changes)
        for offer, receiver in zip(offers, self.receivers, strict=True):
            receiver.open(Offer.from_json(offer.to_json()))
        assert self.plan is not None
        shares = self.plan.shares()
        digests: dict[int, list[str]] = {}
        problems: dict[int, BaseException] = {}
        senders: dict[int, ShardSender] = {}

        def run(rank: int) -> None:
            try:
                with ShardSender(offers[0], rank, shares[rank], history=self.histories[rank], device=CPU) as sender:
                    senders[rank] = sender
                    adjust(sender)
                    digests[rank] = sender.send(self.slices_of(weights, rank))
                    ended.wait()  # as the trainer's ranks do, which learn of each other's success before they leave
            except BaseException as error:  # noqa: BLE001  raised below
                problems[rank] = error
                ended.abort()

        ended = threading.Barrier(self.ranks)
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        self.senders = [senders[rank] for rank in sorted(senders)]
        real = [error for error in problems.values() if not isinstance(error, threading.BrokenBarrierError)]
        if real:
            raise real[0]
        by_member = digests_by_worker(shares, self.ranks, [digests[rank] for rank in range(self.ranks)])
        return Seal(offers[0].update, version, manifest.identity, (), by_member)

    def push(self, version: int, weights: Weights, base: int | None = None, **options: Any) -> Seal:
        """Run an update up to its verification by all receivers."""
        seal = self.send(version, weights, base, **options)
        for receiver in self.receivers:
            receiver.verify(Seal.from_json(seal.to_json()), TIMEOUT_S)
        return seal

    def succeeded(self, version: int) -> None:
        assert self.plan is not None
        for history in self.histories:
            history.note(self.plan.identity, version)
