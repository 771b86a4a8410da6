"""Every model's commands, in the order they came: steps by the queue, in batches of many; others when those before are done.

The same on every rank: it decides from the commands alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from megascend.config import Lora
from megascend.errors import ConfigError, DataError, MegascendError, ProcessGroupError
from megascend.lora.queue import AdapterFuture, AdapterQueue
from megascend.sampling.request import SampleRequest, SampleResult
from megascend.serve.commands import (
    Command,
    Create,
    Forward,
    ForwardBackward,
    Load,
    OptimizerStep,
    Outcome,
    Remove,
    Respond,
    Save,
)

SAMPLES_AT_ONCE = 64
"""Responses that are sampled in one go; steps wait for them."""

Generate = Callable[[Sequence[SampleRequest]], Sequence[SampleResult]]


class Backend(Protocol):
    """What commands need of a backend beside what the queue does."""

    @property
    def adapters(self) -> Mapping[str, object]: ...
    def add_adapter(self, name: str, lora: Lora | None = None) -> None: ...
    def remove_adapter(self, name: str) -> None: ...
    def save_adapter(self, name: str, path: str, optimizer: bool = True) -> None: ...
    def load_adapter(
        self, name: str, path: str, lora: Lora | None = None, optimizer: bool = True, replace: bool = False
    ) -> None: ...


class Lines:
    """Commands of all models that have not ended.

    Args:
        backend: all ranks' model.
        queue: mixes steps of several models into batches.
        max_pending: most commands of a model in the queue at a time; no more than the queue takes.
        generate: answers requests to sample; collective.
    """

    def __init__(
        self, backend: Backend, queue: AdapterQueue, max_pending: int = 64, generate: Generate | None = None
    ) -> None:
        self._backend, self._queue, self._max_pending, self._generate = backend, queue, max_pending, generate
        self._waiting: dict[str, deque[Command]] = {}
        self._running: dict[str, deque[tuple[Command, AdapterFuture[Any]]]] = {}

    @property
    def idle(self) -> bool:
        """True if no command is left."""
        return not self._waiting and not self._running

    def add(self, commands: Iterable[Command]) -> list[Outcome]:
        """Take commands; outcomes of those that needed no turn."""
        outcomes: list[Outcome] = []
        for command in commands:
            if isinstance(command, Remove):
                outcomes += self._remove(command)
            else:
                self._waiting.setdefault(command.adapter, deque()).append(command)
        return outcomes

    def run_once(self) -> list[Outcome]:
        """Run what has no steps before it, then one unit of the queue. Collective.

        Raises:
            BaseException: what is nobody's request's fault, such as a rank that is gone.
        """
        outcomes: list[Outcome] = []
        for adapter in list(self._waiting):
            outcomes += self._advance(adapter)
        outcomes += self._sample()
        before = {adapter: len(running) for adapter, running in self._running.items()}
        self._queue.run_once()
        done = [(adapter, pair) for adapter in before for pair in self._take_done(adapter)]
        together = len({adapter for adapter, _ in done})
        return outcomes + [_outcome(command, future, together) for _, (command, future) in done]

    def _advance(self, adapter: str) -> list[Outcome]:
        """Run or submit the first commands of a model, as far as they may."""
        outcomes: list[Outcome] = []
        line = self._waiting[adapter]
        while line:
            command = line[0]
            if isinstance(command, ForwardBackward | Forward | OptimizerStep):
                if self._queue.pending(adapter) >= self._max_pending:
                    break
                self._running.setdefault(adapter, deque()).append((command, self._submit(command)))
            elif adapter in self._running or isinstance(command, Respond):
                break
            else:
                outcomes.append(self._run(command))
            line.popleft()
        if not line:
            del self._waiting[adapter]
        return outcomes

    def _sample(self) -> list[Outcome]:
        """Answer the first requests to sample of every line, as many as make a batch, all together."""
        taken: list[Respond] = []
        for adapter in list(self._waiting):
            line = self._waiting[adapter]
            while line and isinstance(first := line[0], Respond) and adapter not in self._running:
                if taken and sum(each.request.num_samples for each in [*taken, first]) > SAMPLES_AT_ONCE:
                    break
                taken.append(first)
                line.popleft()
            if not line:
                del self._waiting[adapter]
        if not taken:
            return []
        if self._generate is None:
            problem = ConfigError("this server does not sample")
            return [Outcome(each.number, error=problem) for each in taken]
        results = self._generate([each.request for each in taken])
        return [Outcome(each.number, result) for each, result in zip(taken, results, strict=True)]

    def _submit(self, command: Command) -> AdapterFuture[Any]:
        if isinstance(command, OptimizerStep):
            if command.problem is not None:  # gradients must not be left for the step after it
                self._queue.failed(command.adapter, DataError(command.problem))
            return self._queue.optimizer_step(command.adapter, command.adam)
        if isinstance(command, Forward):
            return self._queue.forward(command.adapter, command.samples)
        assert isinstance(command, ForwardBackward)
        if command.problem is not None:
            return self._queue.failed(command.adapter, DataError(command.problem))
        return self._queue.forward_backward(
            command.adapter, command.samples, command.loss or "cross_entropy", logprobs=True
        )

    def _run(self, command: Command) -> Outcome:
        try:
            if isinstance(command, Create) and command.path is None:
                self._backend.add_adapter(command.adapter, command.lora)
            elif isinstance(command, Create):
                assert command.path is not None
                self._backend.load_adapter(command.adapter, command.path, optimizer=command.optimizer)
            elif isinstance(command, Load):
                self._backend.load_adapter(command.adapter, command.path, optimizer=command.optimizer, replace=True)
            else:
                assert isinstance(command, Save)
                self._backend.save_adapter(command.adapter, command.path, optimizer=command.optimizer)
        except (ProcessGroupError, TimeoutError):
            raise
        except MegascendError as error:
            return Outcome(command.number, error=error)
        return Outcome(command.number)

    def _remove(self, command: Remove) -> list[Outcome]:
        gone = ConfigError("the model was unloaded, or its session ended")
        outcomes = [Outcome(each.number, error=gone) for each in self._waiting.pop(command.adapter, ())]
        if command.adapter in self._backend.adapters:
            self._queue.cancel(command.adapter)
            self._backend.remove_adapter(command.adapter)
        outcomes += [Outcome(each.number, error=gone) for each, _ in self._running.pop(command.adapter, ())]
        return [*outcomes, Outcome(command.number)]

    def _take_done(self, adapter: str) -> list[tuple[Command, AdapterFuture[Any]]]:
        running = self._running[adapter]
        done = []
        while running and running[0][1].done():
            done.append(running.popleft())
        if not running:
            del self._running[adapter]
        return done


def _outcome(command: Command, future: AdapterFuture[Any], together: int) -> Outcome:
    """Of a future that is done."""
    try:
        return Outcome(command.number, future.result(), together=together)
    except Exception as error:  # noqa: BLE001  whatever it is, it is the request's
        problem = command.problem if isinstance(command, OptimizerStep) else None
        found = error if problem is None else DataError(problem)
        return Outcome(command.number, error=found, together=together)
