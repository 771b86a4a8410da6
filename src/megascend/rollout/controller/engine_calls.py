"""Calls of several engines at once, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol, TypeVar

from megascend.errors import EngineError, EngineTimeoutError
from weightwire.offer import Offer, Seal

T = TypeVar("T")


class UpdatedEngine(Protocol):
    """What of an engine (:class:`megascend.rollout.engines.base.InferenceEngine`) the controller calls."""

    name: str

    async def receivers(self) -> int: ...
    async def begin_update(self, offer: Offer) -> None: ...
    async def verify(self, seal: Seal, timeout_s: float) -> None: ...
    async def commit(self, update: str) -> None: ...
    async def drop(self, update: str) -> None: ...
    async def pause(self, lease_s: float) -> None: ...
    async def resume(self) -> None: ...


class EngineCalls:
    """Engines by name.

    Args:
        timeout_s: what an engine has for a call, in seconds.
    """

    def __init__(self, engines: Mapping[str, UpdatedEngine], timeout_s: float) -> None:
        self._engines = dict(engines)
        self._timeout_s = timeout_s

    async def each(
        self,
        names: Iterable[str],
        what: str,
        call: Callable[[UpdatedEngine], Awaitable[T]],
        timeout_s: float | None = None,
    ) -> dict[str, T]:
        """Call engines side by side, and wait for all.

        Args:
            timeout_s: in place of the usual time.

        Raises:
            EngineTimeoutError: all that failed did not answer in time.
            EngineError: some failed; the message names them, and those that did not.
        """
        names = list(names)
        limit = self._timeout_s if timeout_s is None else timeout_s
        done = await asyncio.gather(
            *(within(limit, call(self._engines[name]), what) for name in names), return_exceptions=True
        )
        results: dict[str, T] = {}
        failures: dict[str, Exception] = {}
        for name, result in zip(names, done, strict=True):
            if isinstance(result, Exception):
                failures[name] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                results[name] = result
        if not failures:
            return results
        kind = (
            EngineTimeoutError if all(isinstance(error, TimeoutError) for error in failures.values()) else EngineError
        )
        told = "; ".join(f"engine {name!r}: {type(error).__name__}: {error}" for name, error in failures.items())
        raise kind(f"{what} failed: {told}" + (f" (done by {', '.join(results)})" if results else ""))


async def within(seconds: float, call: Awaitable[T], what: str) -> T:
    """Await a call for so long at most. Then it is cancelled and left alone, should it not heed that.

    Raises:
        EngineTimeoutError: it took longer.
    """
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
        raise EngineTimeoutError(f"no answer to {what} within {seconds:g} s")
    return task.result()
