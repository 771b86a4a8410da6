"""verl's weight synchronisation over weightwire: a checkpoint engine of the name ``megascend``, for verl 0.9.

In verl's configuration, below ``actor_rollout_ref.rollout``::

    checkpoint_engine:
      backend: megascend
      custom_backend_module: megascend.integrations.verl_checkpoint_engine
      update_weights_bucket_megabytes: 512
      engine_kwargs:
        megascend: {transport: nccl, timeout_s: 300}

Each update creates a group of the master (actor rank 0) and all rollout workers, without the default process group or guessed
ports. A batch's digests and version are verified before its tensors are passed to the engine; every wait has a deadline, and
errors name the member that is missing or lost. With ``stage: true`` a worker first receives and verifies the whole update, which
takes the memory of the model once more, so that a failing sender cannot leave an engine with half an update. verl's manager
pauses and resumes the engines; a failed update leaves them paused, as with verl's own checkpoint engines.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch

from megascend.apps.rl.rollout.controller.address import unbracketed
from megascend.errors import MissingDependencyError
from weightwire.errors import TransportError, UpdateError
from weightwire.group import Group, Listener, connect, join
from weightwire.manifest import Manifest, TensorSpec
from weightwire.stream import StreamReceiver, StreamSender
from weightwire.transports.base import Setup, Transport, device_types, make_transport

try:
    from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
    from verl.workers.rollout.utils import ensure_async_iterator
except ImportError as error:
    raise MissingDependencyError(f"{__name__} is loaded by verl, which cannot be imported here: {error}") from error

log = logging.getLogger(__name__)
T = TypeVar("T")

CALLING_THREAD = ("hccl", "vllm_hccl")
"""Transports whose library works on the calling thread only; with them an update blocks the worker's event loop."""


@CheckpointEngineRegistry.register("megascend")
class WeightwireCheckpointEngine(CheckpointEngine):
    """One worker's side of every update; verl calls the methods in the order of their definition.

    Args:
        bucket_size: bytes of a bucket. A sender allocates two, a receiver one.
        is_master: True on actor rank 0, which sends.
        transport: name of a weightwire transport; its buffers are on the device of verl's worker.
        timeout_s: deadline in seconds for joining, and for every bucket: the trainer may need that long to gather one.
        host: address under which the others reach the master; default: Ray's address of its node.
        stage: yield tensors only after all have been received and verified.
        options: options of the transport.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        transport: str = "gloo",
        timeout_s: float = 600.0,
        host: str | None = None,
        stage: bool = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.bucket_size, self.is_master = bucket_size, is_master
        self._transport_name, self._timeout_s, self._stage = transport, timeout_s, stage
        self._device = _current_device(transport)
        self._host, self._options = host, options or {}
        # The listener outlives updates; group, transport and thread belong to one.
        self._listener: Listener | None = None
        self._group: Group | None = None
        self._transport: Transport | None = None
        self._thread: ThreadPoolExecutor | None = None

    def prepare(self) -> dict[str, Any]:
        """Return the address of this update's group on the master; {} on the others."""
        self.finalize()  # verl does not call it after a failed update
        if not self.is_master:
            return {}
        if self._listener is None:
            import ray

            self._listener = Listener(self._host or unbracketed(ray.util.get_node_ip_address()))
        # A token per update: keys of an earlier, failed one stay in the listener's store.
        return {"host": self._listener.host, "port": self._listener.port, "token": uuid.uuid4().hex}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Assign ranks: actor rank 0 is rank 0 of the group, rollout workers are 1 to N, other actors -1 (not members)."""
        if not metadata or not metadata[0]:
            raise UpdateError("verl: actor rank 0 is not the master of the checkpoint engine")
        actors = [0] + [-1] * (actor_wg_world_size - 1)
        rollouts = list(range(1, rollout_world_size + 1))

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {
                "rank": ranks,
                "world_size": [rollout_world_size + 1] * len(ranks),
                "meeting": [metadata[0]] * len(ranks),
            }

        return arguments(actors), arguments(rollouts)

    def init_process_group(self, rank: int, world_size: int, meeting: dict[str, Any]) -> None:
        """Join the group and connect the transport."""
        # Actors other than rank 0 only take part in the trainer's gathers.
        if rank < 0:
            return
        store = connect(meeting["host"], meeting["port"], self._timeout_s)
        key = f"verl/{meeting['token']}"
        if rank == 0:
            if self._listener is None:
                raise UpdateError("verl: init_process_group of the master came before prepare")
            # Names for error messages.
            members = ["actor 0", *(f"rollout worker {worker}" for worker in range(world_size - 1))]
            store.set(key, self._listener.new_group(members))
        try:
            store.wait([key], timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise TransportError(
                f"verl: rollout worker {rank - 1}: the master has not announced the group within {self._timeout_s:g} s"
            ) from error
        name = store.get(key).decode()
        self._group = join(meeting["host"], meeting["port"], name, rank, self._timeout_s)
        # One thread makes all calls, since NCCL and CUDA bind their current device to a thread.
        self._thread = ThreadPoolExecutor(1, "megascend-verl") if self._transport_name not in CALLING_THREAD else None
        # Each batch carries its own manifest; this one describes just the buffer.
        manifest = Manifest(0, (TensorSpec("bucket", "uint8", (self.bucket_size,)),), self.bucket_size)
        setup = Setup(self._group, manifest, self._device, self._timeout_s, self._options)
        self._transport = self._run(make_transport, self._transport_name, setup)

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Send the generator's tensors as version ``global_steps``; actors outside the group only exhaust the generator.

        If sending fails, the generator is exhausted before the error is raised: its gathers are collective, and the other actors
        take part in them.
        """
        iterator = ensure_async_iterator(weights)
        if not self.is_master:
            async for _ in iterator:
                pass
            return {}
        group, transport = self._ready()
        # -1: verl's trainers without step numbers; the receivers then check no version.
        version = -1 if global_steps is None else global_steps
        arguments = transport, group, self._device, self.bucket_size, version, self._timeout_s
        try:
            sender = await self._call(StreamSender, *arguments)
            async for name, tensor in iterator:
                await self._call(sender.add, name, tensor)
            await self._call(sender.finish)
        except Exception as error:
            self._fail(error)
            async for _ in iterator:
                pass
            raise
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors; the caller owns the tensors."""
        group, transport = self._ready()
        receiver = StreamReceiver(transport, group, self._device, self.bucket_size, global_steps, self._timeout_s)
        tensors = iter(receiver)
        try:
            if self._stage:
                for name, tensor in await self._call(list, tensors):
                    yield name, tensor
                return
            while (item := await self._call(_next, tensors)) is not None:
                yield item
        except Exception as error:
            self._fail(error)
            raise

    def finalize(self) -> None:
        """Leave the group; the listener stays open for the next update."""
        if self._transport is not None:
            self._run(self._transport.close)
        if self._group is not None:
            self._group.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False)
        self._transport = self._group = self._thread = None

    def _ready(self) -> tuple[Group, Transport]:
        if self._group is None or self._transport is None:
            raise UpdateError("verl: weights are sent or received before init_process_group")
        return self._group, self._transport

    def _fail(self, error: Exception) -> None:
        """Report a failure to the other members, so that they do not wait for this one."""
        group, transport = self._ready()
        # Before abort(): the others read the reason from the store when their transport breaks.
        group.fail(f"{type(error).__name__}: {error}")
        self._run(transport.abort)

    def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on the transport's thread, which makes all of the transport's calls."""
        if self._thread is None:
            return function(*arguments)
        return self._thread.submit(function, *arguments).result()

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on the transport's thread without blocking the event loop."""
        if self._thread is None:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def _next(tensors: Iterator[tuple[str, torch.Tensor]]) -> tuple[str, torch.Tensor] | None:
    # None for the end: StopIteration cannot be set on a future.
    return next(tensors, None)


def _current_device(transport: str) -> torch.device:
    """Return the current device of the transport's preferred type."""
    kind = device_types(transport)[0]
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, getattr(torch, kind).current_device())
