"""Queue of commands from the HTTP server's thread to the ranks, collected so that several models share a batch."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable

from megascend.apps.serve.scheduler.commands import Command, Remove

KEEP_ALIVE_S = 1.0
"""Idle ranks synchronize this often, so that a lost rank is noticed."""
SOON = 4
"""A model whose last pause between answer and next request was at most this many windows is worth waiting for."""


class Inbox:
    """A thread-safe queue of commands.

    Args:
        window_s: time that the first command waits for those of other models while the ranks are idle, and that a batch waits
            for models that were just answered and usually send their next request at once. Without the latter, tenants split
            into two groups, each of which sends while the batch of the other runs, and batches stay half full.
        max_tokens: number of tokens from which on nothing waits.
        stopped: polled by :meth:`take`; True closes the inbox.
    """

    def __init__(self, window_s: float, max_tokens: int, stopped: Callable[[], bool] = lambda: False) -> None:
        self._window_s, self._max_tokens, self._stopped = window_s, max_tokens, stopped
        self._commands: list[Command] = []
        self._changed = threading.Condition()
        self._closed = False
        self._models = 0
        # A model that pauses for long is not waited for: it would delay every batch by a window, for nothing.
        self._answer_times: dict[str, float] = {}  # time of the last answer, of models that have sent nothing since
        self._pauses: dict[str, float] = {}  # seconds between a model's last answer and its next request
        self._missed: set[str] = set()  # models that did not arrive within a window spent on them

    def submit(self, *commands: Command) -> None:
        """Add commands; several in one call are taken together."""
        with self._changed:
            self._commands.extend(commands)
            for command in commands:
                self._note(command)
            self._changed.notify()

    def set_models(self, count: int) -> None:
        """Set the number of models: once each has a command here, there is nothing to wait for."""
        with self._changed:
            self._models = count
            self._changed.notify()

    def close(self) -> None:
        """Let :meth:`take` return None from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def mark_answered(self, models: Iterable[str]) -> None:
        """Record that all requests of these models have been answered."""
        with self._changed:
            # A removed model sends nothing more, and the removal may be queued already.
            removed = {command.adapter for command in self._commands if isinstance(command, Remove)}
            self._answer_times |= dict.fromkeys([model for model in models if model not in removed], time.monotonic())

    def take(self, *, wait: bool, ready: int = 0) -> list[Command] | None:
        """Take all queued commands, possibly none; None once the inbox is closed.

        Args:
            wait: wait up to a second for a first command, then for a window for others.
            ready: tokens already in the next batch; if there are any, wait up to a window for models that were just answered.
        """
        with self._changed:
            # The lock is released while it waits, so the event loop never blocks in submit().
            if wait and self._changed.wait_for(lambda: self._commands or self._closed, KEEP_ALIVE_S):
                self._changed.wait_for(self._complete, self._window_s)
            elif 0 < ready < self._max_tokens:
                self._wait_for_expected(ready)
            # Polled on every turn: `stopped` reads a signal handler's flag, and a handler cannot take this lock to notify.
            if self._closed or self._stopped():
                return None
            commands, self._commands = self._commands, []
            return commands

    def _wait_for_expected(self, ready: int) -> None:
        now = time.monotonic()
        expected = {
            model: since + self._window_s
            for model, since in self._answer_times.items()
            if since + self._window_s > now and self._pauses.get(model, math.inf) <= SOON * self._window_s
        }

        def is_over() -> bool:
            full = ready + self._tokens() >= self._max_tokens
            return self._closed or full or self._answer_times.keys().isdisjoint(expected)

        if expected and not self._changed.wait_for(is_over, max(expected.values()) - now):
            self._missed |= self._answer_times.keys() & expected

    def _note(self, command: Command) -> None:
        """Record a model's pause between its last answer and this command."""
        model, since = command.adapter, self._answer_times.pop(command.adapter, None)
        if isinstance(command, Remove):
            self._pauses.pop(model, None)
            self._missed.discard(model)
        elif since is not None:
            missed = model in self._missed  # then it is not waited for the next time
            self._missed.discard(model)
            self._pauses[model] = math.inf if missed else time.monotonic() - since

    def _tokens(self) -> int:
        return sum(command.tokens for command in self._commands)

    def _complete(self) -> bool:
        full = self._tokens() >= self._max_tokens
        return self._closed or full or len({command.adapter for command in self._commands}) >= self._models
