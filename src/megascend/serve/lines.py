"""Every model's commands, in the order they came: steps by the queue, in batches of many; others when those before are done.

The same on every rank: it decides from the commands alone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any, Protocol, cast

import torch

from megascend.config import Lora
from megascend.errors import ConfigError, DataError, MegascendError, OutOfDeviceMemoryError, ProcessGroupError
from megascend.lora.queue import AdapterFuture, AdapterQueue
from megascend.serve.commands import (
    Cancel,
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
from megascend.serve.sample_turns import SampleTurns
from megascend.serve.sampling import CANCELLED, SAMPLES_AT_ONCE, Generate, Sampling
from megascend.serve.waits import Waits

logger = logging.getLogger(__name__)

FAULTS = (TypeError, ValueError, LookupError, ArithmeticError, AssertionError)
"""What a fault in the code that samples raises. A device that is broken raises RuntimeError."""

OTHERS_AT_ONCE = 8
"""Adapters that are made, loaded and saved between two units of training, at most one of a model."""


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
    def recover_memory(self) -> bool: ...


class Lines:
    """Commands of all models that have not ended.

    Args:
        backend: all ranks' model.
        queue: mixes steps of several models into batches.
        max_pending: most commands of a model in the queue at a time; no more than the queue takes.
        generate: answers requests to sample; collective.

    Attributes:
        answered: models whose last steps have ended in the last turn.
    """

    def __init__(
        self, backend: Backend, queue: AdapterQueue, max_pending: int = 64, generate: Generate | None = None
    ) -> None:
        self._backend, self._queue, self._max_pending, self._generate = backend, queue, max_pending, generate
        self._waiting: dict[str, deque[Command]] = {}
        self._running: dict[str, deque[tuple[Command, AdapterFuture[Any]]]] = {}
        self._sampling: Sampling | None = None
        self._one_by_one: deque[Respond] = deque()  # what had no room together
        self._removals: list[Remove] = []  # of adapters that are sampled from
        self._waits = Waits()
        self._turns = SampleTurns()
        self.answered: list[str] = []

    @property
    def ready(self) -> int:
        """Tokens of the gradients that could be computed now."""
        return sum(line[0][0].tokens for line in self._running.values() if isinstance(line[0][0], ForwardBackward))

    @property
    def idle(self) -> bool:
        """True if no command is left."""
        return not (self._waiting or self._running or self._sampling or self._one_by_one)

    def add(self, commands: Iterable[Command]) -> list[Outcome]:
        """Take commands; outcomes of those that needed no turn."""
        outcomes: list[Outcome] = []
        for command in commands:
            if isinstance(command, Remove) and command.adapter in self._sampled_from():
                self._removals.append(command)
            elif isinstance(command, Remove):
                outcomes += self._remove(command)
            elif isinstance(command, Cancel):
                outcomes += self._cancel(command.number)
            else:
                self._waiting.setdefault(command.adapter, deque()).append(command)
        return outcomes

    def run_once(self) -> list[Outcome]:
        """Run a few of what is no step, a slice of what is sampled, and one unit of the queue. Collective.

        Raises:
            BaseException: what is nobody's request's fault, such as a rank that is gone.
        """
        for adapter in list(self._waiting):
            self._submit_steps(adapter)
        self._waits.first(self._running)
        return [*self._run_others(), *self._sample(), *self._run_unit()]

    def _submit_steps(self, adapter: str) -> None:
        """Give the queue the first commands of a model, as far as they are steps."""
        line = self._waiting[adapter]
        while line and isinstance(line[0], ForwardBackward | Forward | OptimizerStep):
            if self._queue.pending(adapter) >= self._max_pending:
                break
            command = line.popleft()
            self._running.setdefault(adapter, deque()).append((command, self._submit(command)))
        if not line:
            del self._waiting[adapter]

    def _run_others(self) -> list[Outcome]:
        """Run what is neither a step nor sampled, where all steps before it are done: one for a model, in turns."""
        outcomes: list[Outcome] = []
        for adapter in list(self._waiting):
            line = self._waiting[adapter]
            if adapter in self._running or isinstance(line[0], ForwardBackward | Forward | OptimizerStep | Respond):
                continue
            if len(outcomes) == OTHERS_AT_ONCE:
                break
            with self._waits.unit():
                outcomes.append(self._run(line.popleft()))
            del self._waiting[adapter]
            if line:
                self._waiting[adapter] = line  # behind the others
        return outcomes

    def _run_unit(self) -> list[Outcome]:
        """Run a unit of the queue."""
        self.answered = []
        if not self._running:
            return []
        before = list(self._running)
        with self._waits.unit():
            self._queue.run_once()
        done = {adapter: self._take_done(adapter) for adapter in before}
        together = sum(1 for pairs in done.values() if pairs)
        outcomes: list[Outcome] = []
        for adapter, pairs in done.items():
            for number, (command, future) in enumerate(pairs):
                waited = self._waits.of(adapter) if number == 0 else (None, 0.0)
                outcomes.append(_outcome(command, future, together, *waited))
        self._waits.first(self._running)
        self.answered = [adapter for adapter in before if adapter not in self._running and adapter not in self._waiting]
        return outcomes

    # --- sampling ---

    def _sample(self) -> list[Outcome]:
        """Sample a slice of the responses that are under way, or of the next ones. Collective."""
        if self._sampling is None:
            taken = [self._one_by_one.popleft()] if self._one_by_one else self._take_samples()
            if not taken:
                return []
            if self._generate is None:
                problem = ConfigError("this server does not sample")
                return [Outcome(each.number, error=problem) for each in taken]
            self._sampling = Sampling(taken, self._generate)
        sampling, problem = self._sampling, None
        try:
            with self._waits.unit():
                outcomes = sampling.advance()
        except torch.OutOfMemoryError as error:
            problem = OutOfDeviceMemoryError(f"the device's memory has no room for this request: {error}")
        except FAULTS as error:
            logger.exception("sampling for %s has failed", ", ".join(sorted({each.adapter for each in sampling.left})))
            problem = error.with_traceback(None)
        left = sampling.left
        if problem is None and left:
            return outcomes
        self._sampling = sampling = None  # with its keys and values
        if problem is not None:  # only here has the error let go of what it held
            outcomes = self._again(left, problem)
        removals, self._removals = self._removals, []
        return [*outcomes, *self.add(removals)]

    def _again(self, left: list[Respond], problem: Exception) -> list[Outcome]:
        """Sample those that have no answer one by one; what fails alone, or does not fit, fails."""
        if not self._backend.recover_memory():
            raise problem
        if len(left) > 1:
            self._one_by_one.extend(left)
            return []
        return [Outcome(each.number, error=problem) for each in left]

    def _take_samples(self) -> list[Respond]:
        """Requests to sample that may run, as many as are sampled together, of all tenants by turns."""
        ready = [
            each
            for adapter, line in self._waiting.items()
            if adapter not in self._running
            for each in takewhile(lambda command: isinstance(command, Respond), line)
        ]
        taken = self._turns.take(cast("list[Respond]", ready), SAMPLES_AT_ONCE)
        for command in taken:
            self._waiting[command.adapter].remove(command)
            if not self._waiting[command.adapter]:
                del self._waiting[command.adapter]
        return taken

    def _cancel(self, number: int) -> list[Outcome]:
        """Leave out a request to sample; one that is under way ends with the next slice."""
        for line in (*self._waiting.values(), self._one_by_one):
            command = next((each for each in line if isinstance(each, Respond) and each.number == number), None)
            if command is not None:
                line.remove(command)  # type: ignore[arg-type]
                self._waiting = {adapter: left for adapter, left in self._waiting.items() if left}
                return [Outcome(number, error=CANCELLED)]
        if self._sampling is not None:
            self._sampling.cancel(number)
        return []

    def _sampled_from(self) -> set[str]:
        left = [*self._one_by_one, *(self._sampling.left if self._sampling is not None else ())]
        return {command.adapter for command in left}

    # --- everything else ---

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
        """Make, load or save a model. One that memory has no room for fails alone, where other calls may follow."""
        problem: MegascendError | None = None
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
        except torch.OutOfMemoryError as error:
            problem = OutOfDeviceMemoryError(f"the device's memory has no room for this request: {error}")
        if problem is not None and not self._backend.recover_memory():  # only here has the error let go of its tensors
            raise problem
        return Outcome(command.number, error=problem)

    def _remove(self, command: Remove) -> list[Outcome]:
        gone = ConfigError("the model was unloaded, or its session ended")
        outcomes = [Outcome(each.number, error=gone) for each in self._waiting.pop(command.adapter, ())]
        self._waits.forget(command.adapter)
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


def _outcome(
    command: Command, future: AdapterFuture[Any], together: int, waited: int | None, waited_s: float
) -> Outcome:
    """Of a future that is done."""
    number, error = command.number, None
    try:
        return Outcome(number, future.result(), together=together, waited=waited, waited_s=waited_s)
    except Exception as found:  # noqa: BLE001  whatever it is, it is the request's
        error = found
    problem = command.problem if isinstance(command, OptimizerStep) else None
    return Outcome(number, error=error if problem is None else DataError(problem), together=together)
