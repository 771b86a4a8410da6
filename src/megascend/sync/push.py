"""One update of inference engines by all ranks of a trainer: offer, send, seal, commit, and what a failure leaves."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import torch
from torch import Tensor

from megascend.errors import WeightSyncError
from megascend.sync.delivery import MARGIN_S, Answers, Delivery, member_names
from megascend.sync.ranks import Ranks
from weightwire.engine import InferenceEngine
from weightwire.errors import BaseError, PlanError
from weightwire.fp8 import BlockFormat, stored_specs, stored_tensors
from weightwire.manifest import AdapterInfo, Manifest, TensorSpec
from weightwire.offer import Offer, Seal, Sharding
from weightwire.plan import Share
from weightwire.sender import Sender, spec_of
from weightwire.sharded import ShardSender

log = logging.getLogger(__name__)


class OutdatedPlanError(WeightSyncError):
    """An engine no longer has its share of the plan; a new plan may be possible."""


@dataclass
class PlanRecord:
    """A plan, as rank 0 knows it.

    Attributes:
        engines: number of workers of the engines that it was made for, by name.
        shares: part of every member.
        transport: transport of its updates.
        keep: workers keep what they have received, as the base of differences.
        provisioned: names of the engines whose workers have their shares from an earlier push.
    """

    engines: dict[str, int]
    shares: list[Share]
    transport: str
    keep: bool
    provisioned: set[str] = field(default_factory=set)

    @property
    def identity(self) -> str:
        return self.shares[0].plan

    @property
    def senders(self) -> int:
        return len(self.shares) - sum(self.engines.values())


@dataclass
class PushResult:
    """Result of a push, on every rank; filled on rank 0 while the push is under way.

    Attributes:
        version: version now active on all engines.
        nbytes: bytes of the weights of each worker, or of the largest share of a sharded push.
        buckets: number of buckets sent.
        engines: names of the engines.
        seconds: duration of each phase: ``describe``, ``begin``, ``transfer``, ``verify``, ``commit``.
        transport: transport used.
        sharded: every rank of the trainer has sent its slices.
        why_not_sharded: the reason, if rank 0 has sent everything.
        base: version from which the changes were sent; None: complete weights.
        payload: bytes that the workers of all engines received, together, whoever sent them: ``nbytes`` for each worker if rank 0
            has sent whole tensors; of a sharded push, the slices or changes of each worker.
        share: ``payload`` relative to that of complete weights.
        parts: seconds of the phases' parts (``transfer.export``, ``commit.paused`` ...), which show where time goes. vLLM adds
            ``commit.exchange`` if it has copied into the parameters in use, ``commit.reload`` if it has reloaded its model.
    """

    version: int
    nbytes: int = 0
    buckets: int = 0
    engines: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    transport: str = ""
    sharded: bool = False
    why_not_sharded: str = ""
    base: int | None = None
    payload: int = 0
    share: float = 1.0
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def pause_s(self) -> float:
        """Seconds for which the slowest engine sampled nothing: by its own measure or, without one, those of the commit."""
        return self.parts.get("commit.paused", self.seconds["commit"])


class Plan(Protocol):
    """A way to send weights, which a :class:`Push` carries out. Both methods are collective."""

    def offer(self, push: Push) -> None:
        """Offer the update to the engines, and connect the ranks that send."""
        ...

    def send(self, push: Push) -> Seal | None:
        """Send everything; return the seal on rank 0, and note the amounts in the push's result there."""
        ...


class Push:
    """One update, from all ranks of a trainer to its engines. Its methods are collective, but for those that say so.

    Args:
        engines: participating engines, on rank 0.
        version: version that they receive.
        delivery: connection to them, on rank 0.

    Attributes:
        name: name of its group; empty before it is offered.
        sender: connected sender; None until all receivers have joined, and on ranks that do not send.
        result: what is known of the push so far, on rank 0.
    """

    def __init__(
        self, engines: Sequence[InferenceEngine], version: int, delivery: Delivery | None, ranks: Ranks | None = None
    ) -> None:
        self.engines, self.version, self.ranks = list(engines), version, ranks or Ranks()
        self.name = ""
        self.sender: Sender | ShardSender | None = None
        self.result = PushResult(version, engines=tuple(engine.name for engine in engines))
        self._delivery = delivery

    @property
    def delivery(self) -> Delivery:
        """Return the connection to the engines; a WeightSyncError once it is closed."""
        if self._delivery is None:
            raise WeightSyncError("push: this WeightSync is closed")
        return self._delivery

    def run(self, plan: Plan) -> None:
        """Carry out a plan, and note the seconds of each phase.

        Any error, of a rank or an engine, ends the update for all engines. Until the commit it is dropped, and they keep the old
        weights; a commit that failed on some engines cannot be dropped on the others.
        """
        droppable = True
        try:
            with self.timed("begin"):
                plan.offer(self)
            with self.timed("transfer"):
                seal = plan.send(self)
            with self.timed("verify"):
                self.seal(seal)
            droppable = False
            with self.timed("commit"):
                self.commit()
        except BaseException as error:
            # After an interrupt, too: engines would keep the update, and refuse others, until its lease ends. An interrupted
            # commit may not have reached every engine; on those that have committed, a drop does nothing.
            if droppable or not isinstance(error, Exception):
                self.drop()
            raise

    def offer(
        self,
        specs: tuple[TensorSpec, ...],
        adapter: AdapterInfo | None = None,
        plan: PlanRecord | None = None,
        base: int | None = None,
    ) -> tuple[Offer, torch.device]:
        """Offer the update to all engines. On rank 0 only.

        If engines do not have the base version, and nothing else is wrong, all of them are offered a complete update.

        Args:
            plan: plan of a sharded update; None: rank 0 sends whole tensors.
            base: version from which differences are to be sent.

        Returns:
            The offer to one of the engines, without shares, by which ranks join the group; device of rank 0's buffers.

        Raises:
            OutdatedPlanError: an engine no longer has the plan.
        """
        result, delivery = self.result, self.delivery
        if plan is None:
            # The devices of the engines' workers decide the transport.
            with self.timed("begin.locations"):
                counts, members = delivery.members(self.engines)
            result.transport = delivery.fitting_transport(members)
        else:
            counts, result.transport = plan.engines, plan.transport
        manifest, device = delivery.manifest(self.version, specs, result.transport, adapter)
        result.base = base
        offers, answers = self._offer(manifest, counts, plan)
        unknown = next((error for error in answers.errors.values() if isinstance(error, PlanError)), None)
        if unknown is not None and plan is not None and plan.provisioned:
            # It was restarted, perhaps with other workers or other slices: its old share may not be what it needs now.
            log.info("version %d is planned anew: %s", self.version, unknown)
            raise OutdatedPlanError(str(unknown))
        if base is not None and answers.errors:
            faults = {name: error for name, error in answers.errors.items() if not isinstance(error, BaseError)}
            if faults:
                # Would fail again, or hang for longer than the other ranks wait. It is the reason, not a missing base.
                answers = Answers(answers.results, faults)
            else:
                log.info("version %d is sent completely: %s", self.version, next(iter(answers.errors.values())))
                self.drop()
                result.base = None
                offers, answers = self._offer(manifest, counts, plan)
        answers.required(f"version {self.version} was not begun")
        offer = next(iter(offers.values()))
        # Every rank has its own share.
        return replace(offer, sharded=offer.sharded and replace(offer.sharded, shares=None)), device

    def _offer(
        self, manifest: Manifest, counts: Mapping[str, int], plan: PlanRecord | None
    ) -> tuple[dict[str, Offer], Answers]:
        """Announce the update's group, and offer the update to every engine; return the offers and answers by engine.

        Args:
            counts: number of workers by engine.
        """
        delivery, offers = self.delivery, dict[str, Offer]()
        trainers = [f"trainer {delivery.owner}"]
        if plan is not None:
            trainers = [f"{trainers[0]} rank {rank}" for rank in range(plan.senders)]
        self.name = delivery.listener.new_group([*trainers, *member_names(counts)], senders=len(trainers))
        first = len(trainers)
        for name, workers in counts.items():
            sharded = None
            if plan is not None:
                # Engines keep their shares: tens of thousands of slices would be sent again with every push.
                shares = None if name in plan.provisioned else tuple(plan.shares[first : first + workers])
                sharded = Sharding(plan.identity, len(trainers), shares, self.result.base, plan.keep)
            offers[name] = Offer(
                update=self.name,
                owner=delivery.owner,
                host=delivery.listener.host,
                port=delivery.listener.port,
                first=first,
                workers=workers,
                transport=self.result.transport,
                timeout_s=delivery.timeout_s,
                lease_s=2 * delivery.timeout_s + MARGIN_S,  # then an engine drops the update of a trainer that died
                manifest=manifest,
                options=delivery.options,
                sharded=sharded,
            )
            first += workers
        with self.timed("begin.offer"):
            return offers, delivery.begin(self.engines, offers)

    def seal(self, seal: Seal | None) -> None:
        """Wait until every engine has verified what it received.

        Args:
            seal: on rank 0.
        """

        def verify() -> None:
            sealed, delivery = cast(Seal, seal), self.delivery
            # Leaves the engine time to answer before our own deadline.
            in_time = max(0.1, delivery.timeout_s - 2.0)
            answers = delivery.call(self.engines, lambda engine: engine.verify(sealed, in_time))
            answers.required(f"version {self.version} was not verified")

        self.ranks.on_rank_0(verify, "verification by the engines")

    def commit(self) -> None:
        """Activate the verified update on all engines."""

        def commit() -> None:
            answers = self.delivery.call(self.engines, lambda engine: engine.commit(self.name))
            # The slowest engine's: the trainer waits for it.
            for seconds in answers.results.values():
                for part, value in (seconds or {}).items():
                    name = f"commit.{part}"
                    self.result.parts[name] = max(self.result.parts.get(name, 0.0), value)
            if answers.errors:
                # Open, it would keep them from the next one. A no-op on an engine that has committed it, or does so now.
                self.delivery.drop(self.name, [engine for engine in self.engines if engine.name in answers.errors])
            names = ", ".join(answers.results)
            active = f"; version {self.version} is active on {names}" if names else ""
            answers.required(f"version {self.version} was not committed everywhere", active)

        self.ranks.on_rank_0(commit, "the commit on the engines")

    def drop(self) -> None:
        """Leave the update's group and, on rank 0, make the engines drop it. Not collective; raises no engine's error."""
        if self.sender is not None:
            self.sender.close()
        if self._delivery is not None and self.name:
            self._delivery.drop(self.name, self.engines)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Record the seconds within the context as those of a phase, or of its part ``PHASE.PART``. Local."""
        log.debug("version %d: %s", self.version, name)
        start = time.perf_counter()
        yield
        seconds = self.result.parts if "." in name else self.result.seconds
        seconds[name] = time.perf_counter() - start


@dataclass
class WholeTensors:
    """Plan by which rank 0 sends whole tensors to every worker; all ranks iterate over the stream, to take part in the export.

    Attributes:
        specs: specs of the tensors, in order, as they are sent; empty on ranks other than 0.
        adapter: set if only an adapter's factors are sent.
        stream: generator, not started; only rank 0 gets tensors.
        formats: weights of it that are sent in fp8 blocks.
    """

    specs: tuple[TensorSpec, ...]
    adapter: AdapterInfo | None
    stream: Generator[tuple[str, Tensor], None, None]
    formats: Mapping[str, BlockFormat] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], formats: Mapping[str, BlockFormat], adapter: AdapterInfo | None = None
    ) -> WholeTensors:
        """Plan to send tensors that are at hand, by name."""
        specs = stored_specs((spec_of(*item) for item in tensors.items()), formats)
        return cls(specs, adapter, (item for item in tensors.items()), formats)

    def offer(self, push: Push) -> None:
        """Offer the update to the engines, and connect rank 0."""

        def connect() -> None:
            offer, device = push.offer(self.specs, self.adapter)
            # Waits for the receivers, which the engines start in begin_update.
            with push.timed("begin.connect"):
                delivery = push.delivery
                push.sender = Sender(offer, device=device, buffers=delivery.buffers, overlap=delivery.overlap)

        push.ranks.on_rank_0(connect, "the offer to the engines")

    def send(self, push: Push) -> Seal | None:
        """Export, and send on rank 0."""
        failure = "the model was not sent" if self.adapter is None else f"adapter {self.adapter.name} was not sent"
        return push.ranks.on_every_rank(lambda: self._send(push), "the outcome of the transfer", failure)

    def _send(self, push: Push) -> Seal | None:
        seal = None
        with contextlib.closing(self.stream) as stream:  # tells the other ranks that this one stopped early
            if isinstance(push.sender, Sender):
                with push.sender as sender:
                    seal = sender.send(stored_tensors(stream, self.formats))
                traffic, result = sender.traffic, push.result
                result.nbytes, result.buckets, result.payload = traffic.nbytes, traffic.buckets, traffic.delivered
                result.parts |= {f"transfer.{part}": seconds for part, seconds in traffic.seconds.items()}
            # Iterating joins the export's collectives.
            for _ in stream:
                pass
        return seal


def push_tensors(
    delivery: Delivery, engines: Sequence[InferenceEngine], version: int, tensors: Mapping[str, Tensor]
) -> PushResult:
    """Update engines from one process, without ranks.

    Args:
        version: greater than the engines' current one.
        tensors: the model's tensors by their Hugging Face names.

    Raises:
        WeightSyncError: the message names the engine, its error, and the engines that keep the old weights.
    """
    push = Push(engines, version, delivery)
    formats = delivery.quantised(push.engines)
    failure = f"version {version} was not sent"
    push.run(push.ranks.on_rank_0(lambda: WholeTensors.of(tensors, formats), "the tensors to send", failure))
    return push.result
