"""Connection of one process, rank 0 of a trainer, to inference engines: its address, its name, and calls of all engines."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megascend.errors import ConfigError, WeightSyncError
from megascend.sync.ranks import OLD_WEIGHTS, is_lost, push_error
from weightwire.engine import InferenceEngine
from weightwire.engine_calls import LoopThread, call_all
from weightwire.errors import ManifestError, PlanError, TransportError, WireError
from weightwire.fp8 import BlockFormat, merged_formats
from weightwire.group import EXPLAIN_S, Listener
from weightwire.manifest import AdapterInfo, Manifest, TensorSpec, default_bucket_bytes
from weightwire.offer import Offer
from weightwire.plan import Region
from weightwire.sender import Buffers
from weightwire.transports.base import device_types
from weightwire.transports.choice import AUTO, Location, check, choose, choose_pairs

RunCoroutine = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to completion, from a thread without an event loop."""
MARGIN_S = EXPLAIN_S + 2.0
"""Seconds past a deadline that this process may need to report a failure to others."""


@dataclass(frozen=True)
class Answers:
    """Results and errors of one call of all engines, by the engine's name."""

    results: dict[str, Any]
    errors: dict[str, Exception]

    def required(self, description: str, after: str = OLD_WEIGHTS) -> dict[str, Any]:
        """Return the results of all engines; raise a WeightSyncError that names those that failed, are lost or too slow."""
        if self.errors:
            reasons = "; ".join(
                # The message of a TimeoutError is made here and complete; an engine's own errors need their kind.
                f"{name}: {error}" if type(error) is TimeoutError else f"{name}: {type(error).__name__}: {error}"
                for name, error in self.errors.items()
            )
            raise push_error(self.errors.values(), f"{description}: {reasons}{after}")
        return self.results


class Delivery:
    """Listens for engines' receivers, and calls the engines.

    Args:
        device: device of the weights. Buckets are on the same device if the transport supports it, else on the CPU.
        transport, host, bucket_bytes, digest, timeout_s, overlap, options, run: as of :class:`megascend.WeightSync`.

    Attributes:
        listener: address of the groups of updates.
        owner: name of this trainer.
        buffers: buckets of the updates that this process sends.
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
        self.options, self.timeout_s, self.overlap = dict(options or {}), timeout_s, overlap
        self._transport, self._device, self._bucket_bytes, self._digest = transport, device, bucket_bytes, digest
        # The random part tells a restarted trainer from its predecessor, whose updates engines may still hold.
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self.listener, self.buffers = Listener(host), Buffers()
        self._undropped: dict[str, set[str]] = {}
        """Names of the failed updates that an engine could not be made to drop, by the engine's name."""
        self._loop: LoopThread | None = None
        if run is None:
            self._loop = LoopThread("megascend-weightsync")
            run = self._loop.run
        self._run: RunCoroutine = run

    def call(
        self,
        engines: Sequence[InferenceEngine],
        call: Callable[[InferenceEngine], Awaitable[Any]],
        timeout_s: float = 0.0,
    ) -> Answers:
        """Call all engines concurrently, and wait for all, for ``timeout_s`` (default: this object's) at most."""
        return Answers(*self._run(call_all(engines, call, timeout_s or self.timeout_s)))

    def quantised(self, engines: Sequence[InferenceEngine]) -> Mapping[str, BlockFormat]:
        """Return the weights that the engines store in fp8 blocks, by name."""
        if not engines:
            return {}
        # Every time: an engine that was restarted with another checkpoint may take scales that are wrong for it.
        formats = self.call(engines, lambda engine: engine.quantised()).required("push")
        try:
            return merged_formats({engine.name: formats[engine.name] for engine in engines})
        except ManifestError as error:
            raise WeightSyncError(f"push: {error}{OLD_WEIGHTS}") from error

    @property
    def is_loopback(self) -> bool:
        """Check whether only processes on this machine reach this one."""
        host = self.listener.host
        return host == "localhost" or host.startswith("127.") or host == "::1"

    def members(self, engines: Sequence[InferenceEngine]) -> tuple[dict[str, int], dict[str, Location | None]]:
        """Return the number of workers by engine, and every worker's memory by its name for messages."""
        if not engines:
            raise ConfigError("push: no engines are configured")
        names = [engine.name for engine in engines]
        # Answers are kept by name.
        if len(set(names)) < len(names):
            raise ConfigError(f"push: engine names are not unique: {', '.join(names)}")
        locations = self.call(engines, lambda engine: engine.locations()).required("push", "")
        counts = {name: len(locations[name]) for name in names}
        memories = (location for name in names for location in locations[name])
        return counts, dict(zip(member_names(counts), memories, strict=True))

    def ask_needs(
        self, engines: Sequence[InferenceEngine], specs: tuple[TensorSpec, ...]
    ) -> dict[str, list[tuple[Region, ...]] | None]:
        """Return the slices that the workers of each engine load (None: unknown).

        Raises:
            PlanError: an engine cannot describe them; the message names it.
            EngineFaultError: an engine is lost.
        """
        self.drop_left(engines)  # an engine with an open update refuses to answer
        needs = self.call(engines, lambda engine: engine.needs(specs))
        for name, error in needs.errors.items():
            text = f"{name} cannot describe what its workers load: {error}"
            # Rank 0 could not send to it either.
            if not isinstance(error, WireError | NotImplementedError) and is_lost(error):
                raise push_error(needs.errors.values(), text) from error
            raise PlanError(text) from error
        return needs.results

    def check_pairs(self, members: Mapping[str, Location | None], trainers: Sequence[Location]) -> str:
        """Return the transport of a sharded update; PlanError if none connects all members."""
        receivers = {name: location or Location("cpu") for name, location in members.items()}
        ranks = {f"trainer rank {rank}": location for rank, location in enumerate(trainers)}
        try:
            return choose_pairs(None if self._transport == AUTO else self._transport, ranks, receivers)
        except TransportError as error:
            raise PlanError(str(error)) from error

    def drop(self, update: str, engines: Sequence[InferenceEngine]) -> None:
        """Make engines drop an update. An engine that cannot be reached is asked again before its next offer."""
        for engine in engines:
            self._undropped.setdefault(engine.name, set()).add(update)
        self.drop_left(engines)

    def drop_left(self, engines: Sequence[InferenceEngine]) -> None:
        """Make engines drop their updates that have failed, unless they have done so."""
        left = [engine for engine in engines if self._undropped.get(engine.name)]

        async def drop(engine: InferenceEngine) -> None:
            for name in tuple(self._undropped[engine.name]):
                await engine.drop(name)
                self._undropped[engine.name].discard(name)

        if left:
            # Suppressed: it would hide the error that is being raised, and an engine with an old update refuses the next offer.
            with contextlib.suppress(Exception):
                # Within the margin that other ranks grant this one for reporting a failure.
                self.call(left, drop, min(self.timeout_s, MARGIN_S))

    def begin(self, engines: Sequence[InferenceEngine], offers: Mapping[str, Offer]) -> Answers:
        """Offer an update to engines, which must not have an earlier one."""
        self.drop_left(engines)
        answers = self.call(engines, lambda engine: engine.begin_update(offers[engine.name]))
        for name in answers.results:
            # It would have refused if it still had an earlier update: one that was restarted never answers for it.
            self._undropped.pop(name, None)
        return answers

    def manifest(
        self, version: int, specs: tuple[TensorSpec, ...], transport: str, adapter: AdapterInfo | None = None
    ) -> tuple[Manifest, torch.device]:
        """Return the manifest of an update, and the device of its buckets."""
        device = self._device if self._device.type in device_types(transport) else torch.device("cpu")
        bucket_bytes = self._bucket_bytes or default_bucket_bytes(device.type)
        return Manifest(version, specs, bucket_bytes, self._digest, adapter), device

    def close(self) -> None:
        """Stop listening, and release the buckets. Engines keep their weights."""
        # Dropping the last reference frees the buckets, which may be device memory.
        self.buffers = Buffers()
        if self._loop is not None:
            self._loop.close()
        self.listener.close()

    def fitting_transport(self, members: Mapping[str, Location | None]) -> str:
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


def member_names(counts: Mapping[str, int]) -> list[str]:
    """Return the names of all workers for messages, engine after engine."""
    return [
        name if count == 1 else f"{name} worker {worker}" for name, count in counts.items() for worker in range(count)
    ]
