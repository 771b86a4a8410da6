"""Local engine: transformers on this machine, for laptops, examples and tests. Complete, but not fast.

Its model runs in this process, or in a child that reads calls as lines of JSON from a pipe and writes answers to another:
``python -m megascend.apps.rl.rollout.engines.local NAME MODEL SETTINGS REQUESTS ANSWERS``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import IO, Any

import megascend.errors
import weightwire.errors
from megascend.apps.rl.rollout.engines.guarded import GuardedProcess, RestartLimit
from megascend.errors import EngineError, EngineLostError, EngineTimeoutError, MegascendError
from megascend.models.checkpoint_files.hub import snapshot
from weightwire.background import BackgroundThread
from weightwire.engine import InferenceEngine
from weightwire.engine_calls import LoopThread
from weightwire.errors import WireError
from weightwire.remote_engine import RemoteEngine, read_call

KILL_AFTER_S = 10.0


class LocalEngine(RemoteEngine):
    """Engine of a transformers model, with weight updates.

    Waiting requests are sampled together. An update is received during sampling and takes effect between two tokens; the KV cache
    of running responses is then recomputed. Adapters are not supported: push the merged model.
    """

    unreadable = EngineError

    def __init__(
        self,
        model: str | Path,
        *,
        name: str = "local engine",
        own_process: bool = True,
        timeout_s: float = 600.0,
        control_timeout_s: float = 60.0,
        **settings: Any,
    ) -> None:
        """
        Args:
            model: directory of a Hugging Face checkpoint or a name on the Hub, whose weights are of version 0.
            own_process: sample in a child process, otherwise on a thread of this one.
            timeout_s: deadline of a request, and of the first call.
            control_timeout_s: deadline of other calls.
            settings: arguments of :class:`megascend.apps.rl.rollout.engines.local_model.LocalModel`: precision, device, seed,
            rows.
        """
        self.name = name
        self.answer_s = timeout_s
        self.control_s = self.commit_s = control_timeout_s
        self._loaded = self._was_ready = False
        self._restarts = RestartLimit()
        kind = ModelProcess if own_process else ModelInProcess
        self._make_host = partial(kind, name, snapshot(model), settings)
        self._host = self._make_host()

    async def ask(self, call: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        if not self._loaded:
            # The child first imports transformers and loads the model, which takes minutes on a busy machine.
            timeout_s = max(timeout_s, self.answer_s)
        try:
            answer = await asyncio.wait_for(self._host.call(call, arguments), timeout_s)
        except asyncio.TimeoutError:
            raise EngineTimeoutError(f"{self.name}: no answer to {call} within {timeout_s:g} s") from None
        self._loaded = self._was_ready = True
        return answer

    async def revive(self) -> bool:
        ending = self._host.ending()
        if not ending:
            return False
        if not self._was_ready:
            raise EngineError(f"{ending} before it answered")
        self._restarts.note(ending)
        await self._host.close()
        self._loaded, self._host = False, self._make_host()
        return True

    async def close(self) -> None:
        await self._host.close()


class ModelInProcess:
    """Model in this process."""

    def __init__(self, name: str, model: Path, settings: Mapping[str, Any]) -> None:
        from megascend.apps.rl.rollout.engines.local_model import LocalModel

        self._name = name
        self._model: InferenceEngine = LocalModel(model, name=name, **settings)

    async def call(self, call: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run a call of the contract, with JSON for arguments and result."""
        try:
            run = read_call(call, arguments)
        except WireError as error:
            raise EngineError(f"{self._name}: {error}") from error
        return await run(self._model)

    def ending(self) -> str:
        """Return an empty text: it ends with this process."""
        return ""

    async def close(self) -> None:
        await self._model.close()


class ModelProcess:
    """Model in a child process, which ends with this one."""

    def __init__(self, name: str, model: Path, settings: Mapping[str, Any]) -> None:
        self._name = name
        requests, request_end = os.pipe()
        answer_end, answers = os.pipe()
        command = [
            sys.executable,
            "-m",
            "megascend.apps.rl.rollout.engines.local",
            name,
            str(model),
            json.dumps(settings),
        ]
        try:
            # In a new session: an interactive Ctrl-C is for the trainer, which ends the child when it has saved.
            self._guarded = GuardedProcess([*command, str(requests), str(answers)], descriptors=(requests, answers))
        finally:
            os.close(requests)
            os.close(answers)
        self.process = self._guarded.process
        self._requests = os.fdopen(request_end, "w", encoding="utf-8")
        self._answers = os.fdopen(answer_end, encoding="utf-8")
        # Callers write requests while the reader's thread completes earlier ones.
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._count, self._deaf = 0, False
        # A daemon: it reads until the engine's process ends, for which the interpreter must not wait.
        self._reader = BackgroundThread(self._read, name=f"{name}-answers")
        self._reader.start()

    async def call(self, call: str, arguments: dict[str, Any]) -> Any:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # cannot be cancelled: the child answers it in any case
        with self._lock:
            number = self._count = self._count + 1
            # Before the request is written: the answer may arrive at once.
            self._waiting[number] = future
            try:
                if self._deaf:
                    raise ValueError("nobody reads the answer")
                self._requests.write(json.dumps([number, call, arguments]) + "\n")
                self._requests.flush()
            except (OSError, ValueError):
                del self._waiting[number]
                future.set_exception(self._lost_error())
        return await asyncio.wrap_future(future)

    def _read(self) -> None:
        try:
            for line in self._answers:
                number, error, result = json.loads(line)
                with self._lock:
                    future = self._waiting.pop(number)
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error_from_json(error))
        finally:
            with self._lock:
                # The end of the pipe is the end of the process, and after an error nobody reads: no answer to these will come.
                waiting, self._waiting, self._deaf = self._waiting, {}, True
            for future in waiting.values():
                future.set_exception(self._lost_error())

    def ending(self) -> str:
        """Return the description of the end of the process; empty while it runs."""
        code = self.process.poll()
        return "" if code is None else f"{self._name}: its process {self.process.pid} has ended with exit code {code}"

    def _lost_error(self) -> EngineLostError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            # The pipe may close a moment before the process can be waited for, and its exit code helps.
            self.process.wait(1.0)
        silent = f"{self._name}: its process {self.process.pid} does not listen any more"
        return EngineLostError(self.ending() or silent)

    async def close(self) -> None:
        """Abandon running calls and end the process. May be called twice."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            # The end of its input ends the child.
            self._requests.close()
        try:
            self.process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._guarded.release()
        # It ends with the child, whose end of the pipe is closed.
        self._reader.join()
        self._answers.close()


def error_to_json(error: BaseException) -> list[str]:
    return [type(error).__module__, type(error).__name__, str(error)]


def error_from_json(error: Sequence[str]) -> Exception:
    """Rebuild an error from :func:`error_to_json`; an EngineError if its class is not megascend's or weightwire's."""
    module, name, message = error
    for errors, base in ((megascend.errors, MegascendError), (weightwire.errors, WireError)):
        kind = getattr(errors, name, None)
        # By name from two known modules: text of a pipe must not choose any class to be called.
        if module == errors.__name__ and isinstance(kind, type) and issubclass(kind, base):
            return kind(message)
    return EngineError(f"local engine: {name}: {message}")


def serve(call: Callable[[str, dict[str, Any]], Any], requests: IO[str], answers: IO[str]) -> None:
    """Read calls as lines and run them concurrently, until the end of the input."""
    lock = threading.Lock()

    def answer(number: int, future: Future[Any]) -> None:
        error = future.exception()
        line = [number, None, future.result()] if error is None else [number, error_to_json(error), None]
        # The parent may have gone or closed the pipe: no caller is left to answer. The lock keeps lines of several threads apart.
        with lock, contextlib.suppress(BrokenPipeError, ValueError):
            answers.write(json.dumps(line) + "\n")
            answers.flush()

    # Concurrent: a pause or a commit must not wait for the responses that it interrupts.
    thread = LoopThread("local engine calls")
    for line in requests:
        number, name, arguments = json.loads(line)
        thread.submit(call(name, arguments)).add_done_callback(partial(answer, number))


def main() -> None:
    """Run the process that :class:`ModelProcess` starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("model", type=Path)
    parser.add_argument("settings", type=json.loads)
    parser.add_argument("requests", type=int)
    parser.add_argument("answers", type=int)
    arguments = parser.parse_args()
    with (
        os.fdopen(arguments.requests, encoding="utf-8") as requests,
        os.fdopen(arguments.answers, "w", encoding="utf-8") as answers,
    ):
        try:
            call = ModelInProcess(arguments.name, arguments.model, arguments.settings).call
        except MegascendError as error:
            # Reported by the first call: the parent waits for answers, not for the start.
            call = partial(_refuse, error)
        serve(call, requests, answers)
        os._exit(0)  # nobody waits for running samples any more


async def _refuse(problem: MegascendError, call: str, arguments: dict[str, Any]) -> Any:
    raise problem


if __name__ == "__main__":
    main()
