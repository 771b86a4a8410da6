"""Queue of many tenants' requests, run in mixed batches on one model: submit first, wait later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor

from megascend.config import Adam
from megascend.errors import (
    ConfigError,
    DataError,
    MegascendError,
    OutOfDeviceMemoryError,
    ProcessGroupError,
    QueueFullError,
)
from megascend.training.batch.loss import Loss, LossFunction
from megascend.training.batch.losses import resolve
from megascend.training.batch.results import AdapterLoss, ForwardBackwardResult, ForwardResult, StepResult
from megascend.training.batch.sample import Sample
from megascend.training.lora.fairness import Ledger, Request, RequestKind, next_unit

T = TypeVar("T")

CALLS_AT_ONCE = 8
"""Maximum number of calls between two units of work; adapters take turns."""
SMALL_REQUESTS = 64
"""A request is charged at least a full batch divided by this number, for the fixed cost that even a small request has."""


class QueueBackend(Protocol):
    """Backend interface that the queue needs.

    The methods raise DataError, ConfigError or OutOfDeviceMemoryError on all ranks, and only before they change a gradient or a
    parameter. ``shard`` returns its arguments' sample objects, not copies. ``check_samples`` and ``discard_gradients`` are local.
    After torch.OutOfMemoryError, ``recover_memory`` returns whether the backend can be used further.
    """

    @property
    def adapters(self) -> Mapping[str, object]: ...
    def check_samples(self, samples: Sequence[Sample]) -> None: ...
    def shard(self, samples: Sequence[Sample]) -> list[Sample]: ...
    def forward_backward(
        self, samples: Sequence[Sample], loss: Loss, *, logprobs: bool = False
    ) -> ForwardBackwardResult: ...
    def optimizer_step(self, adapters: Sequence[str], adam: Mapping[str, Adam] | None = None) -> StepResult: ...
    def forward(self, samples: Sequence[Sample]) -> ForwardResult: ...
    def gather_by_data_rank(self, obj: Any) -> list[Any]: ...
    def discard_gradients(self, adapters: Sequence[str]) -> None: ...
    def recover_memory(self) -> bool: ...


class AdapterFuture(Generic[T]):
    """Future of a submitted request: pending, then a value or an error. Only the queue ends it.

    Attributes:
        error: error of the request; None while it is pending, and after it succeeded.
    """

    def __init__(self, run_once: Callable[[], bool]) -> None:
        self._run_once = run_once
        self._finished = False
        self._value: T | None = None
        self.error: Exception | None = None

    def done(self) -> bool:
        """Return True once there is a value or an error. Runs nothing."""
        return self._finished

    def result(self) -> T:
        """Run the queue until this request is done; return its value or raise its error. Collective."""
        while not self._finished:
            if not self._run_once():
                raise MegascendError("result() was called while the queue was running this request")
        if self.error is not None:
            raise self.error
        return cast("T", self._value)

    def _finish(self, value: T) -> None:
        self._value, self._finished = value, True

    def _fail(self, error: Exception) -> None:
        self.error, self._finished = error, True


@dataclass(frozen=True, eq=False)  # compared by identity: samples have no equality
class _QueuedRequest(Request):
    samples: Sequence[Sample]
    future: AdapterFuture[Any]
    logprobs: bool = False
    adam: Adam | None = None
    function: Callable[[], Any] | None = None


class AdapterQueue:
    """Queue of requests for adapters: mixes those that can share a batch, and shares the model fairly by tokens.

    All ranks construct the queue with the same arguments and call the same methods in the same order, from one thread, with
    the same global lists of samples. The queue's decisions depend on nothing else, so every rank runs the same units.

    The requests of one adapter run in the order of submission. A tenant submits ``forward_backward`` and
    ``optimizer_step`` before it waits for either. Submitting runs nothing and does not raise for bad samples: the error
    is in that request's future, and other adapters are not affected.

    After a failed ``forward_backward``, all requests of its adapter fail up to and including its next
    ``optimizer_step``, submitted already or not: that step would use incomplete gradients. The gradients are dropped, and
    the adapter's later requests run.

    Args:
        backend: a model with adapters, such as :class:`megascend.MegatronBackend`.
        max_batch_tokens: maximum number of input tokens of a mixed batch; a larger request is run separately.
        max_pending: maximum number of waiting requests of an adapter.
    """

    def __init__(self, backend: QueueBackend, *, max_batch_tokens: int = 65536, max_pending: int = 64) -> None:
        if max_batch_tokens < 1 or max_pending < 1:
            raise ConfigError(f"max_batch_tokens={max_batch_tokens} and max_pending={max_pending} must be at least 1")
        self._backend = backend
        self.max_batch_tokens = max_batch_tokens
        self._max_pending = max_pending
        self._lines: dict[
            str, deque[_QueuedRequest]
        ] = {}  # by adapter; none is empty, and the first request of each can run
        self._unchecked: set[int] = set()  # numbers of requests behind a call, which may create their adapter
        self._incomplete: dict[str, Exception] = {}  # adapters with incomplete gradients, and why
        self._ledger = Ledger(least=max_batch_tokens // SMALL_REQUESTS)
        self._numbers = count()

    # --- submitting ---

    def forward_backward(
        self,
        adapter: str,
        samples: Sequence[Sample],
        loss: str | Loss | LossFunction = "cross_entropy",
        logprobs: bool = False,
        loss_settings: Mapping[str, float] | None = None,
    ) -> AdapterFuture[AdapterLoss]:
        """Accumulate gradients of ``adapter`` over ``samples``, the global list. The value is this adapter's loss.

        Errors in the adapter's name, the samples or the loss are raised by the future, not by this call. The samples are
        copied, but not their tensors: do not change those until the request is done.

        Args:
            logprobs: the value also has the log-probabilities of all samples' targets, on every rank.
            loss_settings: keyword arguments of the loss's function, as for ``Backend.forward_backward``.

        Raises:
            QueueFullError: ``max_pending`` requests of this adapter are waiting; nothing was submitted.
        """
        return self._submit(adapter, "forward_backward", samples, loss, loss_settings=loss_settings, logprobs=logprobs)

    def failed(
        self, adapter: str, error: Exception, kind: Literal["forward_backward", "forward"] = "forward_backward"
    ) -> AdapterFuture[Any]:
        """Enqueue a request that already failed the caller's validation.

        Its future fails with ``error``, and, unless it is a forward, the adapter's requests up to its next ``optimizer_step``
        fail because of it.

        Raises:
            QueueFullError: as :meth:`forward_backward`.
        """
        return self._submit(adapter, kind, problem=error)

    def optimizer_step(self, adapter: str, adam: Adam | None = None) -> AdapterFuture[StepResult]:
        """Update ``adapter`` with the gradients of its earlier forward_backwards. Errors as in forward_backward.

        Args:
            adam: settings for this step only; see ``MegatronBackend.optimizer_step``.
        """
        return self._submit(adapter, "optimizer_step", adam=adam)

    def forward(self, adapter: str, samples: Sequence[Sample]) -> AdapterFuture[list[Tensor]]:
        """Compute log-probabilities under ``adapter``: fp32 [length] for each of ``samples``, the global list, in its order.

        Every rank gets all of them. Errors as in forward_backward, but they fail no other request.
        """
        return self._submit(adapter, "forward", samples)

    def call(self, adapter: str, function: Callable[[], T]) -> AdapterFuture[T]:
        """Run ``function`` in the order of the adapter's requests: after the earlier ones, before the later ones.

        For work other than steps, such as creating, loading or saving the adapter, which need not exist yet. The future raises a
        MegascendError or a lack of memory; it fails no other request. Unlike a forward, a call also runs between a failed
        forward_backward and its optimizer_step.

        Raises:
            QueueFullError: as :meth:`forward_backward`.
        """
        return self._submit(adapter, "call", function=function)

    def pending(self, adapter: str) -> int:
        """Return the number of this adapter's waiting requests, including failed ones that have not been dequeued."""
        return len(self._lines.get(adapter, ()))

    def cancel(self, adapter: str) -> None:
        """Fail all pending requests of ``adapter`` and drop its gradients. Call it before removing an adapter."""
        for waiting in self._lines.pop(adapter, ()):
            self._unchecked.discard(waiting.number)
            if not waiting.future.done():
                waiting.future._fail(MegascendError(f"{waiting.kind} of adapter {adapter!r} was cancelled"))
        self._incomplete.pop(adapter, None)
        self._discard(adapter)

    # --- running ---

    def run_once(self) -> bool:
        """Run up to :data:`CALLS_AT_ONCE` calls that are first in line, and a unit of work. False if nothing was pending."""
        calls = sum(self.run_call() for _ in range(CALLS_AT_ONCE))
        return self.run_unit() or calls > 0

    def run_call(self) -> bool:
        """Run a call that is first in its adapter's line, then move the adapter behind the others. False if there is none.

        Raises:
            BaseException: any error that the future does not hold for the caller, KeyboardInterrupt too; the future has failed.
        """
        adapter = next((adapter for adapter, line in self._lines.items() if line[0].kind == "call"), None)
        if adapter is None:
            return False
        waiting = self._lines[adapter][0]
        self._pop(adapter)
        if adapter in self._lines:
            self._lines[adapter] = self._lines.pop(adapter)  # dicts keep their order: other adapters' calls are next
        problem: MegascendError | None = None
        try:
            assert waiting.function is not None
            waiting.future._finish(waiting.function())
        except MegascendError as error:
            self._fail(waiting, error, gradients_lost=False)
            # Ranks may be out of step: no later request can run.
            if isinstance(error, ProcessGroupError | TimeoutError):
                raise
        except torch.OutOfMemoryError as error:
            problem = out_of_memory_error(error)
        except BaseException as error:
            self._fail(waiting, error, gradients_lost=False)
            raise
        if problem is not None:  # outside the except block, whose traceback keeps the call's tensors alive
            self._fail(waiting, problem, gradients_lost=False)
            if not self._backend.recover_memory():
                raise problem
        self._drop_failed(adapter)
        return True

    def run_unit(self) -> bool:
        """Run one unit of work: a mixed batch, optimizer steps, or forwards. False if none was pending.

        DataError and ConfigError are set in the future of the request that caused them. A batch that does not fit into the
        device's memory is run again one request at a time, if the backend has recovered; a request that does not fit on its own
        fails with OutOfDeviceMemoryError.

        Raises:
            BaseException: any other error, KeyboardInterrupt too. The unit's futures have failed, and its adapters' gradients
                count as incomplete.
        """
        heads = [line[0] for line in self._lines.values() if line[0].kind != "call"]
        if not heads:
            return False
        unit = next_unit(heads, self._ledger, self.max_batch_tokens)
        # Charged before it runs: a unit that fails has used the model, too.
        self._ledger = self._ledger.charged(unit)
        for waiting in unit:
            self._pop(waiting.adapter)
        try:
            self._run(unit)
        except BaseException as error:
            for waiting in unit:
                if not waiting.future.done():
                    # A forward leaves no gradients.
                    self._fail(waiting, error, gradients_lost=waiting.kind != "forward")
            raise
        finally:
            for waiting in unit:
                self._drop_failed(waiting.adapter)
        return True

    def drain(self) -> None:
        """Run until nothing is pending."""
        while self.run_once():
            pass

    # --- implementation ---

    def _submit(
        self,
        adapter: str,
        kind: RequestKind,
        samples: Sequence[Sample] = (),
        loss: str | Loss | LossFunction | None = None,
        problem: Exception | None = None,
        loss_settings: Mapping[str, float] | None = None,
        **options: Any,
    ) -> AdapterFuture[Any]:
        future: AdapterFuture[Any] = AdapterFuture(self.run_once)
        behind_call = any(waiting.kind == "call" for waiting in self._lines.get(adapter, ()))
        if kind != "call" and not behind_call and adapter not in self._backend.adapters:
            future._fail(self._unknown(kind, adapter))
            return future
        if self.pending(adapter) >= self._max_pending:
            raise QueueFullError(
                f"{kind}: adapter {adapter!r} has max_pending={self._max_pending} requests waiting; run some, or raise the limit"
            )
        stamped: list[Sample] = []
        try:
            if problem is not None:
                raise problem
            loss = None if loss is None else resolve(loss, loss_settings)
            if kind in ("forward_backward", "forward"):
                stamped = stamp(adapter, samples)
                if not behind_call:
                    self._backend.check_samples(stamped)
        except Exception as error:
            if error is not problem and not isinstance(error, DataError | ConfigError):
                raise
            future._fail(error)  # still enqueued: only requests behind it may fail because of it
        tokens = sum(map(len, stamped))
        waiting = _QueuedRequest(adapter, kind, next(self._numbers), tokens, loss, stamped, future, **options)
        if behind_call:
            self._unchecked.add(waiting.number)
        self._lines.setdefault(adapter, deque()).append(waiting)
        self._drop_failed(adapter)
        return future

    def _run(self, unit: Sequence[_QueuedRequest]) -> None:
        """Run a unit; if the backend refuses it, run its requests one at a time, so that only the invalid one fails."""
        problem: Exception | None = None
        recover = False
        try:
            values = self._call(unit)
        except (DataError, ConfigError, OutOfDeviceMemoryError) as error:
            problem = error
        except torch.OutOfMemoryError as error:
            if unit[0].kind == "optimizer_step":  # some adapters may have been updated
                raise
            problem = out_of_memory_error(error)
            recover = True
        else:
            for waiting, value in zip(unit, values, strict=True):
                waiting.future._finish(value)
            return
        # Outside the except block, whose traceback keeps the call's tensors alive.
        if recover and not self._backend.recover_memory():
            raise problem
        if len(unit) > 1:
            for waiting in unit:
                self._run([waiting])
            return
        self._fail(unit[0], problem, gradients_lost=unit[0].kind == "forward_backward")
        if unit[0].kind == "optimizer_step":
            self._discard(unit[0].adapter)  # the next step must not use these gradients

    def _call(self, unit: Sequence[_QueuedRequest]) -> Sequence[Any]:
        """Return the backend's result for each request of a unit."""
        kind, adapters = unit[0].kind, [waiting.adapter for waiting in unit]
        samples = [sample for waiting in unit for sample in waiting.samples]
        if kind == "optimizer_step":
            adam = {waiting.adapter: waiting.adam for waiting in unit if waiting.adam is not None}
            results = self._backend.optimizer_step(adapters, **({"adam": adam} if adam else {})).adapters
            return [results[adapter] for adapter in adapters]
        share = self._backend.shard(samples)
        if kind == "forward":
            logprobs = iter(self._gather_samples(samples, share, self._backend.forward(share).logprobs))
            return [[next(logprobs) for _ in waiting.samples] for waiting in unit]
        wants_logprobs = any(waiting.logprobs for waiting in unit)
        result = self._backend.forward_backward(share, unit[0].loss, **({"logprobs": True} if wants_logprobs else {}))
        losses = [result.adapters[adapter] for adapter in adapters]
        if not wants_logprobs:
            return losses
        assert result.logprobs is not None
        logprobs = iter(self._gather_samples(samples, share, result.logprobs))
        logprobs_by_request = [[next(logprobs) for _ in waiting.samples] for waiting in unit]
        return [
            replace(loss, logprobs=values) if waiting.logprobs else loss
            for loss, values, waiting in zip(losses, logprobs_by_request, unit, strict=True)
        ]

    def _gather_samples(
        self, samples: Sequence[Sample], share: Sequence[Sample], tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """Gather a tensor for each of ``samples``, in their order, from the shares of all data parallel ranks."""
        # By identity: shard() returns these objects, and equal samples of two tenants must be distinguished.
        index_of = {id(sample): index for index, sample in enumerate(samples)}
        indexed = [(index_of[id(sample)], tensor) for sample, tensor in zip(share, tensors, strict=True)]
        by_index = dict(entry for part in self._backend.gather_by_data_rank(indexed) for entry in part)
        return [by_index[index] for index in range(len(samples))]

    def _fail(self, waiting: _QueuedRequest, error: BaseException, gradients_lost: bool) -> None:
        if not isinstance(error, Exception):  # a future must not raise KeyboardInterrupt when it is read later
            error = MegascendError(
                f"{waiting.kind} of adapter {waiting.adapter!r}: interrupted by {type(error).__name__}"
            )
        waiting.future._fail(error)
        if gradients_lost:
            self._incomplete[waiting.adapter] = error

    def _drop_failed(self, adapter: str) -> None:
        """Dequeue requests that have failed, and those that must fail because of them."""
        while adapter in self._lines:
            first = self._lines[adapter][0]
            # Calls run in any case, also between a failed forward_backward and its optimizer_step.
            if first.kind == "call":
                return
            if first.number in self._unchecked:
                self._unchecked.discard(first.number)
                if adapter not in self._backend.adapters:  # the call that creates it has failed
                    self._pop(adapter)
                    first.future._fail(self._unknown(first.kind, adapter))
                    continue
                self._check(first)
            if not first.future.done() and adapter not in self._incomplete:
                return
            self._pop(adapter)
            if not first.future.done():
                first.future._fail(_not_run(first, self._incomplete[adapter]))
            if first.kind == "forward_backward":
                assert first.future.error is not None
                self._incomplete.setdefault(adapter, first.future.error)
            elif first.kind == "optimizer_step":
                self._incomplete.pop(adapter, None)
                self._discard(adapter)

    def _check(self, waiting: _QueuedRequest) -> None:
        """Check samples that were submitted behind a call, which has run by now."""
        try:
            if not waiting.future.done():
                self._backend.check_samples(waiting.samples)
        except (DataError, ConfigError) as error:
            waiting.future._fail(error)

    def _unknown(self, kind: str, adapter: str) -> ConfigError:
        adapters = ", ".join(map(repr, self._backend.adapters)) or "none"
        return ConfigError(f"{kind}: unknown adapter {adapter!r}; adapters: {adapters}")

    def _pop(self, adapter: str) -> None:
        self._unchecked.discard(self._lines[adapter].popleft().number)
        if not self._lines[adapter]:
            del self._lines[adapter]

    def _discard(self, adapter: str) -> None:
        if adapter in self._backend.adapters:
            self._backend.discard_gradients([adapter])


def out_of_memory_error(error: torch.OutOfMemoryError) -> OutOfDeviceMemoryError:
    """Build the error of a request that does not fit into the device's memory."""
    return OutOfDeviceMemoryError(f"the device's memory has no room for this request: {error}")


def stamp(adapter: str, samples: Sequence[Sample]) -> list[Sample]:
    """Copy samples for ``adapter``. Pairs are renamed, so that two tenants' pairs never merge."""
    if not samples:
        raise DataError(f"the request of adapter {adapter!r} has no samples")
    for index, sample in enumerate(samples):
        if sample.adapter not in (None, adapter):
            raise DataError(f"sample {index} is for adapter {sample.adapter!r} but was submitted for {adapter!r}")
    pairs = [None if sample.pair is None else (adapter, sample.pair) for sample in samples]
    return [replace(sample, adapter=adapter, pair=pair) for sample, pair in zip(samples, pairs, strict=True)]


def _not_run(waiting: _QueuedRequest, cause: Exception) -> MegascendError:
    error = MegascendError(
        f"{waiting.kind} of adapter {waiting.adapter!r} did not run: an earlier request failed ({cause}), so the gradients "
        "are incomplete; everything up to this adapter's next optimizer_step fails, then the gradients are dropped. "
        "Submit all requests of the step again after that optimizer_step"
    )
    error.__cause__ = cause
    return error
