"""The engine's side of updates, one receiver per worker: an update becomes active verified and complete, or not at all.

An update is *receiving* (a thread fills staging memory while the engine generates), *received*, *verified* (its digests match
the seal) and *committed*, or *dropped*. Until the commit no memory that the engine uses is touched. An abandoned update is
dropped when its lease lapses.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from weightwire import digest
from weightwire.background import BackgroundThread, Guard
from weightwire.errors import (
    BaseError,
    CommitError,
    DeadlineError,
    ManifestError,
    NotServingError,
    OwnerError,
    PlanError,
    TransportError,
    UpdateError,
    VersionError,
    WireError,
)
from weightwire.manifest import Manifest, TensorSpec
from weightwire.offer import Offer, Seal, Sharding
from weightwire.plan import Region, check_share, complete
from weightwire.reception import (
    COMMITTED,
    COMMITTING,
    DROPPED,
    RECEIVE_DONE,
    RECEIVING,
    VERIFIED,
    IncomingUpdate,
    quick_switches,
    receive,
    side_stream,
)
from weightwire.sender import synchronise_stream, with_index
from weightwire.staging import BucketLayout, ShardLayout, StagingMemory
from weightwire.transports.base import EXIT_S, transport_kind, transports_for
from weightwire.transports.choice import Location

log = logging.getLogger(__name__)

Load = Callable[[Iterable[tuple[str, Tensor]]], object]
"""Activates tensors: called with names and tensors in the manifest's order, which it copies."""


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
        # Updates arrive on threads, which set their current device by its index.
        self._device = with_index(torch.device(device))
        self._check, self._max_bytes = check, max_bytes
        self._versions: dict[str, int] = {} if version is None else {"model": version}
        self._update: IncomingUpdate | None = None
        self._memory = StagingMemory(self._device)
        self._lock = threading.RLock()
        self._needs = needs
        self._planned: ShardLayout | None = None
        self._refill: BackgroundThread | None = None

    # --- state ---

    def version(self, target: str = "model") -> int | None:
        """Return the active version of the model, or of ``adapter NAME``; None if unknown."""
        return self._versions.get(target)

    def forget(self, target: str) -> None:
        """Forget the active version of a target that the engine replaced or removed itself: any version of it is then new."""
        with self._lock:
            self._versions.pop(target, None)
            if target == "model":
                self._memory.base = None

    def location(self) -> Location:
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
            # The trainer repeats an offer whose answer was lost on the way; a second thread would join the group twice.
            if self._update is not None and self._update.offer.update == offer.update:
                if self._update.is_open:
                    return
                raise UpdateError(f"{self.name}: {self._update} is {self._update.state}; a new one needs a new name")
            rank = offer.rank(worker)
            self._finish_refill()
            # Checked before memory is allocated: an offer that is refused must cost the engine nothing.
            self._require_newer(offer.manifest)
            self._require_possible(offer)
            update = IncomingUpdate(offer, rank, self._layout(offer, worker))
            self._require_base(offer.sharded)
            # No revert of the last update can follow: its memory serves this one.
            if self._update is not None and self._update.state == COMMITTED and self._update.staging is not None:
                self.settle(self._update.offer.update)
                self._finish_refill()
                self._require_base(offer.sharded)  # it may not have become one
            try:
                # All of it now: running out of memory halfway would waste the transfer, and the engine may take the
                # rest meanwhile.
                update.staging = self._memory.take(update.layout.nbytes, adapter=update.is_adapter)
            except (RuntimeError, MemoryError) as error:
                raise UpdateError(
                    f"{self.name}: no memory on {self._device} for the {offer.manifest.nbytes} bytes of {update}: {error}"
                ) from error
            self._update = update
        _joining.add(update)
        # A daemon: an engine that ends must not wait for a trainer that no longer sends.
        BackgroundThread(self._run, update, name=f"weightwire-{offer.update}").start()

    def layout(self, name: str) -> BucketLayout | ShardLayout:
        return self._require_update(name).layout

    def staging(self, name: str) -> Tensor:
        """Return the memory of an update, uint8 [bytes]."""
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
                    f"{update.layout.count} buckets have"
                )
            with self._lock:
                # The receiving thread cannot raise in the caller; it leaves its error here.
                if update.problem is not None:
                    raise update.problem
                self._require_state(update, RECEIVE_DONE)
                update.compare(self.name, seal)
                update.state = VERIFIED
                update.lease.renew(time.monotonic())
        except WireError as error:
            self._drop(update, error)
            raise

    def commit(
        self,
        name: str,
        load: Load,
        restore: Callable[[], object] | None = None,
        refill: Callable[[], object] | None = None,
    ) -> None:
        """Activate a verified update: call ``load`` with its tensors. A no-op after success.

        The engine must not generate meanwhile. If ``load`` raises, ``restore`` is called, and the old version stays active;
        without ``restore``, or if it raises too, :attr:`serving` becomes False until a commit of a complete model succeeds.

        Args:
            name: name of the update.
            load: copies the tensors into the engine's memory.
            restore: undoes a ``load`` that failed or, for :meth:`revert`, one that succeeded.
            refill: writes what was received into the update's memory again, if ``load`` overwrites it, and only reads the
                engine's weights. Called on a thread when the update is settled, if its memory is to be the base of the next one.

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
            update.state, update.previous_versions = COMMITTING, dict(self._versions)
            update.restore, update.refill = restore, refill
            try:
                # Loaders may only queue copies. An error on the device has to appear here, where it can still be undone.
                assert update.staging is not None
                load(update.layout.tensors(update.staging))
                _synchronise(self._device)
            except BaseException as error:
                raise self._undo(update, error) from error
            update.state = COMMITTED
            self._versions[update.manifest.target] = update.manifest.version
            # Only a complete model replaces a mixture of weights; an adapter lies on top of it.
            if not update.is_adapter:
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
        """Release the memory that :meth:`revert` would need, once the commit has succeeded on all workers; return at once."""
        with self._lock:
            update = self._require_update(name)
            self._require_state(update, COMMITTED)
            if update.staging is not None:
                self._memory.keep(update.staging, adapter=update.is_adapter)
                if not update.is_adapter:
                    self._memory.base = update.base
                if update.base is not None and update.refill is not None:
                    # On a thread: the engine generates with the new weights meanwhile.
                    self._refill = BackgroundThread(self._fill_again, update, update.refill, name="weightwire-refill")
                    self._refill.start()
            update.restore = update.refill = update.staging = None

    def _fill_again(self, update: IncomingUpdate, refill: Callable[[], object]) -> None:
        try:
            with side_stream(self._device):
                refill()
                synchronise_stream(self._device)
        except BaseException:
            log.exception("%s: %s cannot be the base of the next one, which has to be complete", self.name, update)
            self._memory.base = None

    def _finish_refill(self) -> None:
        """Wait until the memory that is kept holds what was received, or is no base."""
        refill, self._refill = self._refill, None
        if refill is not None:
            refill.join()

    def drop(self, name: str, reason: str = "the trainer dropped it") -> None:
        """Drop an update; the old weights stay active. A no-op if the name is unknown, or the update is committed."""
        with self._lock:
            update = self._update
            # The name: a late call of an earlier update must not end the one that is open now.
            if update is not None and update.offer.update == name and update.is_open:
                self._drop(update, UpdateError(f"{self.name}: {update} was dropped: {reason}"))

    def close(self) -> None:
        if (update := self._update) is not None:
            self.drop(update.offer.update, f"{self.name} closes")

    @property
    def keeps_memory(self) -> bool:
        """True if memory is kept for the next update."""
        return self._memory.spare is not None

    def release(self) -> None:
        """Free the memory that is kept for the next update, which then has to be complete."""
        with self._lock:
            self._finish_refill()
            self._memory.release()

    # --- conditions ---

    def _require_none_open(self, offer: Offer) -> None:
        update = self._update
        if update is None or not update.is_open or update.offer.update == offer.update:
            return
        # The last owner may only be slow; the message says how long it may still be silent.
        left = update.lease.left_s(time.monotonic())
        if offer.owner != update.offer.owner:
            raise OwnerError(
                f"{self.name}: {offer.owner} offers an update while {update}, of {update.offer.owner}, is {update.state} "
                f"(dropped if nobody continues it for another {left:.1f} s). An engine has one owner at a time"
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
        kind = transport_kind(offer.transport)
        if offer.sharded is not None and not kind.pairs:
            raise TransportError(f"{self.name}: transport {offer.transport!r} does not carry sharded updates")
        if self._device.type not in kind.device_types:
            raise TransportError(
                f"{self.name}: transport {offer.transport!r} moves memory of {', '.join(kind.device_types)}, and "
                f"weights are staged on {self._device} here; transports for {self._device.type}: "
                f"{', '.join(transports_for(self._device.type))}"
            )
        if self._max_bytes is not None and manifest.nbytes > self._max_bytes:
            raise ManifestError(
                f"{self.name}: {manifest.nbytes} bytes are offered; at most {self._max_bytes} are taken"
            )
        self._check(manifest)

    def _layout(self, offer: Offer, worker: int) -> BucketLayout | ShardLayout:
        """Return the layout of an update; that of a sharded one is compared with the needs, and holds for later ones."""
        sharded, tensors = offer.sharded, offer.manifest.tensors
        if sharded is None:
            return BucketLayout(offer.manifest)
        if sharded.shares is not None:
            share = sharded.shares[worker]
            check_share(share, self._needs(tensors), tensors, self.name)
            self._planned = ShardLayout(share, tensors)
        planned = self._planned
        if planned is None or planned.share.plan != sharded.plan or planned.specs != tensors:
            raise PlanError(f"{self.name}: plan {sharded.plan:.80} is not known here")
        return planned

    def _require_base(self, sharded: Sharding | None) -> None:
        """Check that the version from which differences are offered is kept here, under the same plan."""
        if sharded is None or sharded.base is None:
            return
        base, last = self._memory.base, self._update
        if last is not None and last.state == COMMITTED and last.staging is not None and not last.is_adapter:
            # Not settled yet; after forget() it is the base of nothing.
            base = last.base if self._versions.get("model") == last.manifest.version else None
        if base != (sharded.plan, sharded.base):
            state = "nothing is kept" if base is None else f"version {base[1]} of plan {base[0]:.12} is kept"
            raise BaseError(
                f"{self.name}: differences from version {sharded.base} of plan {sharded.plan:.12} are offered, and {state} here"
            )

    def _require_update(self, name: str) -> IncomingUpdate:
        """Return the last update, which must have this name, and renew its lease."""
        with self._lock:
            update = self._update
            if update is None or update.offer.update != name:
                last = "there is none" if update is None else f"the last one is {update}, {update.state}"
                raise UpdateError(f"{self.name}: unknown update {name!r:.120}; {last}")
            update.lease.renew(time.monotonic())
            return update

    def _require_state(self, update: IncomingUpdate, state: str) -> None:
        if update.state != state:
            reason = f": {update.problem}" if update.problem is not None else ""
            raise UpdateError(f"{self.name}: {update} is {update.state}, not {state}{reason}")

    # --- transitions ---

    def _drop(self, update: IncomingUpdate, problem: WireError) -> None:
        with self._lock:
            if not update.is_open:
                return
            # The transport may still write to the memory of an update that has not arrived: it is freed, not kept.
            if update.state != RECEIVING:
                self._memory.keep(update.staging, adapter=update.is_adapter)
            update.end(problem)

    def _undo(self, update: IncomingUpdate, cause: BaseException) -> CommitError:
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
        if not update.is_adapter:
            self._memory.base = None
        # A revert follows a commit that has set the version.
        self._versions = dict(update.previous_versions)
        if isinstance(error, NotServingError):
            self.serving = False
            # No version is active: the next commit may have any, the same one included.
            self._versions.pop(update.manifest.target, None)
        self._memory.keep(update.staging, adapter=update.is_adapter)
        update.end(error)
        return error

    # --- the receiving thread ---

    def _run(self, update: IncomingUpdate) -> None:
        try:
            if self._device.type != "cpu":
                module: Any = torch.get_device_module(self._device)
                # The current device is a thread's own, and collectives of this thread use it.
                module.set_device(self._device)
            with side_stream(self._device), quick_switches():
                receive(update, self._note_arrival)
        except WireError as error:
            self._drop(update, error)
        except BaseException as error:
            log.exception("%s: %s failed", self.name, update)
            self._drop(update, UpdateError(f"{self.name}: {update} failed: {type(error).__name__}: {error}"))
        finally:
            update.arrived.set()
            update.left.set()
        guard = Guard(f"{self.name}: the lease of {update}")
        while update.is_open:
            with guard:
                self._check_lease(update)

    def _note_arrival(self, update: IncomingUpdate) -> None:
        with self._lock:
            # The update may have been dropped while its last bucket arrived.
            if update.state == RECEIVING:
                update.state = RECEIVE_DONE
                update.lease.renew(time.monotonic())
                update.arrived.set()

    def _check_lease(self, update: IncomingUpdate) -> None:
        """Drop an update whose lease has ended; wait for a second otherwise."""
        left = update.lease.left_s(time.monotonic())
        # At most a second: calls extend the lease meanwhile, and a commit ends the loop without this event.
        update.abandoned.wait(min(max(left, 0.01), 1.0))
        with self._lock:
            # Not while receiving: the transfer has deadlines of its own. Checked under the lock, which a call may have held to
            # extend the lease.
            if update.state in (RECEIVE_DONE, VERIFIED) and not update.lease.left_s(time.monotonic()):
                reason = f"{self.name}: {update} was dropped: nobody continued it for {update.offer.lease_s:g} s"
                log.warning("%s", reason)
                self._drop(update, UpdateError(reason))


_joining: weakref.WeakSet[IncomingUpdate] = weakref.WeakSet()
"""Updates whose threads may be in a group."""


@atexit.register
def _leave_groups() -> None:
    """Wait for receiving threads to leave their groups: one that the interpreter ends within torch's code aborts the process."""
    updates, deadline = [update for update in _joining if not update.left.is_set()], time.monotonic() + EXIT_S
    # Without the receivers' locks, which a commit may hold.
    for update in updates:
        update.abandon()
    for update in updates:
        update.left.wait(max(0.0, deadline - time.monotonic()))


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        module.synchronize(device)
