"""The vLLM servers that a run starts beside the trainer, on the GPUs of its placement."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.apps.rl.rollout.engines.guarded import RestartLimit
from megascend.apps.rl.rollout.engines.placement import (
    Placement,
    device_options,
    place_engines,
    trainer_environment,
    visible_gpus,
)
from megascend.apps.rl.rollout.engines.vllm import VllmEngine
from megascend.apps.rl.rollout.engines.vllm_process import VllmProcess, require_interpreter, vllm_device
from megascend.apps.rl.rollout.http_client import EngineServer
from megascend.config.rl import VLLM, RlConfig
from megascend.errors import ConfigError, EngineError, EngineLostError
from megascend.runtime.distributed.launch import Launch
from weightwire.engine_calls import LoopThread
from weightwire.keys import Key, read_key, write_key

if TYPE_CHECKING:
    from megascend.apps.data.samples import SampleLimits

log = logging.getLogger(__name__)
START_S = 420.0
"""Deadline for the start of servers, in seconds: below the ten minutes that other ranks wait for rank 0."""


SLEEP_S = 60.0
"""Lease of a sleep, in seconds; renewed three times within it. A server wakes up that long after its run was killed."""


class StartedVllm(VllmEngine):
    """Client of a vLLM server that the run has started, and starts again when it has ended.

    Args:
        process: the server, which listens.
        in_turns: it shares a GPU with the trainer and sleeps while that computes: it is started again by
            :meth:`EngineServers.wake` only, when the trainer's memory is free.
        options: arguments of :class:`VllmEngine`.
    """

    def __init__(self, process: VllmProcess, *, in_turns: bool, **options: Any) -> None:
        super().__init__(process.address, **options)
        self._process, self._in_turns, self._restarts = process, in_turns, RestartLimit()

    @property
    def ended(self) -> bool:
        return self._process.ended

    async def revive(self) -> bool:
        if not self.ended or self._in_turns:
            return False
        await asyncio.to_thread(self.restart)
        return True

    def restart(self) -> None:
        self._restarts.note(f"{self.name} has ended")
        self._process.restart()
        self._process.wait_until_listening(START_S)
        self._server = EngineServer(self.kind, self._process.address)


class EngineServers:
    """Running vLLM servers of a run, by their index in ``engines``.

    Args:
        sleeping: indices of the servers that share a GPU with the trainer and sleep while it computes.
        owner: name of this run for the servers.
        generate_timeout_s: deadline of a request for responses.
    """

    def __init__(
        self,
        processes: dict[int, VllmProcess],
        key: Key,
        sleeping: Sequence[int],
        owner: str,
        generate_timeout_s: float,
    ) -> None:
        self._processes, self._key, self._sleeping = processes, key, tuple(sleeping)
        self._owner, self._generate_timeout_s = owner, generate_timeout_s
        self._clients: dict[int, StartedVllm] = {}
        self._loop: LoopThread | None = None
        self._renewal: Future[None] | None = None

    def client(self, index: int) -> StartedVllm:
        """Return the client of a server, once it listens."""
        if index not in self._clients:
            self._processes[index].wait_until_listening(START_S)
            self._clients[index] = StartedVllm(
                self._processes[index],
                in_turns=index in self._sleeping,
                key=self._key,
                owner=self._owner,
                generate_timeout_s=self._generate_timeout_s,
            )
        return self._clients[index]

    def sleep(self) -> None:
        """Free the memory of the servers on the trainer's GPUs, until :meth:`wake` or the end of this process."""
        if not self._sleeping:
            return
        self._loop = self._loop or LoopThread("megascend-sleep")
        self._loop.run(self._sleep())
        self._renewal = self._loop.submit(self._renew())

    def wake(self) -> None:
        """Wake up the servers, and start again those that have ended; a no-op if they are awake."""
        if self._renewal is not None and self._loop is not None:
            self._renewal.cancel()
            self._renewal = None
            for client in self._living(ended=True):
                try:
                    client.restart()
                except EngineError as error:
                    log.warning("%s was not started again: %s", client.name, error)
            self._loop.run(self._call_running(lambda client: client.resume()))

    def close(self) -> None:
        """End the renewal of a sleep."""
        if self._loop is not None:
            self._loop.close()

    def _living(self, *, ended: bool = False) -> list[StartedVllm]:
        """Return the servers that sleep and have not ended, or those that have."""
        return [client for client in map(self.client, self._sleeping) if client.ended == ended]

    async def _sleep(self) -> None:
        await self._call_running(lambda client: client.sleep(SLEEP_S))

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(SLEEP_S / 3)
            await self._sleep()

    async def _call_running(self, call: Callable[[StartedVllm], Awaitable[None]]) -> None:
        """Call the servers that have not ended; one that ends meanwhile occupies no memory either, and is found by others."""

        async def guarded(client: StartedVllm) -> None:
            try:
                await call(client)
            except EngineLostError:
                if not client.ended:
                    raise

        await asyncio.gather(*(guarded(client) for client in self._living()))


def interpreter(config: RlConfig) -> Path:
    python = config.vllm.python or os.environ.get("MEGASCEND_VLLM_PYTHON")
    return Path(python) if python else Path(".venv-vllm") / "bin" / "python"


def placements(config: RlConfig, launch: Launch) -> list[Placement]:
    """Return the GPUs of the servers to start; none without GPUs. Initialises no GPU."""
    settings = config.placement
    return place_engines(
        _gpus(),
        _trainers(config, launch),
        len(config.started_engines),
        trainer_gpus=settings.trainer,
        engine_gpus=settings.engines,
        memory=settings.memory,
    )


def share_beside_trainer(placed: Sequence[Placement], *, sleep: bool) -> float:
    """Return the largest share of a trainer's GPU that engines take during its steps; with ``sleep`` 0. Pure."""
    shares: dict[str, float] = {}
    for placement in placed:
        for gpu in placement.gpus if placement.with_trainer else ():
            shares[gpu] = shares.get(gpu, 0.0) + placement.memory
    return 0.0 if sleep else max(shares.values(), default=0.0)


def start_servers(config: RlConfig, launch: Launch, limits: SampleLimits, stack: ExitStack) -> EngineServers | None:
    """Start the servers on rank 0, and give every rank the GPUs of the placement. Call it before a GPU is used.

    Args:
        limits: limits on the samples, from which the servers' context follows.
        stack: closes the servers.
    """
    numbers = config.started_engines
    if not numbers:
        return None
    placed, gpus = placements(config, launch), _gpus()
    servers = None
    if launch.rank == 0:
        servers = _start(config, limits, placed, stack)
    # After the start: the servers' environment is made from this process's, with the names of all GPUs.
    os.environ.update(trainer_environment(gpus, _trainers(config, launch), config.placement.trainer) if gpus else {})
    if servers is not None and any(placement.with_trainer for placement in placed):
        # vLLM measures the free memory of a GPU while it starts: the trainer must not allocate any meanwhile.
        for number in numbers:
            servers.client(number)
        servers.sleep()
    return servers


def _start(config: RlConfig, limits: SampleLimits, placed: list[Placement], stack: ExitStack) -> EngineServers:
    python = interpreter(config)
    device = vllm_device(python)
    if device == "cuda" and not placed:
        raise ConfigError(f"{python} has a vLLM for CUDA, and this host shows no GPU")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megascend-rl-")))
    write_key(folder / "key")
    config.output.parent.mkdir(parents=True, exist_ok=True)
    processes: dict[int, VllmProcess] = {}
    sleeping: list[int] = []
    for index, number in enumerate(config.started_engines):
        options = [*device_options(device), f"--max-model-len={limits.length}"]
        if config.rollout.router_replay:
            options.append("--enable-return-routed-experts")
        environment = {}
        if device == "cuda":
            options += placed[index].options()
            environment = placed[index].environment()
            if config.placement.sleep and placed[index].with_trainer:
                options.append("--enable-sleep-mode")
                sleeping.append(number)
        options += config.vllm.options  # the last one of a name counts
        # Beside the output directory, which may still be an earlier run's.
        log = config.output.with_name(f"{config.output.name}.vllm-{number}.log")
        processes[number] = VllmProcess(
            python, config.model, key_file=folder / "key", log=log, options=options, environment=environment
        )
        stack.callback(processes[number].close)
        location = str(placed[index]) if device == "cuda" else device
        print(f"vLLM {number} starts on {location}; its log: {log}", flush=True)
    timeout_s = config.rollout.timeout_s
    servers = EngineServers(processes, read_key(folder / "key"), sleeping, owner_name(config), timeout_s)
    stack.callback(servers.close)
    return servers


def owner_name(config: RlConfig) -> str:
    """Return this run's name for engines: under the same name a resumed run has its engines back."""
    return f"{socket.gethostname()}:{config.output.resolve()}"


def check_servers(config: RlConfig) -> None:
    if config.started_engines:
        try:
            require_interpreter(interpreter(config))
        except ConfigError as error:
            raise ConfigError(f"engines: {VLLM}: {error}; or set vllm.python") from error


def _gpus() -> list[str]:
    import torch

    return visible_gpus(os.environ, torch.cuda.device_count())


def _trainers(config: RlConfig, launch: Launch) -> int:
    return launch.local_size if config.platform in ("auto", "cuda") else 0
