"""Run the commands of all models on all ranks: training through the adapter queue, sampling in slices between its batches.

Every rank takes the same decisions, because they depend on the commands only. A *unit* of work is one call of the backend: a
batch of training, a slice of sampling, or the creation, loading or saving of an adapter.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megascend.apps.data.images import ImageProcessor
from megascend.apps.sampling.request import SampleRequest, SampleResult
from megascend.apps.serve.samples import RequestSamples, value_of
from megascend.apps.serve.scheduler.commands import (
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
    lengths_of,
)
from megascend.apps.serve.scheduler.inbox import Inbox
from megascend.backend import Backend
from megascend.errors import ConfigError, DataError, MegascendError
from megascend.training.batch.image_sources import ImageSources
from megascend.training.batch.images import SampleImages
from megascend.training.batch.results import AdapterLoss
from megascend.training.batch.sample import Sample
from megascend.training.lora.fairness import Ledger, Request, next_unit
from megascend.training.lora.queue import CALLS_AT_ONCE, AdapterFuture, AdapterQueue, out_of_memory_error

logger = logging.getLogger(__name__)

SAMPLING_FAULTS = (TypeError, ValueError, LookupError, ArithmeticError, AssertionError)
"""Errors of a bug in the sampling code, which fail the requests only. A broken device raises RuntimeError and ends the server."""
SAMPLES_AT_ONCE = 64
"""Maximum number of responses sampled together, which bounds the memory of their KV cache."""
SLICE_TOKENS = 16
"""Tokens of each response sampled between two units of training: a training request waits for one slice, not for a response."""
UNLIMITED = 2**62
"""Queue limit per model, which is never reached: requests are bounded on arrival instead (``limits.pending``)."""
MAX_SAMPLES = 1024
"""Maximum number of samples of one request in a batch: even a sample of one token takes a fixed time on the host."""
CANCELLED = ConfigError("the client has cancelled this request")

Cancelled = Callable[[], Collection[int]]
"""Returns the indices of cancelled requests."""

Generate = Callable[[Sequence[SampleRequest], int, Cancelled], Iterator[Mapping[int, SampleResult]]]
"""Samples requests, a number of tokens at a time; yields the finished results after each slice. Collective."""


def run_commands(
    backend: Backend,
    max_batch_tokens: int,
    inbox: Inbox | None,
    report: Callable[[list[Outcome]], None],
    generate: Generate | None = None,
    image_processor: ImageProcessor | None = None,
) -> None:
    """Run commands until the inbox of rank 0 is closed. Collective.

    Args:
        max_batch_tokens: maximum tokens of one batch of several models.
        inbox: rank 0's inbox; None on other ranks.
        report: called on every rank with outcomes.
        generate: samples responses in slices; collective.
        image_processor: decodes images of commands; None: the model takes none.
    """
    queue = AdapterQueue(backend, max_batch_tokens=max_batch_tokens, max_pending=UNLIMITED)
    runner = CommandRunner(backend, queue, generate, image_processor)
    while _run_turn(backend, runner, inbox, report):
        pass


def _run_turn(
    backend: Backend, runner: CommandRunner, inbox: Inbox | None, report: Callable[[list[Outcome]], None]
) -> bool:
    """Take commands, run one unit and report outcomes; return False when the inbox is closed.

    A function of its own, so that commands and outcomes (a batch's tensors) are freed before the wait for the next ones.
    """
    idle, ready = runner.idle, runner.ready

    def take() -> list[Command] | None:
        assert inbox is not None
        return inbox.take(wait=idle, ready=ready)

    commands = backend.from_rank_0(take)  # also the heartbeat that detects a lost rank
    if commands is None:
        return False
    outcomes = runner.add(commands)
    if not runner.idle:
        outcomes += runner.run_once()
    if outcomes:
        report(outcomes)
    if inbox is not None:
        inbox.mark_answered(runner.finished_models)
    return True


@dataclass(eq=False)
class _Entry:
    """An unfinished command of a model.

    Attributes:
        since: units of work and clock seconds at which it became its model's first; None before.
        future: of the part in the queue; None while it is not its model's first.
        part: the samples of that part; the first of the next one is ``next``.
        values: results of the parts that have run.
    """

    command: Command
    since: tuple[int, float] | None = None
    future: AdapterFuture[Any] | None = None
    part: Sequence[Sample] = ()
    next: int = 0
    values: list[AdapterLoss | list[Tensor]] = field(default_factory=list)

    @property
    def left(self) -> bool:
        """True if samples remain after the part in the queue."""
        return isinstance(self.command, ForwardBackward | Forward) and self.next < len(self.command.samples)

    def take_part(self, max_tokens: int) -> Sequence[Sample]:
        """Build the samples of the next part: those that fit into a batch, at least one."""
        assert isinstance(self.command, ForwardBackward | Forward)
        lengths = lengths_of(self.command.samples)[self.next : self.next + MAX_SAMPLES]
        count = max(1, int(np.searchsorted(lengths.cumsum(), max_tokens, "right")))
        start, self.next = self.next, self.next + count
        return self.command.samples[start : self.next]

    def keep(self, value: Any) -> None:
        """Add the result of a part."""
        command = self.command
        if isinstance(command, Forward) and command.loss is not None:
            trained = sum(int((sample.weights != 0).sum()) for sample in self.part)
            tokens = sum(map(len, self.part))
            value = AdapterLoss(value_of(command.loss, self.part, value), trained, tokens, {}, value)
        self.values.append(value)
        self.part = ()

    @property
    def value(self) -> Any:
        """Result of the command."""
        if isinstance(self.command, ForwardBackward | Forward):
            value = self.values[0] if len(self.values) == 1 else _joined(self.values)
            if isinstance(value, AdapterLoss) and isinstance(self.command.samples, RequestSamples):
                return self.command.samples.arrange(value)
            return value
        assert self.future is not None
        return self.future.result()


def _of_request(error: Exception) -> MegascendError:
    return error if isinstance(error, MegascendError) else DataError(f"{type(error).__name__}: {error}")


def _joined(values: Sequence[AdapterLoss | list[Tensor]]) -> AdapterLoss | list[Tensor]:
    """Join the results of a request's parts: sums add up, and metrics are averaged over the targets with a weight."""
    losses = [value for value in values if isinstance(value, AdapterLoss)]
    if not losses:
        return [logprobs for value in values if isinstance(value, list) for logprobs in value]
    counted = [loss for loss in losses if loss.tokens] or losses[:1]
    weights = [loss.tokens or 1 for loss in counted]
    metrics = {
        name: sum(weight * loss.metrics[name] for weight, loss in zip(weights, counted, strict=True)) / sum(weights)
        for name in counted[0].metrics
    }
    return AdapterLoss(
        sum(loss.loss for loss in losses),
        sum(loss.tokens for loss in losses),
        sum(loss.total_tokens for loss in losses),
        metrics,
        [logprobs for loss in losses for logprobs in loss.logprobs or ()],
    )


class CommandRunner:
    """Schedules and runs the unfinished commands of all models.

    Args:
        backend: the model on all ranks.
        queue: runs all commands except sampling, in each model's order.
        generate: samples responses; collective.
        image_processor: decodes the images of commands when a rank computes with them.

    Attributes:
        finished_models: models whose last command ended in the last unit.
    """

    def __init__(
        self,
        backend: Backend,
        queue: AdapterQueue,
        generate: Generate | None = None,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self._backend, self._queue, self._generate, self._image_processor = backend, queue, generate, image_processor
        self._unfinished: dict[str, deque[_Entry]] = {}  # by model, in the order in which clients expect the answers
        self._to_sample: list[Respond] = []  # in the order of arrival
        self._single_retries: deque[Respond] = deque()  # requests whose batch ran out of memory
        self._sampling: SamplingBatch | None = None
        self._removals: list[Remove] = []  # of adapters in use by sampling, deferred until it ends
        self._units = 0  # of work so far: calls, slices, batches
        self._turns = SampleTurns()
        self.finished_models: list[str] = []

    @property
    def ready(self) -> int:
        """Number of tokens of the forward_backwards that could run now."""
        heads = [entries[0].command for entries in self._unfinished.values()]
        return sum(command.tokens for command in heads if isinstance(command, ForwardBackward))

    @property
    def idle(self) -> bool:
        return not (self._unfinished or self._to_sample or self._sampling or self._single_retries)

    def add(self, commands: Iterable[Command]) -> list[Outcome]:
        """Add commands; return the outcomes of removals and cancellations, which run at once."""
        outcomes: list[Outcome] = []
        for command in commands:
            # Removals and cancellations run at once: queued, they would wait for the work that they are meant to spare.
            if isinstance(command, Remove) and command.adapter in self._adapters_in_use():
                self._removals.append(command)  # the slices still to come read its weights
            elif isinstance(command, Remove):
                outcomes += self._remove(command)
            elif isinstance(command, Cancel):
                outcomes += self._cancel(command.number)
            elif isinstance(command, Respond):
                images = self._deferred(command.request.images)
                self._to_sample.append(replace(command, request=replace(command.request, images=images)))
            else:
                self._unfinished.setdefault(command.adapter, deque()).append(_Entry(command))
        return outcomes

    def run_once(self) -> list[Outcome]:
        """Run a few calls, a slice of sampling, and one unit of the queue. Collective."""
        # One of each in every turn, so that saves, responses and training steps cannot starve one another.
        self._submit_heads()
        return [*self._run_calls(), *self._sample(), *self._run_unit()]

    def _submit(self, entry: _Entry) -> AdapterFuture[Any]:
        """Put a command, or the next part of its samples, into the queue."""
        command = entry.command
        queue, backend, adapter = self._queue, self._backend, command.adapter
        problem = command.problem if isinstance(command, ForwardBackward | OptimizerStep) else None
        if problem is not None:
            failed = queue.failed(adapter, DataError(problem))
            # The failed step drops its gradients, so that they do not leak into the next one.
            return failed if isinstance(command, ForwardBackward) else queue.optimizer_step(adapter)
        if isinstance(command, ForwardBackward | Forward):
            try:
                entry.part = entry.take_part(queue.max_batch_tokens)
            # Samples are checked on arrival; one that slipped through must not end the server.
            except Exception as error:
                logger.exception("a request's samples could not be built")
                kind = "forward_backward" if isinstance(command, ForwardBackward) else "forward"
                return queue.failed(adapter, _of_request(error), kind)
            for sample in entry.part:
                sample.images = self._deferred(sample.images)
        if isinstance(command, ForwardBackward):
            return queue.forward_backward(adapter, entry.part, command.loss or "cross_entropy", logprobs=True)
        if isinstance(command, OptimizerStep):
            return queue.optimizer_step(adapter, command.adam)
        if isinstance(command, Forward):
            return queue.forward(adapter, entry.part)
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

    def _deferred(self, images: SampleImages | ImageSources | None) -> SampleImages | None:
        """Return a command's images, which travel as they were sent."""
        if not isinstance(images, ImageSources):
            return images
        assert self._image_processor is not None, "requests with images are refused for a model of text"
        return self._image_processor.deferred(images)

    def _run_calls(self) -> list[Outcome]:
        """Create, load and save adapters at the head of their queues."""
        outcomes: list[Outcome] = []
        for _ in range(CALLS_AT_ONCE):
            if not self._queue.run_call():
                break
            self._units += 1
            for adapter in list(self._unfinished):
                outcomes += [_outcome(entry) for entry in self._take_finished(adapter)]
        self._submit_heads()
        return outcomes

    def _run_unit(self) -> list[Outcome]:
        """Run one unit of the queue: a batch of forward_backwards, forwards or steps."""
        self.finished_models = []
        models = list(self._unfinished)
        if not models:
            return []
        start = time.monotonic()
        self._queue.run_unit()
        finished = {adapter: self._take_finished(adapter) for adapter in models}
        # A unit is one batch, so every adapter with a finished command was in it.
        batch_adapters = sum(1 for entries in finished.values() if entries)
        outcomes: list[Outcome] = []
        for entry in (entry for entries in finished.values() for entry in entries):
            # Requests that failed behind another one were never first, and have not waited for a turn.
            waited = (self._units - entry.since[0], start - entry.since[1]) if entry.since else (None, 0.0)
            outcomes.append(_outcome(entry, batch_adapters, *waited))
        self._units += 1
        self._submit_heads()
        self.finished_models = [adapter for adapter in models if adapter not in self._unfinished]
        return outcomes

    def _submit_heads(self) -> None:
        """Put the first command of every model into the queue; its wait begins."""
        # The first only, and a batch of its samples at a time: what later ones take on the host, before they run, would delay
        # other models; and between two parts, these have their turns.
        for entries in self._unfinished.values():
            entry = entries[0]
            if entry.future is None:
                entry.future = self._submit(entry)
            entry.since = entry.since or (self._units, time.monotonic())

    def _take_finished(self, adapter: str) -> list[_Entry]:
        entries = self._unfinished[adapter]
        finished = []
        while entries and (future := entries[0].future) is not None and future.done():
            entry = entries[0]
            if future.error is None and isinstance(entry.command, ForwardBackward | Forward):
                try:
                    entry.keep(future.result())
                except Exception as error:  # of a loss, whose value a forward computes here
                    logger.exception("the loss of a forward could not be computed")
                    entry.future = self._queue.failed(adapter, _of_request(error), "forward")
                    continue
                if entry.left:
                    entry.future = None
                    break
            finished.append(entries.popleft())
            if entries:
                entries[0].future = self._submit(entries[0])
        if not entries:
            del self._unfinished[adapter]
        return finished

    # --- sampling ---

    def _sample(self) -> list[Outcome]:
        """Sample a slice of the current responses, or start the next ones. Collective."""
        if self._sampling is None:
            selected = [self._single_retries.popleft()] if self._single_retries else self._take_samples()
            if not selected:
                return []
            if self._generate is None:
                problem = ConfigError("this server does not sample")
                return [Outcome(command.number, error=problem) for command in selected]
            # Kept between turns: the batch continues after the training unit of each turn.
            self._sampling = SamplingBatch(selected, self._generate)
        sampling, outcomes, problem = self._sampling, [], None
        try:
            outcomes = sampling.advance()
        except torch.OutOfMemoryError as error:
            problem = out_of_memory_error(error)
        except SAMPLING_FAULTS as error:
            logger.exception(
                "sampling for %s has failed", ", ".join(sorted({command.adapter for command in sampling.unanswered}))
            )
            problem = error.with_traceback(None)
        else:
            self._units += 1
        unanswered = sampling.unanswered
        if problem is None and unanswered:
            return outcomes
        self._sampling = sampling = None  # frees its KV cache
        if problem is not None:  # only here: inside the except block the traceback still holds tensors
            outcomes = self._retry_one_by_one(unanswered, problem)
        removals, self._removals = self._removals, []
        return [*outcomes, *self.add(removals)]

    def _retry_one_by_one(self, unanswered: list[Respond], problem: Exception) -> list[Outcome]:
        """Requeue unanswered requests one by one; a single request that fails again gets the error."""
        if not self._backend.recover_memory():
            raise problem  # other ranks may be waiting in a collective of this slice: the job must end
        # One request at a time needs less memory than the batch did.
        if len(unanswered) > 1:
            self._single_retries.extend(unanswered)
            return []
        return [Outcome(command.number, error=problem) for command in unanswered]

    def _take_samples(self) -> list[Respond]:
        """Take up to ``SAMPLES_AT_ONCE`` responses of adapters without pending training commands."""
        # An adapter with other commands has to wait for them: its own load may be among them.
        ready = [command for command in self._to_sample if command.adapter not in self._unfinished]
        selected = self._turns.take(ready, SAMPLES_AT_ONCE)
        for command in selected:
            self._to_sample.remove(command)
        return selected

    def _cancel(self, number: int) -> list[Outcome]:
        """Cancel a sampling request; one that is being sampled ends with the next slice."""
        for requests in (self._single_retries, self._to_sample):
            for command in requests:
                if command.number == number:
                    requests.remove(command)
                    return [Outcome(number, error=CANCELLED)]
        if self._sampling is not None:
            self._sampling.cancel(number)
        return []

    def _adapters_in_use(self) -> set[str]:
        """Return the adapters whose weights the responses in progress still read."""
        in_progress = [*self._single_retries, *(self._sampling.unanswered if self._sampling is not None else ())]
        return {command.adapter for command in in_progress}

    def _remove(self, command: Remove) -> list[Outcome]:
        adapter = command.adapter
        waiting = [entry.command for entry in self._unfinished.pop(adapter, ())]
        waiting += [request for request in self._to_sample if request.adapter == adapter]
        self._to_sample = [request for request in self._to_sample if request.adapter != adapter]
        self._queue.cancel(adapter)  # first: it discards the adapter's gradients on the backend
        if adapter in self._backend.adapters:
            self._backend.remove_adapter(adapter)
        error = ConfigError("the model was unloaded, or its session ended")
        return [*(Outcome(waiting_command.number, error=error) for waiting_command in waiting), Outcome(command.number)]


def _outcome(
    entry: _Entry, batch_adapters: int = 0, wait_units: int | None = None, wait_seconds: float = 0.0
) -> Outcome:
    """Build the Outcome of a finished command."""
    command, error = entry.command, None if entry.future is None else entry.future.error
    if error is None:
        return Outcome(command.number, entry.value, None, batch_adapters, wait_units, wait_seconds)
    if isinstance(error, DataError) and (start := entry.next - len(entry.part)) > 0:
        error = DataError(f"counted from sample {start}: {error}")
    # The queue reports that the step was skipped for an earlier failure; the client needs the reason, its own settings.
    problem = command.problem if isinstance(command, OptimizerStep) else None
    return Outcome(command.number, None, error if problem is None else DataError(problem), batch_adapters)


class SamplingBatch:
    """Requests sampled together, a slice of tokens at a time, until all are answered."""

    def __init__(self, commands: Sequence[Respond], generate: Generate) -> None:
        self._unanswered = dict(enumerate(commands))
        self._cancelled: set[int] = set()
        self._slices = generate([command.request for command in commands], SLICE_TOKENS, lambda: self._cancelled)

    @property
    def unanswered(self) -> list[Respond]:
        return list(self._unanswered.values())

    def advance(self) -> list[Outcome]:
        """Sample a slice. Collective."""
        ended = next(self._slices)
        return [self._outcome(number, result) for number, result in ended.items()]

    def cancel(self, command_number: int) -> None:
        """End the request of the command with this number at the next token."""
        self._cancelled |= {number for number, command in self._unanswered.items() if command.number == command_number}

    def _outcome(self, number: int, result: SampleResult) -> Outcome:
        command = self._unanswered.pop(number)
        return (
            Outcome(command.number, error=CANCELLED) if number in self._cancelled else Outcome(command.number, result)
        )


class SampleTurns:
    """Chooses the sampling requests that run together, fairly by tenant: each request is charged one unit of service.

    So no tenant waits for another's whole backlog. A request with more responses than fit runs alone when its turn comes.
    """

    def __init__(self) -> None:
        self._ledger = Ledger()

    def take(self, ready: Sequence[Respond], max_responses: int) -> list[Respond]:
        """Select requests to run together.

        Args:
            ready: requests that may run, in order within each tenant.
            max_responses: maximum number of responses.
        """
        queues: dict[str, deque[Respond]] = {}
        for command in ready:
            queues.setdefault(command.tenant, deque()).append(command)
        selected: list[Respond] = []
        room = max_responses
        while queues:
            # As in training (training/lora/fairness.py), with tenants in place of adapters and requests in place of tokens. A
            # limit of 0 tokens lets no request join the leader: the limit here is of responses, counted below.
            heads = [Request(tenant, "forward", queue[0].number, 1, None) for tenant, queue in queues.items()]
            (first,) = unit = next_unit(heads, self._ledger, max_batch_tokens=0)
            queue = queues[first.adapter]
            size = queue[0].request.num_samples
            if selected and size > room:
                del queues[first.adapter]  # with the requests behind it: a tenant's requests keep their order
                continue
            selected.append(queue.popleft())
            room -= size
            self._ledger = self._ledger.charged(unit)
            if not queue:
                del queues[first.adapter]
        return selected
