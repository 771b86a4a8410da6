"""Push weights from all ranks of a trainer to all engines.

Rank 0 talks to the engines and sends; the other ranks take part in the export, and learn the result of each phase before they
enter the next one. So no rank waits for one that has given up, and the trainer's process groups stay usable after a failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megascend.errors import ConfigError, MegascendError
from megascend.runtime.distributed.objects import agree
from megascend.sync.delivery import MARGIN_S, Delivery, RunCoroutine
from megascend.sync.push import OutdatedPlanError, Plan, Push, PushResult, WholeTensors
from megascend.sync.ranks import Ranks
from megascend.sync.sharded import Mode, ShardedSync
from weightwire import digest as digests
from weightwire.engine import InferenceEngine
from weightwire.errors import WireError
from weightwire.fp8 import BlockFormat, stored_specs
from weightwire.manifest import AdapterInfo, TensorSpec, default_bucket_bytes
from weightwire.sender import spec_of
from weightwire.transports.base import device_types, transports_for
from weightwire.transports.choice import AUTO

if TYPE_CHECKING:
    from torch import Tensor

    from megascend.backend import Backend


class WeightSync:
    """Sends a backend's weights to inference engines. Every method is collective: all ranks call it, in the same order.

    Args:
        backend: backend whose weights are sent.
        engines: engines on rank 0; ignored on other ranks. The list may be changed between pushes (:attr:`engines`).
        transport: a name of :func:`weightwire.transports.transport_names`. By default it is chosen at every push from the devices
            of trainer and engines: ``nccl`` between GPUs, ``cuda_ipc`` on one GPU, ``hccl`` between NPUs, ``gloo`` to engines
            on the CPU.
        host: address under which engines reach rank 0; the store binds to it. The default is for engines on this machine.
        bucket_bytes: size of a bucket, of which rank 0 allocates two. Default: 512 MiB for buckets on an accelerator, 256 MiB on
            a CPU.
        digest: algorithm that verifies buckets: a name of :data:`weightwire.digest.ALGORITHMS`.
        timeout_s: deadline of each wait, in seconds; default: less than half of the backend's timeout, at most 120.
        overlap: export into one bucket while another one is sent.
        options: options of the transport.
        sharded: every rank sends the slices that it holds, and every worker receives those that it loads. None: with weights on
            CPUs, and on GPUs that CUDA IPC connects, if engines and backend can describe the slices and several ranks or several
            workers of an engine share the transfer; rank 0 otherwise sends whole tensors. True: a push without a plan is refused.
        mode: ``full``, or ``delta``: send what has changed since the last push, exactly; or ``auto``: while that is possible and
            worth it. All ranks and workers then keep a copy of what was sent last; with ``auto``, only if changes may follow.
        full_every: in modes ``delta`` and ``auto``, send everything after so many pushes of changes.
        run: runs a coroutine to completion, for engines bound to your own event loop; called on another thread than the loop's:
            ``lambda c: asyncio.run_coroutine_threadsafe(c, loop).result()``. Default: a loop on a separate thread.

    Raises:
        ConfigError: unknown transport or digest, a transport that does not support the backend's device, or ``timeout_s`` longer
            than other ranks wait.
        WeightSyncError: on every rank: rank 0 cannot bind ``host``.
    """

    def __init__(
        self,
        backend: Backend,
        engines: Sequence[InferenceEngine] = (),
        *,
        transport: str = AUTO,
        host: str = "127.0.0.1",
        bucket_bytes: int | None = None,
        digest: str = "multilinear64",
        timeout_s: float | None = None,
        overlap: bool = True,
        options: Mapping[str, Any] | None = None,
        sharded: bool | None = None,
        mode: Mode = "full",
        full_every: int = 50,
        run: RunCoroutine | None = None,
    ) -> None:
        self.engines = list(engines)
        self._backend, self._groups = backend, backend.groups
        self._specs: tuple[TensorSpec, ...] | None = None  # of the model's tensors, as they are exported
        self._stored: tuple[tuple[TensorSpec, ...], Mapping[str, BlockFormat]] | None = None  # as engines store them
        check_transport(transport, backend.groups.device.type)
        self.timeout_s = _deadline(timeout_s, backend)
        try:
            digests.require(digest)
        except WireError as error:
            raise ConfigError(f"WeightSync: {error}") from error
        self._ranks, self._delivery = Ranks(backend.groups), None
        self._shards = ShardedSync(
            backend,
            sharded=sharded,
            mode=mode,
            full_every=full_every,
            chunk_bytes=bucket_bytes or default_bucket_bytes(backend.groups.device.type),
        )

        def listen() -> None:
            self._delivery = Delivery(
                transport=transport,
                device=backend.groups.device,
                host=host,
                bucket_bytes=bucket_bytes,
                digest=digest,
                timeout_s=self.timeout_s,
                overlap=overlap,
                options=options,
                run=run,
            )

        self._ranks.on_rank_0(listen, f"WeightSync({transport=}, {host=}, {bucket_bytes=}, {digest=})")

    def push(self, version: int, adapter: str | None = None, *, adapter_only: bool = False) -> PushResult:
        """Update all engines to the current weights, as ``version``. Collective.

        Engines keep generating with the old weights while they receive. They pause only for the commit, which starts once all
        engines have verified the data.

        Args:
            version: greater than the last one of the same target.
            adapter: adapter to merge into the model that is sent.
            adapter_only: send only the adapter's factors; engines load them under its name.

        Raises:
            EngineFaultError: on every rank: an engine was too slow, was lost, or failed. The message names the engine and its
                error, and which engines keep the old weights: all of them, unless the commit failed. The next push works.
            WeightSyncError: on every rank: likewise, of an engine that refused, or a failure of the trainer's; or no plan is
                possible with ``sharded=True`` or ``mode="delta"``.
            ConfigError: unknown adapter, or ``adapter_only`` without one.
            OutOfStepError, ProcessGroupError, CollectiveTimeoutError: the trainer's own ranks failed.
        """
        with self._groups.monitor.phase("weight sync"):
            # Compared before anything is exported: ranks that push different things would wait for each other in the export.
            self._agree(version, adapter, adapter_only)
            try:
                return self._push(version, adapter, adapter_only)
            except OutdatedPlanError:
                # No failure: an engine was restarted. A new plan is not outdated, and the second attempt is the last.
                return self._push(version, adapter, adapter_only)

    def close(self) -> None:
        """Stop listening, and release what was kept for the next push. Engines keep their weights. Not collective."""
        self._shards.close()
        if self._delivery is not None:
            self._delivery.close()
        self._delivery = None

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- on all ranks ---

    def _push(self, version: int, adapter: str | None, adapter_only: bool) -> PushResult:
        """Push once.

        Raises:
            OutdatedPlanError: an engine no longer had the plan of a sharded update, which is forgotten.
        """
        push = Push(self.engines, version, self._delivery, self._ranks)
        with push.timed("describe"):
            whole = self._whole_tensors(push, adapter, adapter_only)
            # Without a reason against it every rank sends its own slices; rank 0 otherwise gathers and sends whole tensors.
            reason = self._shards.prepare(push, whole, self._specs or (), merged=adapter is not None)
        plan: Plan = whole if reason else self._shards
        push.result.sharded, push.result.why_not_sharded = not reason, reason
        try:
            push.run(plan)
        except BaseException:  # an interrupt, too: what the engines have is then unknown
            if not reason:
                self._shards.forget()
            raise
        # Only rank 0 calls engines: its durations and amounts are the ones reported.
        result = self._ranks.on_rank_0(lambda: push.result, "the result of the push")
        if not reason:
            self._shards.succeeded(result)
        return result

    def _agree(self, version: int, adapter: str | None, adapter_only: bool) -> None:
        problem: MegascendError | None = None
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            problem = ConfigError(f"push: version {version!r} is not a number from 0 on")
        elif adapter_only and adapter is None:
            problem = ConfigError("push(adapter_only=True): name the adapter")
        elif adapter is not None and adapter not in self._backend.adapters:
            names = ", ".join(self._backend.adapters) or "none"
            problem = ConfigError(f"push: unknown adapter {adapter!r}; loaded: {names}")
        agree(f"push({version=}, {adapter=}, {adapter_only=})", self._groups, problem)

    def _whole_tensors(self, push: Push, adapter: str | None, factors_only: bool) -> WholeTensors:
        if factors_only and adapter is not None:
            config, tensors = self._backend.adapter_as_peft(adapter) or ({}, {})  # None on ranks other than 0
            return WholeTensors.of(tensors, {}, AdapterInfo(adapter, config))
        export = self._backend.named_weights
        if self._specs is None:
            # Only an export itself yields tensor names. Their order is fixed, so run it once on the meta device, without data.
            with contextlib.closing(_generator(export(receivers="main", device="meta"))) as tensors:
                self._specs = tuple(spec_of(name, tensor) for name, tensor in tensors)
        exported = self._specs

        def store() -> None:
            formats = push.delivery.quantised(push.engines)
            # The same object as in the push before: see weightwire.manifest.
            if self._stored is None or self._stored[1] != formats:
                self._stored = stored_specs(exported, formats) if formats else exported, formats

        self._ranks.on_rank_0(store, "how the engines store weights", f"version {push.version} was not sent")
        # Other ranks export no tensors, and learn of the formats with a plan.
        specs, formats = self._stored or (exported, {})
        return WholeTensors(specs, None, _generator(export(adapter, receivers="main")), formats)


def check_transport(transport: str, device_type: str) -> None:
    """Raise ConfigError unless ``transport`` is known and moves memory of a model's device, or of the host."""
    if transport == AUTO:
        return
    try:
        possible = device_types(transport)
    except WireError as error:
        raise ConfigError(f"WeightSync: {error} (transport {AUTO!r} chooses one)") from error
    if device_type not in possible and "cpu" not in possible:
        raise ConfigError(
            f"WeightSync: transport {transport!r} moves memory of {', '.join(possible)}, not of {device_type}; "
            f"available for {device_type}: {', '.join(transports_for(device_type))} (transport {AUTO!r} chooses one)"
        )


def _deadline(timeout_s: float | None, backend: Backend) -> float:
    # Rank 0 reports a failure after its own deadline: the others must wait longer.
    limit = backend.groups.timeout_s - MARGIN_S
    if timeout_s is None:
        timeout_s = max(1.0, min(120.0, limit / 2))
    if backend.world_size > 1 and timeout_s > limit:
        raise ConfigError(
            f"WeightSync: timeout_s {timeout_s:g} is too long: other ranks wait {backend.groups.timeout_s:g} s for rank 0; set "
            f"it to at most {limit:g}, or the backend's timeout_s higher"
        )
    return timeout_s


def _generator(weights: Iterator[tuple[str, Tensor]]) -> Generator[tuple[str, Tensor], None, None]:
    """Narrow the type of an engine's export to a generator, which can be closed."""
    assert isinstance(weights, Generator)
    return weights
