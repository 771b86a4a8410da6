"""Concurrent calls of engines, each with a deadline, also from programs without an event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from weightwire.background import BackgroundThread
from weightwire.engine import InferenceEngine

T = TypeVar("T")

log = logging.getLogger(__name__)

CANCEL_S = 10.0
"""Seconds that cancelled coroutines have to end when their loop closes."""


async def with_deadline(seconds: float, call: Awaitable[T]) -> T:
    """Await a call for ``seconds`` at most. It is then cancelled, and abandoned if it ignores the cancellation."""
    task = asyncio.ensure_future(call)
    try:
        # Not wait_for, which waits for a task that ignores its cancellation.
        completed, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not completed:
        task.cancel()
        task.add_done_callback(lambda late: late.cancelled() or late.exception())  # retrieved: asyncio would log it
        raise TimeoutError(f"it did not answer within {seconds:g} s")
    return task.result()


async def call_all(
    engines: Sequence[InferenceEngine], call: Callable[[InferenceEngine], Awaitable[T]], timeout_s: float
) -> tuple[dict[str, T], dict[str, Exception]]:
    """Call all engines concurrently, and wait for all.

    Returns:
        Results and errors by engine name; every engine is in one of the two.
    """
    # return_exceptions: one engine's failure must not cancel the calls of the others, whose state would be unknown.
    results: list[Any] = await asyncio.gather(
        *(with_deadline(timeout_s, call(engine)) for engine in engines), return_exceptions=True
    )
    succeeded: dict[str, T] = {}
    failed: dict[str, Exception] = {}
    for engine, result in zip(engines, results, strict=True):
        if isinstance(result, Exception):
            failed[engine.name] = result
        # A cancellation is the caller's, and no engine's error.
        elif isinstance(result, BaseException):
            raise result
        else:
            succeeded[engine.name] = result
    return succeeded, failed


class LoopThread:
    """An event loop on a daemon thread, so that a program that forgets to close it can end. A context manager.

    Coroutines that still run when it closes are cancelled.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._ending = False
        # A daemon: a program that never calls close() must still end.
        self._thread = BackgroundThread(self._run, name=name)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending:
            try:
                self.loop.run_forever()
            # SystemExit of a coroutine, as of a user's reward, ends the loop besides being that coroutine's result.
            except BaseException:
                log.exception("an event loop of thread %s was interrupted, and goes on", self._thread.name)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        # A coroutine that is never awaited would warn at its collection.
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError(f"the event loop of {self._thread.name} is closed")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread and wait for its result. If the wait is interrupted, the coroutine is cancelled."""
        future = self.submit(work)
        try:
            return future.result()
        # KeyboardInterrupt, too: no one waits for the coroutine any more.
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a plain function on the thread, between two steps of coroutines, and return its result."""

        async def work() -> T:
            return function(*arguments)

        return self.run(work())

    def close(self) -> None:
        """Cancel running coroutines and end the thread. May be called twice."""
        if self._thread.is_alive():
            self.run(_cancel_tasks())
            self._ending = True
            # Methods of a loop may be called from its own thread only; this one excepted.
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()

    def __enter__(self) -> LoopThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _cancel_tasks() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CANCEL_S)
    # An asynchronous generator that was not exhausted may hold a connection open.
    await asyncio.get_running_loop().shutdown_asyncgens()
