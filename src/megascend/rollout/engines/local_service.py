"""The local engine's calls: in this process, or in one of its own that reads and writes lines of JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import megascend.errors
import weightwire.errors
from megascend.errors import EngineError, EngineLostError, MegascendError
from megascend.rollout.engines.base import Sampling
from megascend.rollout.engines.guarded import GuardedProcess

KILL_AFTER_S = 10.0


class Service(Protocol):
    """Calls by name, with JSON for arguments and results."""

    def start(self, call: str, arguments: Mapping[str, Any]) -> Future[Any]:
        """Begin a call; never waits."""
        ...

    def close(self) -> None:
        """Give up calls under way and end the engine. May be called twice."""
        ...


class InProcess:
    """The service on a :class:`megascend.rollout.engines.local_model.LocalModel` of this process."""

    def __init__(self, model: Path, **settings: Any) -> None:
        from megascend.rollout.engines.local_model import LocalModel

        self._model = LocalModel(model, **settings)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="local-engine")
        self._closed = False

    def start(self, call: str, arguments: Mapping[str, Any]) -> Future[Any]:
        if call == "generate":
            return self._generate(**arguments)
        return self._threads.submit(getattr(self._model, call), **arguments)

    def _generate(self, prompt: Sequence[int], sampling: Mapping[str, Any], n: int) -> Future[Any]:
        future = started()
        settings = {**sampling, "stop_token_ids": tuple(sampling["stop_token_ids"])}

        def forward(done: Future[Any]) -> None:
            problem = done.exception()
            if problem is not None:
                future.set_exception(problem)
            else:
                future.set_result([asdict(completion) for completion in done.result()])

        try:
            self._model.generate(prompt, Sampling(**settings), n).add_done_callback(forward)
        except EngineError as problem:
            future.set_exception(problem)
        return future

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._model.close()
            self._threads.shutdown(cancel_futures=True)


class ChildProcess:
    """The service in a process of its own, which ends with this one."""

    def __init__(self, name: str, model: Path, **settings: Any) -> None:
        self._name = name
        requests, own_requests = os.pipe()
        own_answers, answers = os.pipe()
        command = [sys.executable, "-m", "megascend.rollout.engines.local_service", str(model), json.dumps(settings)]
        try:
            # An interactive Ctrl-C is for the trainer, which ends this process when it has saved.
            self._guarded = GuardedProcess([*command, str(requests), str(answers)], descriptors=(requests, answers))
        finally:
            os.close(requests)
            os.close(answers)
        self._process = self._guarded.process
        self._requests = os.fdopen(own_requests, "w", encoding="utf-8")
        self._answers = os.fdopen(own_answers, encoding="utf-8")
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers = 0
        self._reader = threading.Thread(target=self._read, name=f"{name}-answers", daemon=True)
        self._reader.start()

    def start(self, call: str, arguments: Mapping[str, Any]) -> Future[Any]:
        future = started()
        with self._lock:
            number = self._numbers = self._numbers + 1
            self._waiting[number] = future
            try:
                self._requests.write(json.dumps([number, call, arguments]) + "\n")
                self._requests.flush()
            except (OSError, ValueError):
                del self._waiting[number]
                future.set_exception(self._lost())
        return future

    def _read(self) -> None:
        for line in self._answers:
            number, error, result = json.loads(line)
            with self._lock:
                future = self._waiting.pop(number)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(from_json(error))
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(self._lost())

    def _lost(self) -> EngineLostError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        ending = "does not listen any more" if code is None else f"has ended with exit code {code}"
        return EngineLostError(f"{self._name}: its process {self._process.pid} {ending}")

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._requests.close()
        try:
            self._process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._guarded.release()
        self._reader.join()
        self._answers.close()


class Refusing:
    """The service of an engine that could not be started: every call raises why."""

    def __init__(self, problem: MegascendError) -> None:
        self._problem = problem

    def start(self, call: str, arguments: Mapping[str, Any]) -> Future[Any]:
        future = started()
        future.set_exception(self._problem)
        return future

    def close(self) -> None:
        """Nothing to end."""


def started() -> Future[Any]:
    """A future that whoever waits for it cannot cancel: the call goes on anyway."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def to_json(error: BaseException) -> list[str]:
    """An error as its class's module and name, and its message."""
    return [type(error).__module__, type(error).__name__, str(error)]


def from_json(error: Sequence[str]) -> Exception:
    """The error that :func:`to_json` told of; an EngineError if it is none of megascend's or weightwire's."""
    module, name, message = error
    for errors, base in ((megascend.errors, MegascendError), (weightwire.errors, weightwire.errors.WireError)):
        kind = getattr(errors, name, None)
        if module == errors.__name__ and isinstance(kind, type) and issubclass(kind, base):
            return kind(message)
    return EngineError(f"local engine: {name}: {message}")


def serve(service: Service, requests: Any, answers: Any) -> None:
    """Answer lines until there are no more."""
    lock = threading.Lock()

    def answer(number: int) -> Callable[[Future[Any]], None]:
        def write(done: Future[Any]) -> None:
            problem = done.exception()
            line = [number, None, done.result()] if problem is None else [number, to_json(problem), None]
            with lock, contextlib.suppress(BrokenPipeError, ValueError):
                answers.write(json.dumps(line) + "\n")
                answers.flush()

        return write

    for line in requests:
        number, call, arguments = json.loads(line)
        service.start(call, arguments).add_done_callback(answer(number))


def main() -> None:
    """The process that :class:`ChildProcess` starts."""
    parser = argparse.ArgumentParser()
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
            service: Service = InProcess(arguments.model, **arguments.settings)
        except MegascendError as problem:
            service = Refusing(problem)
        serve(service, requests, answers)
        os._exit(0)  # what is being sampled is for nobody any more


if __name__ == "__main__":
    main()
