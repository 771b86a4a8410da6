"""Rollouts in flight, as futures that a callback completes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megascend.errors import ControllerBusyError, ControllerLostError, MessageError, RolloutTaskError

FORGOTTEN = 65536
"""Number of ended rollouts whose names are remembered, so that a late callback gets a precise error."""


class Timer(Protocol):
    """Handle of a scheduled call."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Monotonic time in seconds, with scheduled calls: an event loop, or a test's double."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer: ...


@dataclass
class _Task:
    future: asyncio.Future[Any]
    timer: Timer
    keep: bool
    size: int = 0
    completed: bool = False


class RolloutTasks:
    """Futures by name, with limits on their number, their time, and the bytes of results not yet fetched.

    For one event loop; only :meth:`wait` waits.

    Args:
        max_tasks: maximum number of expected and kept rollouts.
        max_kept_bytes: maximum bytes of results kept for :meth:`wait`.
    """

    def __init__(self, clock: Clock, max_tasks: int, max_kept_bytes: int) -> None:
        self._clock = clock
        self._max_tasks = max_tasks
        self._max_kept_bytes = max_kept_bytes
        self._tasks: dict[str, _Task] = {}
        self._over: OrderedDict[str, tuple[str, bool]] = OrderedDict()  # reason, and whether it was completed
        self._kept_bytes = 0
        self._closed = ""

    def expect(self, name: str, deadline_s: float, *, keep: bool = False) -> asyncio.Future[Any]:
        """Create the future of a rollout that is about to be requested.

        Args:
            deadline_s: seconds after which the future raises, and a completion is too late.
            keep: keep the result for :meth:`wait` until :meth:`forget`, or for the ``keep_s`` of :meth:`complete`; otherwise only
                the future has it.

        Returns:
            A future with the result, or a RolloutTaskError.
        """
        self._check_new(name)
        if len(self._tasks) >= self._max_tasks:
            raise self._full()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # A rollout may fail before anybody waits for it.
        future.add_done_callback(_retrieve_exception)
        message = f"rollout {name!r} was not completed within {deadline_s:g} s"
        timer = self._clock.call_at(
            self._clock.time() + deadline_s,
            lambda: self._settle(name, RolloutTaskError(message), message, 0, deadline_s),
        )
        self._tasks[name] = _Task(future, timer, keep)
        if not keep:  # a caller that gave up cancels the future
            future.add_done_callback(
                lambda future: future.cancelled() and self._remove(name, f"rollout {name!r} was cancelled")
            )
        return future

    def expect_all(self, names: Sequence[str], deadline_s: float) -> None:
        """Expect several rollouts, all or none, and keep their results for :meth:`wait`. Raises like :meth:`expect`."""
        # Everything is checked before the first one is created: all or none.
        if len(set(names)) < len(names):
            raise MessageError("a rollout is named twice")
        if len(self._tasks) + len(names) > self._max_tasks:
            raise self._full()
        for name in names:
            self._check_new(name)
        for name in names:
            self.expect(name, deadline_s, keep=True)

    def complete(self, name: str, result: Any, *, size: int = 0, keep_s: float = 600.0) -> None:
        """Set the result of a rollout.

        Args:
            size: bytes of the result, for ``max_kept_bytes``.
            keep_s: seconds for which a kept result can be fetched.

        Raises:
            RolloutTaskError: the rollout is not expected (any more); the message gives the reason.
            ControllerBusyError: results not yet fetched reach ``max_kept_bytes``; retry.
        """
        self._check_expected(name)
        # Refused as busy, so that the worker retries: memory is bounded by consumers, who fetch at their own pace.
        if self._tasks[name].keep and self._kept_bytes + size > self._max_kept_bytes:
            raise ControllerBusyError(
                f"{self._kept_bytes} bytes of results have not been fetched; no more are taken before some are"
            )
        self._tasks[name].completed = True
        self._settle(name, result, f"rollout {name!r} is completed", size, keep_s)

    def completed(self, name: str) -> bool:
        """Check whether a rollout was completed, as far as its name is remembered."""
        return self._tasks[name].completed if name in self._tasks else self._over.get(name, ("", False))[1]

    def fail(self, name: str, reason: str, *, keep_s: float = 600.0) -> None:
        """Set a rollout's error, a :class:`RolloutTaskError`. Raises like :meth:`complete`."""
        self._check_expected(name)
        error = RolloutTaskError(f"rollout {name!r} failed: {reason}")
        self._settle(name, error, f"rollout {name!r} is over: it failed", len(reason), keep_s)

    async def wait(self, names: Iterable[str], timeout_s: float, max_bytes: int = 2**62) -> dict[str, Any]:
        """Wait until a rollout ends or the time is over; return the results so far, which stay until :meth:`forget`.

        Args:
            max_bytes: limit on the size of the results, unless a single one is larger.

        Returns:
            Name -> result, or the RolloutTaskError it ended in, which may be that it is over and its result was not kept.
        """
        waiting: dict[asyncio.Future[Any], tuple[str, _Task]] = {}
        results: dict[str, Any] = {}
        for name in names:
            if name in self._tasks:
                waiting[self._tasks[name].future] = name, self._tasks[name]
            elif name in self._over:
                # Not raised: one result that nobody fetched in time must not cost the caller the others.
                results[name] = RolloutTaskError(self._over[name][0])
            else:
                raise RolloutTaskError(f"rollout {name!r} is not expected here")
        if waiting:
            timeout_s = 0.0 if results else timeout_s
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for future, (name, task) in waiting.items():
            if future.done() and not future.cancelled():
                max_bytes -= task.size
                # The first result goes out whatever its size, or it could never be fetched.
                if results and max_bytes < 0:
                    break
                results[name] = future.exception() or future.result()
        return results

    def forget(self, names: Iterable[str]) -> None:
        """Remove results that were fetched or are no longer needed; unknown names are ignored."""
        for name in names:
            self._remove(name, f"rollout {name!r} is over, and its result was fetched or given up")

    def close(self, reason: str) -> None:
        """Fail all rollouts in flight, and refuse new ones."""
        self._closed = reason
        for name, task in list(self._tasks.items()):
            if not task.future.done():
                self._settle(name, RolloutTaskError(f"rollout {name!r}: {reason}"), reason, 0, 0.0)
            self._remove(name, reason)

    def status(self) -> Mapping[str, int]:
        """Return counts: in flight, kept, bytes kept."""
        finished = sum(task.future.done() for task in self._tasks.values())
        return {"in_flight": len(self._tasks) - finished, "kept": finished, "kept_bytes": self._kept_bytes}

    def _check_new(self, name: str) -> None:
        if self._closed:
            raise ControllerLostError(self._closed)
        # A late callback names its rollout: under a name that is used again, it would complete the wrong one.
        if name in self._tasks or name in self._over:
            raise MessageError(f"rollout {name!r} is expected already, or was; each needs a name of its own")

    def _full(self) -> ControllerBusyError:
        return ControllerBusyError(
            f"{len(self._tasks)} rollouts are in flight or not fetched, of at most {self._max_tasks}; fetch some first"
        )

    def _check_expected(self, name: str) -> None:
        if name not in self._tasks or self._tasks[name].future.done():
            state = "completed" if name in self._tasks else "not expected here"
            raise RolloutTaskError(self._over[name][0] if name in self._over else f"rollout {name!r} is {state}")

    def _settle(self, name: str, result: Any, reason: str, size: int, keep_s: float) -> None:
        """Set a future's result; then keep it for ``keep_s``, or remove it with ``reason`` for late callbacks."""
        task = self._tasks[name]
        task.timer.cancel()
        if task.keep:
            task.size = size
            self._kept_bytes += size
            message = f"rollout {name!r} is over; nobody fetched its result within {keep_s:g} s"
            task.timer = self._clock.call_at(self._clock.time() + keep_s, lambda: self._remove(name, message))
        if not task.future.done():
            if isinstance(result, Exception):
                task.future.set_exception(result)
            else:
                task.future.set_result(result)
        if not task.keep:
            self._remove(name, reason)

    def _remove(self, name: str, reason: str) -> None:
        task = self._tasks.pop(name, None)
        if task is None:
            return
        task.timer.cancel()
        self._kept_bytes -= task.size
        if not task.future.done():
            task.future.cancel()
        # Remembered for late callbacks; the oldest are forgotten, so that memory is bounded.
        self._over[name] = reason, task.completed
        while len(self._over) > FORGOTTEN:
            self._over.popitem(last=False)


def _retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Mark an exception as retrieved: asyncio would log it if the waiter has gone."""
    if not future.cancelled():
        future.exception()
