"""Calls to a rollout controller, for programs without an event loop. A thread has one, and renews leases meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from megascend.errors import ControllerError, RolloutTaskError
from megascend.rollout.controller.async_client import AsyncClaim, AsyncControllerClient
from weightwire.keys import Key
from weightwire.offer import Offer, Seal

T = TypeVar("T")


class LoopThread:
    """A thread with an event loop. It is a daemon: a program that forgets to close it can end.

    Coroutines that still run when it closes are cancelled.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there."""
        if not self._thread.is_alive():
            work.close()
            raise ControllerError("closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it. Interrupted, it is cancelled."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End what runs, and the thread. Nothing happens the second time."""
        if self._thread.is_alive():
            self.run(_cancel_others())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


class ControllerClient:
    """:class:`AsyncControllerClient`, method for method, each waiting for its answer. For any number of threads.

    with ControllerClient("run/controller.json", load_key(), caller="trainer") as client, client.claim("trainer") as claim:
        claim.update(offer, timeout_s=60)
    """

    def __init__(self, where: str | Path, key: Key, *, caller: str, timeout_s: float = 60.0) -> None:
        self._thread = LoopThread("rollout controller client")

        async def make() -> AsyncControllerClient:
            return AsyncControllerClient(where, key, caller=caller, timeout_s=timeout_s)

        self._client = self._thread.run(make())

    @property
    def instance(self) -> str:
        """Of the controller that answered last; empty before the first answer."""
        return self._client.instance

    def status(self) -> dict[str, Any]:
        """Engines with their owners, counts of rollouts."""
        return self._thread.run(self._client.status())

    @contextlib.contextmanager
    def claim(
        self, owner: str, engines: Sequence[str] | None = None, *, lease_s: float = 60.0, wait_s: float = 0.0
    ) -> Iterator[Claim]:
        """Own engines for a block; see :meth:`AsyncControllerClient.claim`."""
        held = self._client.claim(owner, engines, lease_s=lease_s, wait_s=wait_s)
        claim = self._thread.run(held.__aenter__())  # type: ignore[arg-type]
        try:
            yield Claim(self._thread, claim)
        finally:
            self._thread.run(held.__aexit__(None, None, None))  # type: ignore[arg-type]

    def expect(self, rollouts: Sequence[str], deadline_s: float) -> None:
        """Announce rollouts, by names of their own, before they are asked for."""
        self._thread.run(self._client.expect(rollouts, deadline_s))

    def complete(self, rollout: str, result: Mapping[str, Any]) -> None:
        """Give a rollout its result."""
        self._thread.run(self._client.complete(rollout, result))

    def fail(self, rollout: str, reason: str) -> None:
        """Tell that a rollout has failed."""
        self._thread.run(self._client.fail(rollout, reason))

    def results(
        self, rollouts: Iterable[str], hold_s: float = 60.0
    ) -> Iterator[tuple[str, dict[str, Any] | RolloutTaskError]]:
        """Each announced rollout with its result or error, as they are completed."""
        stream = self._client.results(rollouts, hold_s)
        while (found := self._thread.run(_next(stream))) is not None:
            yield found

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def __enter__(self) -> ControllerClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Claim:
    """:class:`AsyncClaim`, method for method.

    Attributes:
        engines: their names.
    """

    def __init__(self, thread: LoopThread, claim: AsyncClaim) -> None:
        self._thread = thread
        self._claim = claim
        self.engines = claim.engines

    def init_group(self) -> dict[str, int]:
        """Engine -> how many members of an update's group it is; the trainer is member 0, they follow in this order."""
        return self._thread.run(self._claim.init_group())

    def begin_update(self, offer: Offer) -> None:
        """Have all engines receive what is offered, as if to one engine of all members: ``first`` 1, ``workers`` their sum."""
        self._thread.run(self._claim.begin_update(offer))

    def verify(self, seal: Seal, timeout_s: float) -> None:
        """Wait until all engines have all of it."""
        self._thread.run(self._claim.verify(seal, timeout_s))

    def commit(self, update: str) -> None:
        """Put what all engines have verified in force."""
        self._thread.run(self._claim.commit(update))

    def finish_update(self, seal: Seal, timeout_s: float) -> None:
        """Verify on all engines, then commit on all."""
        self._thread.run(self._claim.finish_update(seal, timeout_s))

    def drop(self, update: str) -> None:
        """Give up an update."""
        self._thread.run(self._claim.drop(update))

    def pause(self, lease_s: float) -> None:
        """Stop sampling for at most ``lease_s``; called again, for that long from then on."""
        self._thread.run(self._claim.pause(lease_s))

    def resume(self) -> None:
        """End the pause."""
        self._thread.run(self._claim.resume())

    @contextlib.contextmanager
    def paused(self, lease_s: float) -> Iterator[None]:
        """Pause for a block, which has ``lease_s`` for what it does."""
        self.pause(lease_s)
        try:
            yield
        finally:
            self.resume()


async def _next(stream: AsyncIterator[T]) -> T | None:
    async for found in stream:
        return found
    return None
