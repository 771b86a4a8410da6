"""verl's weight synchronisation over weightwire: a checkpoint engine of the name ``megascend``, for verl 0.9.

In verl's configuration, below ``actor_rollout_ref.rollout``::

    checkpoint_engine:
      backend: megascend
      custom_backend_module: megascend.integrations.verl_checkpoint_engine
      update_weights_bucket_megabytes: 512
      engine_kwargs:
        megascend: {transport: nccl, timeout_s: 300}

Each update has a group of its own, of the master (actor rank 0) and all rollout workers, which needs no default group
and no port that anyone guesses. Every bucket's digest and version are compared before a tensor of it is handed to the
engine; every wait has a deadline, and an error names the member that is missing, silent or gone. With ``stage: true``
a worker hands out nothing until it has received and compared the whole update, which takes the memory of the model
once more: then no failure of the sender leaves an engine with half of it. verl's manager pauses the engines and
resumes them; a failed update leaves them paused, as with verl's own engines.
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
"""Transports whose library fails on any thread but the caller's; with them an update blocks the worker's event loop."""


@CheckpointEngineRegistry.register("megascend")
class WeightwireCheckpointEngine(CheckpointEngine):
    """One worker's side of every update; verl calls the methods in the order in which they stand here.

    Args:
        bucket_size: bytes of a bucket. A sender holds two, a receiver one.
        is_master: this is actor rank 0, which sends.
        transport: name of one of weightwire's; its buffers are on the device that verl's worker uses.
        timeout_s: deadline, in seconds, of meeting, and of every bucket: the trainer may need that long to gather one.
        host: address of the master that the others reach; by default Ray's address of its node.
        stage: hand out tensors only when all have come and have been compared.
        options: of the transport.
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
        self._listener: Listener | None = None
        self._group: Group | None = None
        self._transport: Transport | None = None
        self._thread: ThreadPoolExecutor | None = None

    def prepare(self) -> dict[str, Any]:
        """Where this update's group meets, from the master; nothing from the others."""
        self.finalize()  # of an update that failed, verl does not
        if not self.is_master:
            return {}
        if self._listener is None:
            self._listener = Listener(self._host or _node_address())
        return {"host": self._listener.host, "port": self._listener.port, "token": uuid.uuid4().hex}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Actor rank 0 is rank 0 of the group, rollout workers are 1 to N; the other actors have no place in it (-1)."""
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
        """Meet the others, and connect.

        Raises:
            DeadlineError: members did not come; it names them.
            TransportError: they could not connect.
        """
        if rank < 0:
            return
        store = connect(meeting["host"], meeting["port"], self._timeout_s)
        key = f"verl/{meeting['token']}"
        if rank == 0:
            if self._listener is None:
                raise UpdateError("verl: init_process_group of the master came before prepare")
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
        self._thread = ThreadPoolExecutor(1, "megascend-verl") if self._transport_name not in CALLING_THREAD else None
        # Names and shapes are told bucket by bucket; all that is known is how large one is.
        manifest = Manifest(0, (TensorSpec("bucket", "uint8", (self.bucket_size,)),), self.bucket_size)
        setup = Setup(self._group, manifest, self._device, self._timeout_s, self._options)
        self._transport = self._run(make_transport, self._transport_name, setup)

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Send what the generator gives, as version ``global_steps``. On actors without a place in the group: exhaust it.

        When sending fails, the generator is exhausted before the error is raised: its gathers are collective, and the
        other actors are in them.
        """
        iterator = ensure_async_iterator(weights)
        if not self.is_master:
            async for _ in iterator:
                pass
            return {}
        group, transport = self._ready()
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
        """Yield names and tensors, which are the caller's own.

        Raises:
            VersionError: the sender sends another version than ``global_steps``.
            DigestError: a bucket has changed on its way.
            TransportError: it has not come.
        """
        group, transport = self._ready()
        receiver = StreamReceiver(transport, group, self._device, self.bucket_size, global_steps, self._timeout_s)
        tensors = iter(receiver)
        try:
            if self._stage:
                for name, tensor in await self._call(list, tensors):
                    yield name, tensor
                return
            while (found := await self._call(_next, tensors)) is not None:
                yield found
        except Exception as error:
            self._fail(error)
            raise

    def finalize(self) -> None:
        """Leave the group. The listener stays, for the next update."""
        if self._transport is not None:
            self._run(self._transport.close)
        if self._group is not None:
            self._group.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False)
        self._transport = self._group = self._thread = None

    def _ready(self) -> tuple[Group, Transport]:
        if self._group is None or self._transport is None:
            raise UpdateError("verl: weights are to travel before init_process_group")
        return self._group, self._transport

    def _fail(self, error: Exception) -> None:
        """Tell the other members, so that nobody waits for this one."""
        group, transport = self._ready()
        group.fail(f"{type(error).__name__}: {error}")
        self._run(transport.abort)

    def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call it where everything of the transport is called."""
        if self._thread is None:
            return function(*arguments)
        return self._thread.submit(function, *arguments).result()

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """The same, without blocking the event loop."""
        if self._thread is None:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def _next(tensors: Iterator[tuple[str, torch.Tensor]]) -> tuple[str, torch.Tensor] | None:
    return next(tensors, None)


def _current_device(transport: str) -> torch.device:
    """Where the transport's buffers are: on the current device of the type that it prefers."""
    kind = device_types(transport)[0]
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, getattr(torch, kind).current_device())


def _node_address() -> str:
    import ray

    return ray.util.get_node_ip_address().strip("[]")
