"""One update on the engine's side: its state, and its transfer, on a thread that joins the group and fills the staging memory."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weightwire import digest
from weightwire.engine import Lease
from weightwire.errors import DigestError, ManifestError, TransportError, WireError
from weightwire.group import Group, join
from weightwire.manifest import Manifest
from weightwire.offer import Offer, Seal
from weightwire.sender import RECEIVED
from weightwire.staging import BucketLayout, ShardLayout
from weightwire.transports import Setup

RECEIVING, RECEIVE_DONE, VERIFIED, COMMITTING = OPEN = ("receiving", "received", "verified", "committing")
COMMITTED, DROPPED = "committed", "dropped"


@dataclass(eq=False)
class IncomingUpdate:
    """State of one update of a receiver.

    Attributes:
        rank: rank of this member in the group.
        staging: memory, until the update is dropped or settled.
        lease: the owner's, which every call of the update renews.
        problem: error because of which it was dropped.
        digests: digests of the buckets or chunks that have arrived.
        arrived: set when everything has, or nothing more will.
        abandoned: set when the update is dropped: ends the wait for the other members (:meth:`abandon`).
        group: while the thread is in it.
        left: set when the thread has left the group, and calls no library of the transport any more.
        restore: undoes the commit.
        refill: writes into the staging memory what was received, which the commit has overwritten.
        previous_versions: active before the commit, by target.
    """

    offer: Offer
    rank: int
    layout: BucketLayout | ShardLayout
    staging: Tensor | None = None
    state: str = RECEIVING
    problem: WireError | None = None
    digests: list[digest.Pending] = field(default_factory=list)
    buckets: int = 0
    lease: Lease = field(init=False)
    arrived: threading.Event = field(default_factory=threading.Event)
    abandoned: threading.Event = field(default_factory=threading.Event)
    group: Group | None = None
    left: threading.Event = field(default_factory=threading.Event)
    restore: Callable[[], object] | None = None
    refill: Callable[[], object] | None = None
    previous_versions: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lease = Lease.begin(self.offer.owner, self.offer.lease_s, time.monotonic())

    @property
    def manifest(self) -> Manifest:
        return self.offer.manifest

    @property
    def is_adapter(self) -> bool:
        return self.manifest.adapter is not None

    @property
    def is_open(self) -> bool:
        return self.state in OPEN

    @property
    def base(self) -> tuple[str, int] | None:
        """Plan and version of which the staging memory will be a base; None if it will not."""
        sharded = self.offer.sharded
        return (sharded.plan, self.manifest.version) if sharded is not None and sharded.keep else None

    def __str__(self) -> str:
        return str(self.offer)

    def end(self, problem: WireError) -> None:
        """Set the state of an update that will never be active, and release its memory."""
        # The first problem stays: those after it follow from it.
        self.state, self.problem, self.digests = DROPPED, self.problem or problem, []
        self.staging = self.restore = self.refill = None
        self.abandon()
        self.arrived.set()

    def abandon(self) -> None:
        """End the waits of the thread."""
        self.abandoned.set()
        # Transports wait in calls of libraries that know no event; they poll the group's state.
        if (group := self.group) is not None:
            group.abandon("the update was dropped")

    def compare(self, receiver: str, seal: Seal) -> None:
        """Compare what has arrived with the seal."""
        manifest = self.manifest
        if (seal.version, seal.manifest) != (manifest.version, manifest.identity):
            raise ManifestError(
                f"{receiver}: the seal is of version {seal.version}, manifest {seal.manifest[:12]}; offered was version "
                f"{manifest.version}, manifest {manifest.identity[:12]}"
            )
        digests, expected = [pending() for pending in self.digests], self.layout.digests(seal, self.rank)
        if len(digests) != len(expected):
            raise ManifestError(f"{receiver}: the seal is of {len(expected)} buckets, and {len(digests)} have arrived")
        wrong = [index for index, value in enumerate(digests) if value != expected[index]]
        if wrong:
            # Tensors instead of bucket numbers: the trainer's author knows these names.
            names = self.layout.names(wrong[0])
            suffix = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise DigestError(
                f"{receiver}: {self} has not arrived as it was sent: {len(wrong)} of {len(digests)} buckets differ in "
                f"{manifest.digest}, the first is bucket {wrong[0] + 1} ({', '.join(names[:4])}{suffix})"
            )


def receive(update: IncomingUpdate, note_arrival: Callable[[IncomingUpdate], object]) -> None:
    """Join the group and fill the staging memory.

    Args:
        note_arrival: called when everything has arrived.
    """
    offer, staging, layout = update.offer, update.staging, update.layout
    assert staging is not None
    group = update.group = join(offer.host, offer.port, offer.update, update.rank, offer.timeout_s, update.abandoned)
    # It may have been dropped while the last member joined.
    if update.abandoned.is_set():
        update.abandon()
    # Bound before the try block: if creating the transport fails, the group must still be notified.
    transport: Any = None

    def arrived(index: int, content: Tensor) -> None:
        # Only started: the device computes the digest while the next bucket arrives; verify() reads the values.
        update.digests.append(digest.begin(offer.manifest.digest, content))
        update.buckets = index + 1
        update.lease.renew(time.monotonic())
        group.progress(update.buckets)

    try:
        transport = layout.connect(
            offer.transport, Setup(group, offer.manifest, staging.device, offer.timeout_s, offer.options)
        )
        differences = offer.sharded is not None and offer.sharded.base is not None
        layout.receive(staging, transport, offer.timeout_s, arrived, differences=differences)
        # Here, on this thread: verify() would compute it while the engine waits.
        _ = offer.manifest.identity
        # Before the acknowledgement: the sender's seal follows it at once, and must not find an update that is still receiving.
        note_arrival(update)
        # The sender returns its seal when every receiver has acknowledged.
        group.acknowledge(RECEIVED)
        if layout.readers:
            # Their last messages may still be in this process's memory.
            group.await_receivers(RECEIVED, offer.timeout_s, layout.readers)
    except TransportError as error:
        activity = f"receiving bucket {min(update.buckets + 1, layout.count)} of {layout.count}"
        explanation = group.explain(error, activity)
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
        update.group = None
        group.close()


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


def side_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context for digests and copies, which on the default stream would wait for the engine's kernels."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    module: Any = torch.get_device_module(device)
    return module.stream(module.Stream(device))
