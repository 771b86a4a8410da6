"""The job's ranks, driven from a thread of another project's server on rank 0. Independent of SkyRL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from megascend.apps.serve.scheduler.commands import Command, Outcome
from megascend.apps.serve.scheduler.inbox import Inbox
from megascend.apps.serve.served_model import ServedModel
from megascend.config.serve import ServeConfig
from megascend.errors import MegascendError, ProcessGroupError
from weightwire.background import BackgroundThread


class Ranks:
    """Rank 0's side: builds the model and runs commands in its own thread."""

    def __init__(self, settings: ServeConfig) -> None:
        self._settings = settings
        # No waiting for further requests: SkyRL has already collected a batch.
        self._inbox = Inbox(0.0, settings.batch_tokens)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Outcome]] = {}
        self._count = 0
        self._ended: BaseException | None = None
        ready: Future[ServedModel] = Future()
        # A daemon, because SkyRL never closes its backend: its process has to end without this thread.
        self._thread = BackgroundThread(self._work, ready, name="megascend")
        self._thread.start()
        # The model is built on the thread that runs the commands, which stays its only user.
        self.base = ready.result()

    def run(self, commands: Sequence[Callable[[int], Command]]) -> list[Outcome]:
        """Run commands, batching those of several models, and wait for all outcomes."""
        # Numbers are assigned and submitted under one lock, so that commands reach the inbox in the order of their numbers.
        with self._lock:
            if self._ended is not None:
                raise ProcessGroupError(f"megascend's ranks have ended: {self._ended}")
            numbers = range(self._count, self._count + len(commands))
            self._count += len(commands)
            built = [command(number) for command, number in zip(commands, numbers, strict=True)]
            futures: list[Future[Outcome]] = [Future() for _ in built]
            self._waiting.update(zip(numbers, futures, strict=True))
            self._inbox.submit(*built)
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the work on all ranks."""
        self._inbox.close()
        self._thread.join()

    def _work(self, ready: Future[ServedModel]) -> None:
        from megascend.apps.serve.scheduler.runner import run_commands
        from megascend.apps.serve.server import base_model, make_backend, sampler

        try:
            with make_backend(self._settings) as backend:
                generate = sampler(self._settings, backend).in_slices
                ready.set_result(base_model(self._settings, backend))
                run_commands(backend, self._settings.batch_tokens, self._inbox, self._report, generate)
            self._end(ProcessGroupError("it was closed"))
        except BaseException as error:  # noqa: BLE001  reported to every waiter
            # Failed while building: the constructor is still waiting, and raises this.
            if not ready.done():
                ready.set_exception(error)
            self._end(error)

    def _report(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            with self._lock:
                future = self._waiting.pop(outcome.number)
            future.set_result(outcome)

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._ended = error
            waiting, self._waiting = self._waiting, {}
        cause = error if isinstance(error, MegascendError) else ProcessGroupError(f"the ranks have ended: {error!r}")
        for number, future in waiting.items():
            # A result, not an exception: a request that fails is answered, and run() returns the others' outcomes.
            future.set_result(Outcome(number, error=cause))


def follow(settings: ServeConfig) -> None:
    """Run commands on another rank until rank 0 closes. Collective with :class:`Ranks`."""
    from megascend.apps.serve.scheduler.runner import run_commands
    from megascend.apps.serve.server import make_backend, sampler

    with make_backend(settings) as backend:
        run_commands(backend, settings.batch_tokens, None, lambda outcomes: None, sampler(settings, backend).in_slices)
