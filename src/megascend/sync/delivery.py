"""Updates of inference engines from one process: rank 0's part of a push.

Independent of backends and other ranks: callers pass the tensor specs first, then the tensors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from megascend.errors import ConfigError, EngineFaultError, WeightSyncError
from weightwire.engine import InferenceEngine
from weightwire.engine_calls import LoopThread, call_all
from weightwire.errors import (
    BaseError,
    DeadlineError,
    ManifestError,
    OwnerError,
    PeerLostError,
    PlanError,
    TransportError,
    UpdateError,
    VersionError,
    WireError,
)
from weightwire.fp8 import BlockFormat, merged_formats, stored_specs, stored_tensors
from weightwire.group import EXPLAIN_S, Listener
from weightwire.manifest import AdapterInfo, Manifest, TensorSpec, default_bucket_bytes
from weightwire.offer import Offer, Seal, Sharding
from weightwire.plan import Region, Share
from weightwire.sender import Buffers, Sender, spec_of
from weightwire.sharded import ShardSender
from weightwire.transports.base import device_types
from weightwire.transports.choice import AUTO, Location, check, choose, choose_pairs

log = logging.getLogger(__name__)

RunCoroutine = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to completion, from a thread without an event loop."""
MARGIN_S = EXPLAIN_S + 2.0
"""Seconds past a deadline that this process may need to report a failure to others."""
OLD_WEIGHTS = "; all engines keep the old weights"


@dataclass(frozen=True)
class Ticket:
    """All that a rank needs to join a sharded update.

    Attributes:
        address, name: address and name of the update's group.
        device: type of the device of the buffers.
        base: version from which differences are sent, or None.
        keep: ranks keep what they send, as the base of differences.
    """

    address: tuple[str, int]
    name: str
    manifest: Manifest
    transport: str
    device: str
    options: Mapping[str, Any]
    timeout_s: float
    base: int | None
    keep: bool


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
        """Name of the plan."""
        return self.shares[0].plan

    @property
    def senders(self) -> int:
        """Number of ranks that send."""
        return len(self.shares) - sum(self.engines.values())


@dataclass
class Update:
    """An update in progress.

    Attributes:
        engines: participating engines.
        version: version that they receive.
        name: name of its group; empty before it is offered.
        sender: connected sender; None until all receivers have joined, and on ranks that do not send.
        seal: digest of the sent data; None before the transfer.
        transport: transport in use; empty before it is offered.
        nbytes, buckets: amounts sent to each receiver or, of a sharded update, received by the largest one and sent in all.
        payload: bytes that the workers of all engines receive, together.
        content: bytes of complete messages in their place.
        base: version from which differences are sent; None: complete weights.
        seconds: duration of each phase.
        parts: seconds of the phases' parts, by ``PHASE.PART``; of engines, those of the slowest one.
    """

    engines: Sequence[InferenceEngine]
    version: int
    name: str = ""
    sender: Sender | ShardSender | None = None
    seal: Seal | None = None
    transport: str = ""
    nbytes: int = 0
    buckets: int = 0
    payload: int = 0
    content: int = 0
    base: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Return the received bytes relative to those of complete messages."""
        return self.payload / max(1, self.content)

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send the tensors, in the order of the specs passed to :meth:`Delivery.begin`."""
        assert isinstance(self.sender, Sender)
        with self.sender as sender:
            self.seal = sender.send(tensors)
        self.nbytes, self.buckets = sender.traffic.nbytes, sender.traffic.buckets
        self.payload = self.content = self.nbytes * sender.receivers
        self.parts |= {f"transfer.{part}": seconds for part, seconds in sender.traffic.seconds.items()}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Record the seconds within the context as those of a phase, or of its part ``PHASE.PART``."""
        log.debug("version %d: %s", self.version, name)
        start = time.perf_counter()
        yield
        (self.parts if "." in name else self.seconds)[name] = time.perf_counter() - start


class Phases(Protocol):
    """Phases of an update after the transfer: calls of the engines, by one process or for all ranks."""

    def verify(self, update: Update) -> object: ...

    def commit(self, update: Update) -> object: ...

    def drop(self, update: Update) -> object: ...


def run_phases(
    update: Update,
    engines: Phases,
    begin: Callable[[Update], object],
    transfer: Callable[[Update], object],
) -> None:
    """Run an update's phases, and note their seconds.

    Any error, of a rank or an engine, ends the update for all engines. Until the commit it is dropped, and they keep the old
    weights; a commit that failed on some engines cannot be dropped on the others.

    Args:
        begin: offers the update to the engines, and sets its connected sender.
        transfer: sends everything; sets the update's seal and amounts.
    """
    droppable = True
    try:
        with update.timed("begin"):
            begin(update)
        with update.timed("transfer"):
            transfer(update)
        with update.timed("verify"):
            engines.verify(update)
        droppable = False
        with update.timed("commit"):
            engines.commit(update)
    except BaseException as error:
        # After an interrupt, too: engines would keep the update, and refuse others, until its lease ends. An interrupted
        # commit may not have reached every engine; on those that have committed, a drop does nothing.
        if droppable or not isinstance(error, Exception):
            engines.drop(update)
        raise


class Delivery:
    """Listens for engines' receivers, and updates the engines.

    Args:
        transport: a name of :func:`weightwire.transports.transport_names`, or ``auto``: the best fit for this process and the
            engines of an update (:func:`weightwire.transports.choice.choose`).
        device: device of the weights. Buckets are on the same device if the transport supports it, else on the CPU.
        host: address under which engines reach this process.
        bucket_bytes: size of a bucket, of which two are allocated, and kept from one update to the next. None:
            :func:`weightwire.manifest.default_bucket_bytes`.
        digest: a name of :data:`weightwire.digest.ALGORITHMS`.
        timeout_s: deadline of each wait, in seconds.
        overlap: fill one bucket while the other is sent.
        options: options of the transport.
        run: runs a coroutine to completion; default: an event loop on a separate thread.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        timeout_s: float,
        transport: str = AUTO,
        host: str = "127.0.0.1",
        bucket_bytes: int | None = None,
        digest: str = "multilinear64",
        overlap: bool = True,
        options: Mapping[str, Any] | None = None,
        run: RunCoroutine | None = None,
    ) -> None:
        self._transport, self._device, self._options = transport, device, dict(options or {})
        self._bucket_bytes, self._digest = bucket_bytes, digest
        self._timeout_s, self._overlap = timeout_s, overlap
        # The random part tells a restarted trainer from its predecessor, whose updates engines may still hold.
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._listener = Listener(host)
        self._buffers = Buffers()
        self._undropped: dict[str, set[str]] = {}
        """Names of the failed updates that an engine could not be made to drop, by the engine's name."""
        self._loop: LoopThread | None = None
        if run is None:
            self._loop = LoopThread("megascend-weightsync")
            run = self._loop.run
        self._run: RunCoroutine = run

    def quantised(self, engines: Sequence[InferenceEngine]) -> Mapping[str, BlockFormat]:
        """Return the weights that the engines store in fp8 blocks, by name.

        Raises:
            WeightSyncError: an engine cannot be updated, or the engines differ.
        """
        if not engines:
            return {}
        # Every time: an engine that was restarted with another checkpoint may take scales that are wrong for it.
        answers = self._all(engines, lambda engine: engine.quantised(), self._timeout_s)
        formats = self._require_all(*answers, "push", OLD_WEIGHTS)
        try:
            return merged_formats({engine.name: formats[engine.name] for engine in engines})
        except ManifestError as error:
            raise WeightSyncError(f"push: {error}{OLD_WEIGHTS}") from error

    def push(self, engines: Sequence[InferenceEngine], version: int, tensors: Mapping[str, Tensor]) -> Update:
        """Update all engines to ``version``: begin, transfer, verify and commit.

        Args:
            version: greater than the engines' current one.
            tensors: the model's tensors by their Hugging Face names.

        Raises:
            WeightSyncError: the message names the engine, its error, and the engines that keep the old weights.
        """
        update = Update(list(engines), version)
        formats = self.quantised(engines)
        try:
            specs = stored_specs((spec_of(*item) for item in tensors.items()), formats)
            run_phases(
                update,
                self,
                lambda update: self.begin(update, specs),
                lambda update: update.send(stored_tensors(tensors.items(), formats)),
            )
        except WireError as error:
            raise WeightSyncError(
                f"version {version} was not sent: {error}; all engines keep the old weights"
            ) from error
        return update

    def begin(self, update: Update, specs: tuple[TensorSpec, ...], adapter: AdapterInfo | None = None) -> None:
        """Offer the update to all engines and wait for their receivers; ``update.sender`` is then connected."""
        if not update.engines:
            raise ConfigError("push: no engines are configured")
        names = [engine.name for engine in update.engines]
        # Answers are kept by name.
        if len(set(names)) < len(names):
            raise ConfigError(f"push: engine names are not unique: {', '.join(names)}")
        # The devices of the engines' workers decide the transport.
        with update.timed("begin.locations"):
            counts, members = self._located(update.engines)
        update.transport = self._fitting_transport(members)
        manifest, device = self._manifest(update, specs, adapter)
        answers = self._offer(update, manifest, counts)
        self._require_all(*answers, f"version {update.version} was not begun", OLD_WEIGHTS)
        # Waits for the receivers, which the engines start in begin_update.
        with update.timed("begin.connect"):
            update.sender = Sender.connect(
                self._listener,
                update.name,
                manifest,
                transport=update.transport,
                device=device,
                timeout_s=self._timeout_s,
                options=self._options,
                overlap=self._overlap,
                buffers=self._buffers,
            )

    # --- sharded updates ---

    @property
    def host(self) -> str:
        """Return the address under which others reach this process."""
        return self._listener.host

    @property
    def is_loopback(self) -> bool:
        """Check whether only processes on this machine reach this one."""
        return self.host == "localhost" or self.host.startswith("127.") or self.host == "::1"

    def members(self, engines: Sequence[InferenceEngine]) -> tuple[dict[str, int], dict[str, Location | None]]:
        """Return the number of workers by engine, and every worker's memory by its name for messages.

        Raises:
            PlanError: there are no engines, or two with one name.
        """
        names = [engine.name for engine in engines]
        if not names or len(set(names)) < len(names):
            raise PlanError("there are no engines, or two with one name")  # the push itself reports it
        return self._located(engines)

    def ask_needs(
        self, engines: Sequence[InferenceEngine], specs: tuple[TensorSpec, ...]
    ) -> dict[str, list[tuple[Region, ...]] | None]:
        """Return the slices that the workers of each engine load (None: unknown).

        Raises:
            PlanError: an engine cannot describe them; the message names it.
            EngineFaultError: an engine is lost.
        """
        self._drop_left(engines)  # an engine with an open update refuses to answer
        needs, failed = self._all(engines, lambda engine: engine.needs(specs), self._timeout_s)
        if failed:
            name, error = next(iter(failed.items()))
            text = f"{name} cannot describe what its workers load: {error}"
            # Rank 0 could not send to it either.
            if not isinstance(error, WireError | NotImplementedError) and _is_fault(error):
                raise sync_error(failed.values(), text) from error
            raise PlanError(text) from error
        return needs

    def check_pairs(self, members: Mapping[str, Location | None], trainers: Sequence[Location]) -> str:
        """Return the transport of a sharded update; PlanError if none connects all members."""
        receivers = {name: location or Location("cpu") for name, location in members.items()}
        ranks = {f"trainer rank {rank}": location for rank, location in enumerate(trainers)}
        try:
            return choose_pairs(None if self._transport == AUTO else self._transport, ranks, receivers)
        except TransportError as error:
            raise PlanError(str(error)) from error

    def begin_sharded(
        self, update: Update, specs: tuple[TensorSpec, ...], plan: PlanRecord, base: int | None
    ) -> Ticket | None:
        """Offer a sharded update to all engines.

        If engines do not have the base version, and nothing else is wrong, all of them are offered a complete update.

        Returns:
            What every rank needs to join the update's group; None if an engine no longer has the plan.
        """
        update.transport, update.base = plan.transport, base
        manifest, device = self._manifest(update, specs)
        accepted, failed = self._offer(update, manifest, plan.engines, plan)
        unknown = next((error for error in failed.values() if isinstance(error, PlanError)), None)
        if unknown is not None and plan.provisioned:
            # It was restarted, perhaps with other workers or other slices: its old share may not be what it needs now.
            log.info("version %d is planned anew: %s", update.version, unknown)
            return None
        if base is not None and failed:
            faults = {name: error for name, error in failed.items() if not isinstance(error, BaseError)}
            if faults:
                # Would fail again, or hang for longer than the other ranks wait. It is the reason, not a missing base.
                failed = faults
            else:
                log.info("version %d is sent completely: %s", update.version, next(iter(failed.values())))
                self.drop(update)
                update.base = None
                accepted, failed = self._offer(update, manifest, plan.engines, plan)
        self._require_all(accepted, failed, f"version {update.version} was not begun", OLD_WEIGHTS)
        return Ticket(
            address=(self._listener.host, self._listener.port),
            name=update.name,
            manifest=manifest,
            transport=update.transport,
            device=device.type,
            options=self._options,
            timeout_s=self._timeout_s,
            base=update.base,
            keep=plan.keep,
        )

    def verify(self, update: Update) -> None:
        """Wait until every engine has verified what it received."""
        assert update.seal is not None
        seal = update.seal
        in_time = max(0.1, self._timeout_s - 2.0)  # leaves the engine time to answer before our own deadline
        answers = self._all(update.engines, lambda engine: engine.verify(seal, in_time), self._timeout_s)
        self._require_all(*answers, f"version {seal.version} was not verified", OLD_WEIGHTS)

    def commit(self, update: Update) -> None:
        """Activate the verified update on all engines."""
        committed, failed = self._all(update.engines, lambda engine: engine.commit(update.name), self._timeout_s)
        # The slowest engine's: the trainer waits for it.
        for seconds in committed.values():
            for part, value in (seconds or {}).items():
                name = f"commit.{part}"
                update.parts[name] = max(update.parts.get(name, 0.0), value)
        if failed:
            # Open, it would keep them from the next one. A no-op on an engine that has committed it, or does so now.
            engines = [engine for engine in update.engines if engine.name in failed]
            self._drop(update, engines)
        active = f"; version {update.version} is active on {', '.join(committed)}" if committed else ""
        self._require_all(committed, failed, f"version {update.version} was not committed everywhere", active)

    def drop(self, update: Update) -> None:
        """Clean up a failed update. Suppresses errors, which would hide the one being raised."""
        if not update.name:
            return
        if update.sender is not None:
            update.sender.close()
        self._drop(update, update.engines)

    def _drop(self, update: Update, engines: Sequence[InferenceEngine]) -> None:
        for engine in engines:
            self._undropped.setdefault(engine.name, set()).add(update.name)
        self._drop_left(engines)

    def _drop_left(self, engines: Sequence[InferenceEngine]) -> None:
        """Make engines drop their updates that have failed, unless they have done so."""
        left = [engine for engine in engines if self._undropped.get(engine.name)]

        async def drop(engine: InferenceEngine) -> None:
            for name in tuple(self._undropped[engine.name]):
                await engine.drop(name)
                self._undropped[engine.name].discard(name)

        if left:
            # An engine that cannot be reached is asked again before its next offer, which it would refuse.
            with contextlib.suppress(Exception):
                # Within the margin that other ranks grant this one for reporting a failure.
                self._all(left, drop, min(self._timeout_s, MARGIN_S))

    def close(self) -> None:
        """Stop listening, and release the buckets. Engines keep their weights."""
        # Dropping the last reference frees the buckets, which may be device memory.
        self._buffers = Buffers()
        if self._loop is not None:
            self._loop.close()
        self._listener.close()

    def _fitting_transport(self, members: Mapping[str, Location | None]) -> str:
        """Choose the transport of an update, or check the configured one against the members' devices."""
        local = Location.of(self._device)
        try:
            if self._transport == AUTO:  # an engine that does not report its location is taken to be on the CPU
                return choose(local, {name: location or Location("cpu") for name, location in members.items()})
            check(
                self._transport, local, {name: location for name, location in members.items() if location is not None}
            )
        except TransportError as error:
            raise ConfigError(f"push: {error}") from error
        return self._transport

    def _located(self, engines: Sequence[InferenceEngine]) -> tuple[dict[str, int], dict[str, Location | None]]:
        """Return the number of workers by engine, and every worker's memory by its name for messages."""
        answers = self._all(engines, lambda engine: engine.locations(), self._timeout_s)
        locations = self._require_all(*answers, "push", "")
        counts = {engine.name: len(locations[engine.name]) for engine in engines}
        memories = (location for name in counts for location in locations[name])
        return counts, dict(zip(_members(counts), memories, strict=True))

    def _manifest(
        self, update: Update, specs: tuple[TensorSpec, ...], adapter: AdapterInfo | None = None
    ) -> tuple[Manifest, torch.device]:
        """Return the update's manifest, and the device of its buckets."""
        device = self._device if self._device.type in device_types(update.transport) else torch.device("cpu")
        bucket_bytes = self._bucket_bytes or default_bucket_bytes(device.type)
        return Manifest(update.version, specs, bucket_bytes, self._digest, adapter), device

    def _offer(
        self, update: Update, manifest: Manifest, counts: Mapping[str, int], plan: PlanRecord | None = None
    ) -> tuple[dict[str, Any], dict[str, Exception]]:
        """Announce the update's group, and offer the update to every engine; return their answers and errors.

        Args:
            counts: number of workers by engine.
            plan: plan of a sharded update; None: rank 0 sends whole tensors.
        """
        self._drop_left(update.engines)
        trainers = [f"trainer {self._owner}"]
        if plan is not None:
            trainers = [f"{trainers[0]} rank {rank}" for rank in range(plan.senders)]
        update.name = self._listener.new_group([*trainers, *_members(counts)], senders=len(trainers))
        offers, first = {}, len(trainers)
        for name, workers in counts.items():
            sharded = None
            if plan is not None:
                # Engines keep their shares: tens of thousands of slices would be sent again with every push.
                shares = None if name in plan.provisioned else tuple(plan.shares[first : first + workers])
                sharded = Sharding(plan.identity, len(trainers), shares, update.base, plan.keep)
            offers[name] = Offer(
                update=update.name,
                owner=self._owner,
                host=self._listener.host,
                port=self._listener.port,
                first=first,
                workers=workers,
                transport=update.transport,
                timeout_s=self._timeout_s,
                lease_s=2 * self._timeout_s + MARGIN_S,  # then an engine drops the update of a trainer that died
                manifest=manifest,
                options=self._options,
                sharded=sharded,
            )
            first += workers
        with update.timed("begin.offer"):
            answers, failed = self._all(
                update.engines, lambda engine: engine.begin_update(offers[engine.name]), self._timeout_s
            )
        for name in answers:
            # It would have refused the offer if it still had an earlier update: one that was restarted never answers for it.
            self._undropped.pop(name, None)
        return answers, failed

    def _all(
        self, engines: Sequence[InferenceEngine], call: Callable[[InferenceEngine], Any], timeout_s: float
    ) -> tuple[dict[str, Any], dict[str, Exception]]:
        return self._run(call_all(engines, call, timeout_s))

    def _require_all(
        self, answers: dict[str, Any], failed: dict[str, Exception], description: str, after: str
    ) -> dict[str, Any]:
        """Return the answers of all engines in a phase; WeightSyncError if one failed, is lost or too slow."""
        if failed:
            reasons = "; ".join(
                # The message of a TimeoutError is made here and complete; an engine's own errors need their kind.
                f"{name}: {error}" if type(error) is TimeoutError else f"{name}: {type(error).__name__}: {error}"
                for name, error in failed.items()
            )
            raise sync_error(failed.values(), f"{description}: {reasons}{after}")
        return answers


def sync_error(causes: Iterable[Exception], message: str) -> WeightSyncError:
    """Return the error of a push: an EngineFaultError unless an engine has refused it, or this process is at fault."""
    return (EngineFaultError if all(map(_is_fault, causes)) else WeightSyncError)(message)


def _is_fault(error: Exception) -> bool:
    """Check for an error of one engine's state, which another engine, or the same one later, would not have."""
    if isinstance(error, VersionError | OwnerError | BaseError):
        return False
    # The rest, neither an answer in time nor one of the contract: a process that hangs, is gone, or writes nonsense.
    return isinstance(error, DeadlineError | PeerLostError | UpdateError) or not isinstance(
        error, WireError | ConfigError
    )


def _members(counts: Mapping[str, int]) -> list[str]:
    """Return the names of all workers for messages, engine after engine."""
    return [
        name if count == 1 else f"{name} worker {worker}" for name, count in counts.items() for worker in range(count)
    ]
