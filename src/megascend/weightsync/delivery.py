"""Updates of inference engines from one process: rank 0's part of a push.

Independent of backends and other ranks: callers pass the tensor specs first, then the tensors.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megascend.errors import ConfigError, WeightSyncError
from weightwire.engine import InferenceEngine
from weightwire.engine_calls import LoopThread, call_all
from weightwire.errors import TransportError, WireError
from weightwire.group import EXPLAIN_S, Listener
from weightwire.manifest import AdapterInfo, Manifest, TensorSpec, default_bucket_bytes
from weightwire.offer import Offer, Seal
from weightwire.sender import Buffers, Sender, spec_of
from weightwire.transports.base import device_types
from weightwire.transports.choice import AUTO, Location, check, choose

Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to completion, from a thread without an event loop."""
MARGIN_S = EXPLAIN_S + 2.0
"""Seconds past a deadline that this process may need to report a failure to others."""


@dataclass
class Update:
    """An update in progress.

    Attributes:
        name: name of its group; empty before :meth:`Delivery.begin`.
        engines: participating engines.
        version: version that they receive.
        sender: connected sender; None until all receivers have joined.
        seal: digest of the sent data; None before the transfer.
        transport: transport in use; empty before :meth:`Delivery.begin`.
        nbytes, buckets: amounts sent to each receiver.
        parts: seconds of the phases' parts, by ``PHASE.PART``; of engines, those of the slowest one.
    """

    name: str = ""
    engines: list[InferenceEngine] = field(default_factory=list)
    version: int = 0
    sender: Sender | None = None
    seal: Seal | None = None
    transport: str = ""
    nbytes: int = 0
    buckets: int = 0
    parts: dict[str, float] = field(default_factory=dict)

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send the tensors, in the order of the specs passed to :meth:`Delivery.begin`."""
        assert self.sender is not None
        with self.sender as sender:
            self.seal = sender.send(tensors)
        self.nbytes, self.buckets = sender.traffic.nbytes, sender.traffic.buckets
        self.parts |= {f"transfer.{part}": seconds for part, seconds in sender.traffic.seconds.items()}

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Record the seconds within the context as those of a part."""
        start = time.perf_counter()
        yield
        self.parts[part] = time.perf_counter() - start


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
        transport: str,
        device: torch.device,
        host: str,
        bucket_bytes: int | None,
        digest: str,
        timeout_s: float,
        overlap: bool = True,
        options: Mapping[str, Any] | None = None,
        run: Run | None = None,
    ) -> None:
        self._transport, self._device, self._options = transport, device, dict(options or {})
        self._bucket_bytes, self._digest = bucket_bytes, digest
        self._timeout_s, self._overlap = timeout_s, overlap
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._listener = Listener(host)
        self._buffers = Buffers()
        self._loop: LoopThread | None = None
        if run is None:
            self._loop = LoopThread("megascend-weightsync")
            run = self._loop.run
        self._run: Run = run

    def push(self, engines: Sequence[InferenceEngine], version: int, tensors: Mapping[str, Tensor]) -> Update:
        """Update all engines to ``version``: begin, transfer, verify and commit.

        Args:
            version: greater than the engines' current one.
            tensors: the model's tensors by their Hugging Face names.

        Raises:
            WeightSyncError: the message names the engine, its error, and the engines that keep the old weights.
        """
        update = Update()
        try:
            self.begin(update, engines, version, tuple(spec_of(*item) for item in tensors.items()))
            update.send(tensors.items())
            self.verify(update)
        except WireError as error:
            self.drop(update)
            raise WeightSyncError(
                f"version {version} was not sent: {error}; all engines keep the old weights"
            ) from error
        # An interrupt, too: engines would keep the update in memory until its lease ends.
        except BaseException:
            self.drop(update)
            raise
        # After the try block: a commit that failed on some engines cannot be dropped.
        self.commit(update)
        return update

    def begin(
        self,
        update: Update,
        engines: Sequence[InferenceEngine],
        version: int,
        specs: tuple[TensorSpec, ...],
        adapter: AdapterInfo | None = None,
    ) -> None:
        """Offer the update to all engines and wait for their receivers; ``update.sender`` is then connected."""
        update.engines, update.version = list(engines), version
        if not update.engines:
            raise ConfigError("push: no engines are configured")
        names = [engine.name for engine in update.engines]
        # Answers are told apart by name.
        if len(set(names)) < len(names):
            raise ConfigError(f"push: engine names are not unique: {', '.join(names)}")
        # The devices of the engines' workers decide the transport.
        with update.timed("begin.locations"):
            answers = self._all(update, lambda engine: engine.locations(), self._timeout_s)
        locations = self._require_all(*answers, "push", "")
        counts = {name: len(locations[name]) for name in names}
        members = {
            name if counts[name] == 1 else f"{name} worker {worker}": location
            for name in names
            for worker, location in enumerate(locations[name])
        }
        update.transport = self._fitting_transport(members)
        device = self._device if self._device.type in device_types(update.transport) else torch.device("cpu")
        bucket_bytes = self._bucket_bytes or default_bucket_bytes(device.type)
        manifest = Manifest(version, specs, bucket_bytes, self._digest, adapter)
        update.name = self._listener.new_group([f"trainer {self._owner}", *members])
        offers, first = {}, 1  # rank 0 of the group is the trainer
        for name in names:
            offers[name] = self._offer(update, first, counts[name], manifest)
            first += counts[name]
        with update.timed("begin.offer"):
            answers = self._all(update, lambda engine: engine.begin_update(offers[engine.name]), self._timeout_s)
        self._require_all(*answers, f"version {version} was not begun", "; all engines keep the old weights")
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

    def verify(self, update: Update) -> None:
        """Wait until every engine has verified what it received."""
        assert update.seal is not None
        seal = update.seal
        in_time = max(0.1, self._timeout_s - 2.0)  # leaves the engine time to answer before our own deadline
        answers = self._all(update, lambda engine: engine.verify(seal, in_time), self._timeout_s)
        description = f"version {seal.version} was not verified"
        self._require_all(*answers, description, "; all engines keep the old weights")

    def commit(self, update: Update) -> None:
        """Activate the verified update on all engines."""
        committed, failed = self._all(update, lambda engine: engine.commit(update.name), self._timeout_s)
        for seconds in committed.values():
            for part, value in (seconds or {}).items():
                name = f"commit.{part}"
                update.parts[name] = max(update.parts.get(name, 0.0), value)
        active = f"; version {update.version} is active on {', '.join(committed)}" if committed else ""
        self._require_all(committed, failed, f"version {update.version} was not committed everywhere", active)

    def drop(self, update: Update) -> None:
        """Clean up a failed update. Suppresses errors, which would hide the one being raised."""
        if not update.name:
            return
        if update.sender is not None:
            update.sender.close()
        with contextlib.suppress(Exception):
            # Within the margin that other ranks grant this one for reporting a failure.
            self._all(update, lambda engine: engine.drop(update.name), min(self._timeout_s, MARGIN_S))

    def close(self) -> None:
        """Stop listening, and release the buckets. Engines keep their weights."""
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

    def _offer(self, update: Update, first: int, workers: int, manifest: Manifest) -> Offer:
        return Offer(
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
        )

    def _all(
        self, update: Update, call: Callable[[InferenceEngine], Any], timeout_s: float
    ) -> tuple[dict[str, Any], dict[str, Exception]]:
        return self._run(call_all(update.engines, call, timeout_s))

    def _require_all(
        self, answers: dict[str, Any], failed: dict[str, Exception], description: str, after: str
    ) -> dict[str, Any]:
        if failed:
            reasons = "; ".join(
                f"{name}: {error}" if type(error) is TimeoutError else f"{name}: {type(error).__name__}: {error}"
                for name, error in failed.items()
            )
            raise WeightSyncError(f"{description}: {reasons}{after}")
        return answers
