"""Run the commands of all models on all ranks: steps and what is between them by the queue, sampling in slices beside it.

The same on every rank: it decides from the commands alone.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from megascend.backend import Backend
from megascend.config import Lora
from megascend.errors import ConfigError, DataError
from megascend.lora.fairness import Ledger, Request, next_unit
from megascend.lora.queue import CALLS_AT_ONCE, AdapterFuture, AdapterQueue, no_room
from megascend.sampling.request import SampleRequest, SampleResult
from megascend.serve.scheduler.commands import (
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
from megascend.serve.scheduler.inbox import Inbox

logger = logging.getLogger(__name__)

FAULTS = (TypeError, ValueError, LookupError, ArithmeticError, AssertionError)
"""What a fault in the code that samples raises. A device that is broken raises RuntimeError."""
SAMPLES_AT_ONCE = 64
"""Responses that are sampled together."""
SLICE_TOKENS = 16
"""Tokens of each of them that are sampled between two units of training."""
UNLIMITED = 2**62
"""Commands of a model in the queue: their number is bounded where requests are taken (``limits.pending``)."""
CANCELLED = ConfigError("the client has cancelled this request")

Cancelled = Callable[[], Collection[int]]
"""Numbers of the requests that nobody waits for any more."""

Generate = Callable[[Sequence[SampleRequest], int, Cancelled], Iterator[Mapping[int, SampleResult]]]
"""Answers requests, so many tokens at a time; after each slice the results of those that have ended. Collective."""


class AdapterStore(Protocol):
    """What commands need of a backend beside what the queue needs."""

    @property
    def adapters(self) -> Mapping[str, object]: ...
    def add_adapter(self, name: str, lora: Lora | None = None) -> None: ...
    def remove_adapter(self, name: str) -> None: ...
    def save_adapter(self, name: str, path: str, optimizer: bool = True) -> None: ...
    def load_adapter(
        self, name: str, path: str, lora: Lora | None = None, optimizer: bool = True, replace: bool = False
    ) -> None: ...
    def recover_memory(self) -> bool: ...


def work(
    backend: Backend,
    max_batch_tokens: int,
    inbox: Inbox | None,
    report: Callable[[list[Outcome]], None],
    generate: Generate | None = None,
) -> None:
    """Run commands until the inbox of rank 0 is closed. Collective.

    Args:
        max_batch_tokens: most tokens of one batch of several models.
        inbox: rank 0's; None on the others.
        report: called on every rank with outcomes.
        generate: answers requests to sample, in slices; collective.
    """
    lines = Lines(backend, AdapterQueue(backend, max_batch_tokens=max_batch_tokens, max_pending=UNLIMITED), generate)
    while _turn(backend, lines, inbox, report):
        pass


def _turn(backend: Backend, lines: Lines, inbox: Inbox | None, report: Callable[[list[Outcome]], None]) -> bool:
    """Take commands, run one unit and report outcomes; False when the inbox is closed.

    Commands and outcomes end with the turn: no batch is held while the next one is waited for.
    """
    idle, ready = lines.idle, lines.ready

    def take() -> list[Command] | None:
        assert inbox is not None
        return inbox.take(wait=idle, ready=ready)

    commands = backend.from_rank_0(take)
    if commands is None:
        return False
    outcomes = lines.add(commands)
    if not lines.idle:
        outcomes += lines.run_once()
    if outcomes:
        report(outcomes)
    if inbox is not None:
        inbox.answered(lines.answered)
    return True


class Lines:
    """Commands of all models that have not ended.

    Args:
        backend: all ranks' model.
        queue: runs what is no request to sample, in each model's order.
        generate: answers requests to sample; collective.

    Attributes:
        answered: models whose last steps have ended in the last turn.
    """

    def __init__(self, backend: AdapterStore, queue: AdapterQueue, generate: Generate | None = None) -> None:
        self._backend, self._queue, self._generate = backend, queue, generate
        self._running: dict[str, deque[tuple[Command, AdapterFuture[Any]]]] = {}
        self._to_sample: dict[str, deque[Respond]] = {}
        self._one_by_one: deque[Respond] = deque()  # what had no room together
        self._sampling: Sampling | None = None
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
        return not (self._running or self._to_sample or self._sampling or self._one_by_one)

    def add(self, commands: Iterable[Command]) -> list[Outcome]:
        """Take commands; return the outcomes of those that need no turn."""
        outcomes: list[Outcome] = []
        for command in commands:
            if isinstance(command, Remove) and command.adapter in self._sampled_from():
                self._removals.append(command)
            elif isinstance(command, Remove):
                outcomes += self._remove(command)
            elif isinstance(command, Cancel):
                outcomes += self._cancel(command.number)
            elif isinstance(command, Respond):
                self._to_sample.setdefault(command.adapter, deque()).append(command)
            else:
                self._running.setdefault(command.adapter, deque()).append((command, self._submit(command)))
        return outcomes

    def run_once(self) -> list[Outcome]:
        """Run a few calls, a slice of what is sampled, and one unit of the queue. Collective.

        Raises:
            BaseException: what is nobody's request's fault, such as a rank that is gone.
        """
        self._waits.first(self._running)
        return [*self._run_calls(), *self._sample(), *self._run_unit()]

    def _submit(self, command: Command) -> AdapterFuture[Any]:
        queue, backend, adapter = self._queue, self._backend, command.adapter
        problem = command.problem if isinstance(command, ForwardBackward | OptimizerStep) else None
        if problem is not None:
            failed = queue.failed(adapter, DataError(problem))
            # A step that fails drops what it was to use, so that nothing is left for the step after it.
            return failed if isinstance(command, ForwardBackward) else queue.optimizer_step(adapter)
        if isinstance(command, ForwardBackward):
            return queue.forward_backward(adapter, command.samples, command.loss or "cross_entropy", logprobs=True)
        if isinstance(command, OptimizerStep):
            return queue.optimizer_step(adapter, command.adam)
        if isinstance(command, Forward):
            return queue.forward(adapter, command.samples)
        if isinstance(command, Create) and command.path is None:
            return queue.call(adapter, partial(backend.add_adapter, adapter, command.lora))
        if isinstance(command, Create | Load):
            assert command.path is not None
            values: dict[str, Any] = {"replace": True} if isinstance(command, Load) else {}
            return queue.call(
                adapter, partial(backend.load_adapter, adapter, command.path, optimizer=command.optimizer, **values)
            )
        assert isinstance(command, Save)
        return queue.call(adapter, partial(backend.save_adapter, adapter, command.path, optimizer=command.optimizer))

    def _run_calls(self) -> list[Outcome]:
        """Create, load and save adapters whose turn it is."""
        outcomes: list[Outcome] = []
        for _ in range(CALLS_AT_ONCE):
            if not self._queue.run_call():
                break
            self._waits.count()
            for adapter in list(self._running):
                done = self._take_done(adapter)
                if done:
                    self._waits.forget(adapter)
                    outcomes += [_outcome(*pair) for pair in done]
        self._waits.first(self._running)
        return outcomes

    def _run_unit(self) -> list[Outcome]:
        """Run a unit of the queue."""
        self.answered = []
        before = list(self._running)
        if not before:
            return []
        self._waits.start()
        self._queue.run_unit()
        done = {adapter: self._take_done(adapter) for adapter in before}
        together = sum(1 for pairs in done.values() if pairs)
        outcomes: list[Outcome] = []
        for adapter, pairs in done.items():
            for number, pair in enumerate(pairs):
                waited = self._waits.of(adapter) if number == 0 else (None, 0.0)
                outcomes.append(_outcome(*pair, together, *waited))
        self._waits.count()
        self._waits.first(self._running)
        self.answered = [adapter for adapter in before if adapter not in self._running]
        return outcomes

    def _take_done(self, adapter: str) -> list[tuple[Command, AdapterFuture[Any]]]:
        running = self._running[adapter]
        done = []
        while running and running[0][1].done():
            done.append(running.popleft())
        if not running:
            del self._running[adapter]
        return done

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
        sampling, outcomes, problem = self._sampling, [], None
        try:
            outcomes = sampling.advance()
        except torch.OutOfMemoryError as error:
            problem = no_room(error)
        except FAULTS as error:
            logger.exception("sampling for %s has failed", ", ".join(sorted({each.adapter for each in sampling.left})))
            problem = error.with_traceback(None)
        else:
            self._waits.count()
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
        """Take requests to sample of adapters that have nothing else to do, as many as are sampled together."""
        ready = [each for adapter, line in self._to_sample.items() if adapter not in self._running for each in line]
        taken = self._turns.take(ready, SAMPLES_AT_ONCE)
        for command in taken:
            self._leave(command)
        return taken

    def _leave(self, command: Respond) -> None:
        line = self._to_sample[command.adapter]
        line.remove(command)
        if not line:
            del self._to_sample[command.adapter]

    def _cancel(self, number: int) -> list[Outcome]:
        """Leave out a request to sample; one that is under way ends with the next slice."""
        waiting = [*self._one_by_one, *(each for line in self._to_sample.values() for each in line)]
        command = next((each for each in waiting if each.number == number), None)
        if command is None:
            if self._sampling is not None:
                self._sampling.cancel(number)
            return []
        if command in self._one_by_one:
            self._one_by_one.remove(command)
        else:
            self._leave(command)
        return [Outcome(number, error=CANCELLED)]

    def _sampled_from(self) -> set[str]:
        left = [*self._one_by_one, *(self._sampling.left if self._sampling is not None else ())]
        return {command.adapter for command in left}

    def _remove(self, command: Remove) -> list[Outcome]:
        adapter = command.adapter
        waiting = [*(each for each, _ in self._running.pop(adapter, ())), *self._to_sample.pop(adapter, ())]
        self._waits.forget(adapter)
        self._queue.cancel(adapter)
        if adapter in self._backend.adapters:
            self._backend.remove_adapter(adapter)
        gone = ConfigError("the model was unloaded, or its session ended")
        return [*(Outcome(each.number, error=gone) for each in waiting), Outcome(command.number)]


def _outcome(
    command: Command, future: AdapterFuture[Any], together: int = 0, waited: int | None = None, waited_s: float = 0.0
) -> Outcome:
    """Build the Outcome of a finished future."""
    number, error = command.number, None
    try:
        return Outcome(number, future.result(), together=together, waited=waited, waited_s=waited_s)
    except Exception as problem:  # noqa: BLE001  whatever it is, it is the request's
        error = problem
    reason = command.problem if isinstance(command, OptimizerStep) else None
    return Outcome(number, error=error if reason is None else DataError(reason), together=together)


class Sampling:
    """Requests that are sampled together, a slice of tokens at a time, until all are answered."""

    def __init__(self, commands: Sequence[Respond], generate: Generate) -> None:
        self._left = dict(enumerate(commands))
        self._cancelled: set[int] = set()
        self._slices = generate([command.request for command in commands], SLICE_TOKENS, lambda: self._cancelled)

    @property
    def left(self) -> list[Respond]:
        """Those that have no answer yet."""
        return list(self._left.values())

    def advance(self) -> list[Outcome]:
        """Sample a slice. Collective."""
        ended = next(self._slices)
        return [self._outcome(number, result) for number, result in ended.items()]

    def cancel(self, of: int) -> None:
        """End the request of the command with this number at the next token."""
        self._cancelled |= {number for number, command in self._left.items() if command.number == of}

    def _outcome(self, number: int, result: SampleResult) -> Outcome:
        command = self._left.pop(number)
        return (
            Outcome(command.number, error=CANCELLED) if number in self._cancelled else Outcome(command.number, result)
        )


class SampleTurns:
    """Choose the requests to sample that run together: fairly by tenant, each request for one token of service.

    So nobody waits for all that another tenant has in line. A request that has more responses than are sampled together runs
    when its turn begins, alone.
    """

    def __init__(self) -> None:
        self._ledger = Ledger()

    def take(self, ready: Sequence[Respond], most: int) -> list[Respond]:
        """Take requests to run together.

        Args:
            ready: those that may run; a tenant's in their order.
            most: responses at a time.
        """
        lines: dict[str, deque[Respond]] = {}
        for command in ready:
            lines.setdefault(command.tenant, deque()).append(command)
        taken: list[Respond] = []
        room = most
        while lines:
            heads = [Request(tenant, "forward", line[0].number, 1, None) for tenant, line in lines.items()]
            (first,) = unit = next_unit(heads, self._ledger, max_batch_tokens=0)
            line = lines[first.adapter]
            size = line[0].request.num_samples
            if taken and size > room:
                del lines[first.adapter]  # and what is behind it: a tenant's requests keep their order
                continue
            taken.append(line.popleft())
            room -= size
            self._ledger = self._ledger.charged(unit)
            if not line:
                del lines[first.adapter]
        return taken


class Waits:
    """How long the first request of every model waits for its turn: in units of the ranks' work, and in seconds.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._units = 0
        self._began = clock()
        self._since: dict[str, tuple[int, float]] = {}

    def first(self, models: Iterable[str]) -> None:
        """Note that these models have a request that could run now."""
        now = self._clock()
        for model in models:
            self._since.setdefault(model, (self._units, now))

    def start(self) -> None:
        """Note that a unit of work begins."""
        self._began = self._clock()

    def count(self) -> None:
        """Count a unit of work that has run."""
        self._units += 1

    def of(self, model: str) -> tuple[int, float]:
        """Return units and seconds that a model's first request had waited when the unit began that has just run."""
        units, since = self._since.pop(model)
        return self._units - units, self._began - since

    def forget(self, model: str) -> None:
        """Forget a model."""
        self._since.pop(model, None)
