"""An engine in a forked process: receivers of weightwire behind a Unix socket, one JSON line per call."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import socketserver
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from weightwire.engine import InferenceEngine
from weightwire.errors import WireError, from_json, to_json
from weightwire.fp8 import BlockFormat
from weightwire.manifest import TensorSpec
from weightwire.offer import Offer, Seal
from weightwire.plan import Region, complete, needs_from_json, needs_to_json
from weightwire.receiver import Receiver

DEADLINE_S = 60.0
Needs = Callable[[Sequence[TensorSpec], int, int], Sequence[Region]]
"""Returns the slices that worker ``w`` of ``n`` loads: called with (tensors, n, w)."""


class Served:
    """State of the process: a receiver for each worker, and the active weights."""

    def __init__(
        self, name: str, workers: int, weights: dict[str, torch.Tensor], version: int | None, needs: Needs | None = None
    ) -> None:
        self.describe = needs
        self.receivers = [
            Receiver(
                f"{name} worker {worker}",
                version=version,
                needs=lambda specs, worker=worker: complete(specs) if needs is None else needs(specs, workers, worker),
            )
            for worker in range(workers)
        ]
        self.weights: list[dict[str, torch.Tensor]] = [dict(weights) for _ in range(workers)]
        self.adapters: dict[str, Any] = {}
        self.faults: dict[str, Any] = {}

    def call(self, method: str, **arguments: Any) -> Any:
        return getattr(self, method)(**arguments)

    def count(self) -> int:
        return len(self.receivers)

    def needs(self, tensors: Any) -> Any:
        if self.describe is None:
            return None
        specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in tensors]
        return [needs_to_json(self.describe(specs, self.count(), worker)) for worker in range(self.count())]

    def fault(self, **faults: Any) -> None:
        self.faults = faults

    def forget(self) -> None:
        for receiver in self.receivers:
            receiver.forget("model")

    def begin(self, offer: Any) -> None:
        if "deaf" in self.faults:
            return
        for worker, receiver in enumerate(self.receivers):
            receiver.open(Offer.from_json(offer), worker)

    def verify(self, seal: Any, timeout_s: float) -> None:
        for receiver in self.receivers:
            receiver.verify(Seal.from_json(seal), timeout_s)

    def commit(self, update: str) -> None:
        committed = []
        for worker, receiver in enumerate(self.receivers):
            previous = dict(self.weights[worker])

            def load(tensors: Any, worker: int = worker) -> None:
                target_name = self.receivers[worker].status()["update"]["target"]
                target = self.weights[worker] if target_name == "model" else {}
                for number, (name, tensor) in enumerate(tensors):
                    if self.faults.get("fails") == worker and number == 2:
                        raise RuntimeError(f"worker {worker} cannot load {name}")
                    target[name] = tensor.clone()
                if target_name != "model":
                    self.adapters[target_name] = target

            def restore(worker: int = worker, previous: dict[str, torch.Tensor] = previous) -> None:
                self.weights[worker] = previous

            try:
                receiver.commit(update, load, restore)
                committed.append(receiver)
            except WireError as error:
                for other in committed:
                    other.revert(update, str(error))
                raise
        for receiver in self.receivers:
            receiver.settle(update)

    def drop(self, update: str) -> None:
        for receiver in self.receivers:
            receiver.drop(update)

    def status(self) -> Any:
        return [receiver.status() for receiver in self.receivers]

    def dump(self, path: str) -> None:
        torch.save([self.weights, self.adapters], path)


def serve(
    path: Path, name: str, workers: int, weights: dict[str, torch.Tensor], version: int | None, needs: Needs | None
) -> None:
    torch.set_num_threads(1)
    served = Served(name, workers, weights, version, needs)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                try:
                    answer = {"value": served.call(**json.loads(line))}
                except WireError as error:
                    answer = to_json(error)
                except Exception as error:  # noqa: BLE001
                    answer = {"error": "", "message": f"{error}\n{traceback.format_exc()}"}
                self.wfile.write(json.dumps(answer).encode() + b"\n")

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True

    with Server(str(path), Handler) as server:
        server.serve_forever()


class EngineProcess(InferenceEngine):
    """The parent's side: an update-only engine for trainers, with direct calls for tests."""

    def __init__(
        self,
        folder: Path,
        name: str,
        workers: int = 1,
        weights: Any = None,
        version: int | None = None,
        needs: Needs | None = None,
        formats: Mapping[str, BlockFormat] | None = None,
    ) -> None:
        self.name, self._path, self._folder = name, folder / f"{name}.socket", folder
        self.formats = formats or {}
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setpgid(0, 0)
                serve(self._path, name, workers, weights or {}, version, needs)
            except BaseException:  # noqa: BLE001  the process ends here
                traceback.print_exc()
            finally:
                os._exit(1)

    # --- calls of a trainer ---

    async def receivers(self) -> int:
        return await self.ask("count")

    async def needs(self, tensors: Any) -> Any:
        answer = await self.ask("needs", tensors=[[spec.name, spec.dtype, list(spec.shape)] for spec in tensors])
        return None if answer is None else [needs_from_json(rows, tensors) for rows in answer]

    async def quantised(self) -> Mapping[str, BlockFormat]:
        return self.formats

    async def begin_update(self, offer: Any) -> None:
        await self.ask("begin", offer=offer.to_json())

    async def verify(self, seal: Any, timeout_s: float) -> None:
        await self.ask("verify", seal=seal.to_json(), timeout_s=timeout_s)

    async def commit(self, update: str) -> None:
        await self.ask("commit", update=update)

    async def drop(self, update: str) -> None:
        await self.ask("drop", update=update)

    async def ask(self, method: str, **arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, lambda: self.now(method, **arguments))

    # --- calls of a test ---

    def now(self, method: str, **arguments: Any) -> Any:
        until = time.monotonic() + DEADLINE_S
        while True:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError), socket.socket(socket.AF_UNIX) as line:
                line.settimeout(DEADLINE_S)
                line.connect(str(self._path))
                line.sendall(json.dumps({"method": method, **arguments}).encode() + b"\n")
                with line.makefile() as answers:
                    text = answers.readline()
                if not text:
                    raise ConnectionError(f"{self.name} is gone")
                answer = json.loads(text)
                if "error" in answer:
                    raise from_json(answer)
                return answer["value"]
            if time.monotonic() > until or not self.alive():
                raise ConnectionError(f"{self.name} does not answer")
            time.sleep(0.01)

    def state(self) -> dict[str, Any]:
        """Return the state of the first worker."""
        return self.now("status")[0]

    def weights(self) -> tuple[list[dict[str, torch.Tensor]], dict[str, Any]]:
        """Return (active weights of each worker, adapters by target)."""
        path = self._folder / f"{self.name}.{os.getpid()}.pt"
        self.now("dump", path=str(path))
        weights, adapters = torch.load(path, weights_only=True)
        return weights, adapters

    def alive(self) -> bool:
        try:
            return (
                f"({self.pid})" != ""
                and Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
            )
        except OSError:
            return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self) -> None:
        self.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


@contextlib.contextmanager
def engines(folder: Path, *names: str, **options: Any) -> Iterator[list[EngineProcess]]:
    """Start engines that end with the block."""
    started: list[EngineProcess] = []
    try:
        for name in names:
            started.append(EngineProcess(folder, name, **options))
        yield started
    finally:
        for engine in started:
            engine.end()


def ended_by(do: Callable[[], object], timeout_s: float = 60.0) -> int:
    """Run ``do`` in a fork; return minus the signal that killed it, 1 if ``do`` raised, 0 if it returned."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            do()
            status = 0
        except BaseException:  # noqa: BLE001  the process ends here
            traceback.print_exc()
        finally:
            os._exit(status)
    until = time.monotonic() + timeout_s
    while True:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"the fork did not end within {timeout_s:g} s")
        time.sleep(0.01)
