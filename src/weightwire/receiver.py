"""The engine's side of updates, one receiver per worker: an update becomes active verified and complete, or not at all.

An update is *receiving* (a thread fills staging memory while the engine generates), *received*, *verified* (its digests match
the seal) and *committed*, or *dropped*. Until the commit no memory that the engine uses is touched. An abandoned update is
dropped when its lease lapses.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weightwire import digest
from weightwire.errors import (
    BaseError,
    CommitError,
    DeadlineError,
    DigestError,
    ManifestError,
    NotServingError,
    OwnerError,
    PlanError,
    TransportError,
    UpdateError,
    VersionError,
    WireError,
)
from weightwire.group import join
from weightwire.manifest import Bucket, Manifest, TensorSpec, offsets, plan_buckets
from weightwire.offer import Offer, Seal, Sharding
from weightwire.plan import Region, check_share, complete
from weightwire.sender import RECEIVED, synchronise_stream
from weightwire.sharded import ShardLayout, receive_share
from weightwire.transports import Setup, Transport, Work, make_transport
from weightwire.transports.base import RECEIVES_IN_FLIGHT, device_types, transports_for
from weightwire.transports.choice import Location
from weightwire.transports.pairs import make_pairs, supports_pairs

log = logging.getLogger(__name__)

RECEIVING, RECEIVE_DONE, VERIFIED, COMMITTING, COMMITTED, DROPPED = (
    "receiving",
    "received",
    "verified",
    "committing",
    "committed",
    "dropped",
)
_OPEN = (RECEIVING, RECEIVE_DONE, VERIFIED, COMMITTING)

Load = Callable[[Iterable[tuple[str, Tensor]]], object]
"""Activates tensors: called with names and tensors in the manifest's order, which it copies."""


@dataclass
class _Update:
    """State and staging memory of one update."""

    offer: Offer
    worker: int
    staging: Tensor | None
    layout: ShardLayout | None = None
    state: str = RECEIVING
    problem: WireError | None = None
    digests: list[digest.Pending] = field(default_factory=list)
    buckets: int = 0
    last_activity: float = field(default_factory=time.monotonic)
    arrived: threading.Event = field(default_factory=threading.Event)
    abandoned: threading.Event = field(default_factory=threading.Event)
    restore: Callable[[], object] | None = None
    previous_versions: dict[str, int] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        return self.offer.manifest

    @property
    def base(self) -> tuple[str, int] | None:
        """Plan and version of which the staging memory will be a base; None if it will not."""
        sharded = self.offer.sharded
        return (sharded.plan, self.manifest.version) if sharded is not None and sharded.keep else None

    @property
    def parts(self) -> int:
        """Number of buckets, or of chunks of a sharded update."""
        if self.layout is not None:
            return len(self.layout.share.chunks)
        return -(-self.manifest.nbytes // self.manifest.bucket_bytes)

    def names(self, index: int) -> list[str]:
        """Return the names of the tensors in a bucket or chunk."""
        if self.layout is not None:
            return self.layout.names(index)
        bucket = plan_buckets(self.manifest.tensors, self.manifest.bucket_bytes)[index]
        return [self.manifest.tensors[piece.tensor].name for piece in bucket.pieces]

    def __str__(self) -> str:
        return f"update {self.offer.update} of {self.manifest.target} to version {self.manifest.version}"


class Receiver:
    """Updates of one worker of an engine: at most one open at a time, and the active versions. Thread-safe.

    Args:
        name: name of the engine and the worker, for messages.
        device: device of the staging memory: the engine's, or ``cpu``.
        check: called with every offered manifest; raises ManifestError if the engine cannot take such tensors.
        version: version of the active model, if known.
        max_bytes: largest manifest that is accepted, in bytes; None: no limit.
        needs: returns the slices of a manifest's tensors that this worker loads; default: all of every tensor. A plan that does
            not bring exactly these is refused.
    """

    def __init__(
        self,
        name: str,
        *,
        device: torch.device | str = "cpu",
        check: Callable[[Manifest], object] = lambda manifest: None,
        version: int | None = None,
        max_bytes: int | None = None,
        needs: Callable[[Sequence[TensorSpec]], Sequence[Region]] = complete,
    ) -> None:
        self.name = name
        self.serving = True
        """False after a commit that could be neither completed nor undone: the engine must not answer."""
        self._device = torch.device(device)
        self._check, self._most_bytes = check, max_bytes
        self._versions: dict[str, int] = {} if version is None else {"model": version}
        self._update: _Update | None = None
        self._memory: Tensor | None = None
        self._lock = threading.RLock()
        self._needs = needs
        self._planned: tuple[Sequence[TensorSpec], ShardLayout] | None = None
        self._base: tuple[str, int] | None = None
        """Plan and version of the sharded update whose content the kept memory holds; None if it holds anything else."""

    # --- state ---

    def version(self, target: str = "model") -> int | None:
        """Return the active version of the model, or of ``adapter NAME``; None if unknown."""
        return self._versions.get(target)

    def forget(self, target: str) -> None:
        """Forget the active version of a target that the engine replaced or removed itself: any version of it is then new."""
        with self._lock:
            self._versions.pop(target, None)
            if target == "model":
                self._base = None

    def location(self) -> Location:
        """Describe the staging memory."""
        return Location.of(self._device)

    def status(self) -> dict[str, Any]:
        """Return plain data: name, serving, versions by target, and the last update with its state, buckets and problem."""
        with self._lock:
            update = self._update
            status: dict[str, Any] = {
                "name": self.name,
                "serving": self.serving,
                "versions": dict(self._versions),
                "update": None,
            }
            if update is not None:
                status["update"] = {
                    "update": update.offer.update,
                    "owner": update.offer.owner,
                    "target": update.manifest.target,
                    "version": update.manifest.version,
                    "state": update.state,
                    "buckets": update.buckets,
                    "problem": None if update.problem is None else str(update.problem),
                }
            return status

    # --- the update ---

    def open(self, offer: Offer, worker: int = 0) -> None:
        """Start to receive an offered update on a thread; return at once. Repeating the same offer is a no-op.

        Raises:
            OwnerError: another owner's update is open.
            UpdateError: an update of this owner is open, or memory is insufficient.
            VersionError: the offered version is not newer than the active one.
            ManifestError, TransportError: the engine cannot take such tensors, or not by this transport.
        """
        with self._lock:
            self._require_none_open(offer)
            # The trainer repeats an offer whose answer was lost on the way; a second thread would join the group
            # twice.
            if self._update is not None and self._update.offer.update == offer.update:
                if self._update.state in _OPEN:
                    return
                raise UpdateError(f"{self.name}: {self._update} is {self._update.state}; a new one needs a new name")
            update = _Update(offer, worker, None)
            offer.rank(worker)
            # Checked before memory is allocated: an offer that is refused must cost the engine nothing.
            self._require_newer(offer.manifest)
            self._require_possible(offer)
            update.layout = self._layout(offer, worker)
            self._require_base(offer.sharded)
            # No revert of the last update can follow: its memory serves this one.
            if self._update is not None and self._update.state == COMMITTED and self._update.staging is not None:
                self.settle(self._update.offer.update)
            try:
                # All of it now: running out of memory halfway would waste the transfer, and the engine may take the
                # rest meanwhile.
                update.staging = self._staging(offer, update.layout)
            except (RuntimeError, MemoryError) as error:
                raise UpdateError(
                    f"{self.name}: no memory on {self._device} for the {offer.manifest.nbytes} bytes of {update}: {error}"
                ) from error
            self._update = update
        # A daemon: an engine that ends must not wait for a trainer that no longer sends.
        threading.Thread(target=self._run, args=(update,), name=f"weightwire-{offer.update}", daemon=True).start()

    def staging(self, name: str) -> Tensor:
        """Return the memory of an update, uint8 [bytes]: its tensors' bytes without gaps, in the manifest's order."""
        with self._lock:
            update = self._require_update(name)
            if update.staging is None:
                raise UpdateError(f"{self.name}: {update} is {update.state}, and has no memory")
            return update.staging

    def verify(self, seal: Seal, timeout_s: float) -> None:
        """Wait until everything has arrived, and compare it with the seal. On failure the update is dropped.

        Raises:
            DigestError: received bytes differ from those sent.
            ManifestError: the seal is of another manifest.
            DeadlineError: it has not arrived within ``timeout_s`` seconds.
            PeerLostError, TransportError: the transfer failed.
            UpdateError: the update is unknown.
        """
        update = self._require_update(seal.update)
        # A repeated call, whose first answer was lost.
        if update.state in (VERIFIED, COMMITTED):
            return
        try:
            # Without the lock: drop() must be able to end this wait.
            if not update.arrived.wait(timeout_s):
                raise DeadlineError(
                    f"{self.name}: {update} has not arrived within {timeout_s:g} s: {update.buckets} of "
                    f"{update.parts} buckets have"
                )
            with self._lock:
                # The receiving thread cannot raise in the caller; it leaves its error here.
                if update.problem is not None:
                    raise update.problem
                self._require_state(update, RECEIVE_DONE)
                _compare(self.name, update, seal)
                update.state, update.last_activity = VERIFIED, time.monotonic()
        except WireError as error:
            self._drop(update, error)
            raise

    def commit(self, name: str, load: Load, restore: Callable[[], object] | None = None) -> None:
        """Activate a verified update: call ``load`` with its tensors. A no-op after success.

        The engine must not generate meanwhile. If ``load`` raises, ``restore`` is called, and the old version stays active;
        without ``restore``, or if it raises too, :attr:`serving` becomes False until a commit of a complete model succeeds.

        Args:
            name: name of the update.
            load: copies the tensors into the engine's memory.
            restore: undoes a ``load`` that failed or, for :meth:`revert`, one that succeeded.

        Raises:
            CommitError: ``load`` failed; the old weights are active.
            NotServingError: ``load`` failed, and so did ``restore``.
            UpdateError: the update is unknown or not verified.
        """
        with self._lock:
            update = self._require_update(name)
            if update.state == COMMITTED:
                return
            self._require_state(update, VERIFIED)
            self._require_newer(update.manifest)
            update.state, update.restore, update.previous_versions = COMMITTING, restore, dict(self._versions)
            try:
                # Loaders may only queue copies. An error on the device has to appear here, where it can still be
                # undone.
                load(self._tensors(update))
                _synchronise(self._device)
            except BaseException as error:
                raise self._undo(update, error) from error
            update.state = COMMITTED
            self._versions[update.manifest.target] = update.manifest.version
            # Only a complete model replaces a mixture of weights; an adapter lies on top of it.
            if update.manifest.adapter is None:
                self.serving = True

    def revert(self, name: str, reason: str) -> None:
        """Undo a commit that succeeded here but failed on another worker of the engine.

        Raises:
            NotServingError: the commit had no ``restore``, or it raised.
            UpdateError: the update is not the last one committed here, or was settled.
        """
        with self._lock:
            update = self._require_update(name)
            # The commit failed here too and was undone at once; the caller reverts every worker, including this one.
            if update.state == DROPPED:
                return
            self._require_state(update, COMMITTED)
            error = self._undo(update, UpdateError(reason))
        if isinstance(error, NotServingError):
            raise error

    def settle(self, name: str) -> None:
        """Release the memory that :meth:`revert` would need, once the commit has succeeded on all workers."""
        with self._lock:
            update = self._require_update(name)
            self._require_state(update, COMMITTED)
            if update.staging is not None:
                self._keep_memory(update)
                self._base = self._base if update.manifest.adapter is not None else update.base
            update.restore = update.staging = None

    def drop(self, name: str, reason: str = "the trainer dropped it") -> None:
        """Drop an update; the old weights stay active. A no-op if the name is unknown, or the update is committed."""
        with self._lock:
            update = self._update
            # The name: a late call of an earlier update must not end the one that is open now.
            if update is not None and update.offer.update == name and update.state in _OPEN:
                self._drop(update, UpdateError(f"{self.name}: {update} was dropped: {reason}"))

    def close(self) -> None:
        """Drop the open update, if any."""
        if (update := self._update) is not None:
            self.drop(update.offer.update, f"{self.name} closes")

    @property
    def keeps_memory(self) -> bool:
        """Check whether memory is kept for the next update."""
        return self._memory is not None

    def release(self) -> None:
        """Free the memory that is kept for the next update, which then has to be complete."""
        with self._lock:
            self._memory = self._base = None

    # --- memory ---

    def _take_memory(self, nbytes: int) -> Tensor:
        memory, self._memory = self._memory, None
        if memory is None or memory.numel() < nbytes:
            del memory  # first, or there would be two
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            # It may have been another tensor's, whose last kernels are still to run; transports use streams of their own.
            synchronise_stream(self._device)
        return memory[:nbytes]

    def _keep_memory(self, update: _Update) -> None:
        """Keep the memory of a complete update for the next one: new memory costs as much as the transfer."""
        # The factors of an adapter have memory of their own while the other is a base.
        if update.staging is not None and (update.manifest.adapter is None or self._base is None):
            nbytes = update.staging.untyped_storage().nbytes()
            self._memory = update.staging.as_strided((nbytes,), (1,), 0)

    # --- conditions ---

    def _require_none_open(self, offer: Offer) -> None:
        update = self._update
        if update is None or update.state not in _OPEN or update.offer.update == offer.update:
            return
        # The last owner may only be slow; the message says how long it has to be silent.
        age = time.monotonic() - update.last_activity
        if offer.owner != update.offer.owner:
            raise OwnerError(
                f"{self.name}: {offer.owner} offers an update while {update}, of {update.offer.owner}, is {update.state} "
                f"(last touched {age:.1f} s ago; dropped after {update.offer.lease_s:g} s). An engine has one owner at a time"
            )
        raise UpdateError(f"{self.name}: {update} is still {update.state}: commit it or drop it before the next one")

    def _require_newer(self, manifest: Manifest) -> None:
        active = self._versions.get(manifest.target)
        if active is not None and manifest.version <= active:
            raise VersionError(
                f"{self.name}: version {manifest.version} of {manifest.target} is offered, and version {active} is already active"
            )

    def _require_possible(self, offer: Offer) -> None:
        manifest = offer.manifest
        # An unknown digest or device would otherwise show only after the transfer.
        digest.require(manifest.digest)
        if offer.sharded is not None and not supports_pairs(offer.transport):
            raise TransportError(f"{self.name}: transport {offer.transport!r} does not carry sharded updates")
        if self._device.type not in device_types(offer.transport):
            raise TransportError(
                f"{self.name}: transport {offer.transport!r} moves memory of {', '.join(device_types(offer.transport))}, and "
                f"weights are staged on {self._device} here; transports for {self._device.type}: "
                f"{', '.join(transports_for(self._device.type))}"
            )
        if self._most_bytes is not None and manifest.nbytes > self._most_bytes:
            raise ManifestError(
                f"{self.name}: {manifest.nbytes} bytes are offered; at most {self._most_bytes} are taken"
            )
        self._check(manifest)

    def _layout(self, offer: Offer, worker: int) -> ShardLayout | None:
        """Return the layout of a sharded update, after comparing it with the needs; None if rank 0 sends whole tensors."""
        sharded, tensors = offer.sharded, offer.manifest.tensors
        if sharded is None:
            return None
        if sharded.shares is not None:
            share = sharded.shares[worker]
            check_share(share, self._needs(tensors), tensors, self.name)
            self._planned = tensors, ShardLayout(share, tensors)
        if self._planned is None or self._planned[1].share.plan != sharded.plan or self._planned[0] != tensors:
            raise PlanError(f"{self.name}: plan {sharded.plan:.80} is not known here")
        return self._planned[1]

    def _require_base(self, sharded: Sharding | None) -> None:
        """Check that the version from which differences are offered is kept here, under the same plan."""
        if sharded is None or sharded.base is None:
            return
        base, last = self._base, self._update
        if last is not None and last.state == COMMITTED and last.staging is not None and last.manifest.adapter is None:
            base = last.base  # not settled yet
        if base != (sharded.plan, sharded.base):
            state = "nothing is kept" if base is None else f"version {base[1]} of plan {base[0]:.12} is kept"
            raise BaseError(
                f"{self.name}: differences from version {sharded.base} of plan {sharded.plan:.12} are offered, and {state} here"
            )

    def _staging(self, offer: Offer, layout: ShardLayout | None) -> Tensor:
        """Return the memory for an update: that of the last one, which it overwrites, so that it is no base any more."""
        if offer.manifest.adapter is not None and self._base is not None:
            return torch.empty(offer.manifest.nbytes, dtype=torch.uint8, device=self._device)
        self._base = None
        return self._take_memory(offer.manifest.nbytes if layout is None else layout.nbytes)

    def _require_update(self, name: str) -> _Update:
        """Return the last update, which must have this name, and renew its lease."""
        with self._lock:
            update = self._update
            if update is None or update.offer.update != name:
                last = "there is none" if update is None else f"the last one is {update}, {update.state}"
                raise UpdateError(f"{self.name}: unknown update {name!r:.120}; {last}")
            update.last_activity = time.monotonic()
            return update

    def _require_state(self, update: _Update, state: str) -> None:
        if update.state != state:
            reason = f": {update.problem}" if update.problem is not None else ""
            raise UpdateError(f"{self.name}: {update} is {update.state}, not {state}{reason}")

    # --- transitions ---

    def _drop(self, update: _Update, problem: WireError) -> None:
        with self._lock:
            if update.state not in _OPEN:
                return
            # Of an update that has not arrived the transport may still write into its memory: that is freed, not kept.
            if update.state != RECEIVING:
                self._keep_memory(update)
            # The first problem stays: those after it follow from it.
            update.state, update.problem, update.staging = DROPPED, update.problem or problem, None
            update.digests = []
        update.abandoned.set()
        update.arrived.set()

    def _undo(self, update: _Update, cause: BaseException) -> CommitError:
        """Restore the old weights if possible, and return the error to raise."""
        text = f"{self.name}: the commit of {update} failed: {type(cause).__name__}: {cause}"
        # A failed commit leaves a mixture of versions. Only a restore that succeeds allows the engine to answer.
        error: CommitError
        if update.restore is None:
            error = NotServingError(f"{text}. It cannot be undone: this engine must not answer until a commit succeeds")
        else:
            try:
                update.restore()
                _synchronise(self._device)
                error = CommitError(f"{text}. The weights from before it are active")
            except Exception as second:  # noqa: BLE001  whatever it is, the weights are a mixture
                error = NotServingError(
                    f"{text}. Restoring the weights from before failed as well ({type(second).__name__}: {second}): this "
                    "engine must not answer until a commit succeeds"
                )
        # What was received is not active; the next update has to be complete.
        if update.manifest.adapter is None:
            self._base = None
        # A revert follows a commit that has set the version.
        self._versions = dict(update.previous_versions)
        if isinstance(error, NotServingError):
            self.serving = False
            # No version is active: the next commit may have any, the same one included.
            self._versions.pop(update.manifest.target, None)
        self._keep_memory(update)
        update.state, update.problem, update.staging, update.restore = DROPPED, error, None, None
        update.abandoned.set()
        return error

    def _tensors(self, update: _Update) -> Iterator[tuple[str, Tensor]]:
        staging = update.staging
        assert staging is not None
        if update.layout is not None:
            yield from update.layout.tensors(staging)
            return
        starts = offsets(update.manifest.tensors)
        for index, spec in enumerate(update.manifest.tensors):
            content = staging[starts[index] : starts[index + 1]]
            dtype = getattr(torch, spec.dtype)
            if starts[index] % dtype.itemsize:
                content = content.clone()  # a view of another dtype must begin at a multiple of its size
            yield spec.name, content.view(dtype).view(spec.shape)

    # --- the receiving thread ---

    def _run(self, update: _Update) -> None:
        try:
            if self._device.type != "cpu":
                module: Any = torch.get_device_module(self._device)
                # The current device is a thread's own, and collectives of this thread use it.
                module.set_device(self._device)
            with side_stream(self._device), quick_switches():
                _receive(self.name, update, self._note_arrival)
        except WireError as error:
            self._drop(update, error)
        except Exception as error:
            log.exception("%s: %s failed", self.name, update)
            self._drop(update, UpdateError(f"{self.name}: {update} failed: {type(error).__name__}: {error}"))
        update.arrived.set()
        self._keep_while_leased(update)

    def _note_arrival(self, update: _Update) -> None:
        with self._lock:
            # It may have been dropped while the last bucket arrived.
            if update.state == RECEIVING:
                update.state, update.last_activity = RECEIVE_DONE, time.monotonic()
                update.arrived.set()

    def _keep_while_leased(self, update: _Update) -> None:
        lease = update.offer.lease_s
        while update.state in _OPEN:
            left = update.last_activity + lease - time.monotonic()
            if left > 0:
                # At most a second: calls extend the lease meanwhile, and a commit ends the loop without this event.
                update.abandoned.wait(min(left, 1.0))
                continue
            with self._lock:
                # Not while receiving: the transfer has deadlines of its own. Checked again under the lock, which a
                # call may have held to extend the lease.
                if update.state in (RECEIVE_DONE, VERIFIED) and update.last_activity + lease <= time.monotonic():
                    reason = f"{self.name}: {update} was dropped: nobody continued it for {lease:g} s"
                    log.warning("%s", reason)
                    self._drop(update, UpdateError(reason))


SWITCH_S = 0.0005
_receiving = 0
_switch_lock = threading.Lock()
_usual_switch_s = 0.0


@contextlib.contextmanager
def quick_switches() -> Iterator[None]:
    """Make the interpreter switch between threads after :data:`SWITCH_S` within the context, instead of its usual 5 ms.

    The engine's own thread is busy all the time. A receiving thread runs for microseconds, a hundred times an update, and would
    wait for the lock of the interpreter each time.
    """
    global _receiving, _usual_switch_s
    with _switch_lock:
        if _receiving == 0:
            _usual_switch_s = sys.getswitchinterval()
            sys.setswitchinterval(min(SWITCH_S, _usual_switch_s))
        _receiving += 1
    try:
        yield
    finally:
        with _switch_lock:
            _receiving -= 1
            if _receiving == 0:
                sys.setswitchinterval(_usual_switch_s)


def _receive(name: str, update: _Update, note_arrival: Callable[[_Update], object]) -> None:
    """Join the group and fill the staging memory. Several buckets are in flight, so that one is digested while others arrive.

    Args:
        note_arrival: called when everything has arrived.
    """
    offer, staging = update.offer, update.staging
    assert staging is not None
    layout = update.layout
    count = update.parts
    group = join(offer.host, offer.port, offer.update, offer.rank(update.worker), offer.timeout_s, update.abandoned)
    # Bound before the try block: if creating the transport fails, the group must still be notified.
    transport = None
    threading.Thread(target=_abandon_group, args=(update, group), name="weightwire-given-up", daemon=True).start()
    try:
        setup = Setup(group, offer.manifest, staging.device, offer.timeout_s, offer.options)
        if layout is None:
            transport = make_transport(offer.transport, setup)
            _receive_buckets(update, staging, transport, group)
        else:
            transport = make_pairs(offer.transport, setup)
            assert offer.sharded is not None
            receive_share(
                layout,
                staging,
                transport,
                offer.timeout_s,
                lambda index: _arrived(update, index, layout.content(staging, index), group),
                differences=offer.sharded.base is not None,
            )
        # Here, on this thread: verify() would compute it while the engine waits.
        _ = offer.manifest.identity
        # Before the acknowledgement: the sender's seal follows it at once, and must not find an update that is still receiving.
        note_arrival(update)
        # The sender returns its seal when every receiver has acknowledged.
        group.acknowledge(RECEIVED)
        if layout is not None and (peers := {step.peer for step in layout.share.operations if step.sends}):
            # Their last messages may still be in this process's memory.
            group.await_receivers(RECEIVED, offer.timeout_s, peers)
    except TransportError as error:
        explanation = group.explain(error, f"receiving bucket {min(update.buckets + 1, count)} of {count}")
        # The transport failed, probably since another member did: the others shall look for that one.
        group.fail(str(error), at_fault=False)
        if transport is not None:
            # Before close(): a transfer in flight would keep the staging memory in use.
            transport.abort()
        raise explanation from error
    except BaseException as error:
        group.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        if transport is not None:
            transport.close()
        group.close()


def _receive_buckets(update: _Update, staging: Tensor, transport: Transport, group: Any) -> None:
    """Fill the staging memory with rank 0's buckets. Several are in flight, so that one is digested while others arrive."""
    works: list[tuple[Bucket, Work]] = []

    def finish(bucket: Bucket, work: Work) -> None:
        work.wait(update.offer.timeout_s)
        _arrived(update, bucket.index, staging[bucket.start : bucket.stop], group)

    in_flight = getattr(transport, "receives_in_flight", RECEIVES_IN_FLIGHT)
    for bucket in plan_buckets(update.manifest.tensors, update.manifest.bucket_bytes):
        works.append((bucket, transport.receive(staging[bucket.start : bucket.stop])))
        if len(works) == in_flight:
            finish(*works.pop(0))
    for bucket, work in works:
        finish(bucket, work)


def _arrived(update: _Update, index: int, content: Tensor, group: Any) -> None:
    # Only started: the device computes the digest while the next bucket arrives; verify() reads the values.
    update.digests.append(digest.begin(update.manifest.digest, content))
    update.buckets = index + 1
    update.last_activity = time.monotonic()
    group.progress(update.buckets)


def _abandon_group(update: _Update, group: Any) -> None:
    # Transports wait in calls of libraries that know no event; they poll the group's state instead.
    while not update.arrived.is_set():
        if update.abandoned.wait(1.0):
            group.abandon("the update was dropped")
            return


def _compare(name: str, update: _Update, seal: Seal) -> None:
    manifest = update.manifest
    if (seal.version, seal.manifest) != (manifest.version, manifest.identity):
        raise ManifestError(
            f"{name}: the seal is of version {seal.version}, manifest {seal.manifest[:12]}; offered was version "
            f"{manifest.version}, manifest {manifest.identity[:12]}"
        )
    digests, expected = [pending() for pending in update.digests], seal.digests
    if update.layout is not None:
        expected = (seal.by_member or {}).get(update.offer.rank(update.worker), ())
    if len(digests) != len(expected):
        raise ManifestError(f"{name}: the seal is of {len(expected)} buckets, and {len(digests)} have arrived")
    wrong = [index for index, value in enumerate(digests) if value != expected[index]]
    if wrong:
        # Tensors instead of bucket numbers: the trainer's author knows these names.
        names = update.names(wrong[0])
        suffix = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise DigestError(
            f"{name}: {update} has not arrived as it was sent: {len(wrong)} of {len(digests)} buckets differ in "
            f"{manifest.digest}, the first is bucket {wrong[0] + 1} ({', '.join(names[:4])}{suffix})"
        )


def side_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context for digests and copies, which on the default stream would wait for the engine's kernels."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    module: Any = torch.get_device_module(device)
    return module.stream(module.Stream(device))


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        module.synchronize(device)
