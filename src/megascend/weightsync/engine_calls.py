"""Calls of engines, which are asynchronous, from a trainer, which is not: all engines at once, each with a deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from weightwire.offer import Offer, Seal
from weightwire.transports.choice import Location

T = TypeVar("T")

Run = Callable[[Coroutine[Any, Any, T]], T]
"""Runs a coroutine to its end, from a thread that runs no event loop."""


class UpdatableEngine(Protocol):
    """What an update needs of an engine: part of :class:`megascend.rollout.engines.base.InferenceEngine`, described there."""

    name: str

    async def receivers(self) -> int: ...

    async def begin_update(self, offer: Offer) -> None: ...

    async def verify(self, seal: Seal, timeout_s: float) -> None: ...

    async def commit(self, update: str) -> None: ...

    async def drop(self, update: str) -> None: ...


@runtime_checkable
class LocatedEngine(Protocol):
    """An engine that tells where its members keep received weights. One that does not is taken to keep them on the CPU."""

    async def locations(self) -> list[Location]: ...


async def locations(engine: UpdatableEngine) -> list[Location | None]:
    """Return where each member of an engine keeps received weights; None where the engine does not tell."""
    if isinstance(engine, LocatedEngine):
        return list(await engine.locations())
    return [None] * await engine.receivers()


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="megascend-weightsync", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns or raises."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """End the loop and its thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def at_once(
    engines: Sequence[UpdatableEngine], call: Callable[[UpdatableEngine], Awaitable[T]], timeout_s: float
) -> tuple[dict[str, T], dict[str, str]]:
    """``call(engine)`` for all engines at the same time.

    Returns:
        What it returned by engine, and what went wrong by engine; every engine is in one of the two.
    """

    async def one(engine: UpdatableEngine) -> T:
        return await asyncio.wait_for(call(engine), timeout_s)

    found: list[Any] = await asyncio.gather(*map(one, engines), return_exceptions=True)
    done: dict[str, T] = {}
    failed: dict[str, str] = {}
    for engine, result in zip(engines, found, strict=True):
        if isinstance(result, asyncio.TimeoutError):
            failed[engine.name] = f"it did not answer within {timeout_s:g} s" + (f": {result}" if str(result) else "")
        elif isinstance(result, Exception):
            failed[engine.name] = f"{type(result).__name__}: {result}"
        elif isinstance(result, BaseException):
            raise result
        else:
            done[engine.name] = result
    return done, failed
