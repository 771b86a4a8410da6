"""Commands on their way from the HTTP server's thread to the ranks, gathered so that several models share a batch."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable

from megascend.serve.scheduler.commands import Command, Remove

KEEP_ALIVE_S = 1.0
"""Ranks without work meet this often, so that one that is gone is noticed."""
SOON = 4
"""A model that lately took no more than so many windows from an answer to its next request is worth a window's wait."""


class Inbox:
    """A thread-safe line of commands.

    Args:
        window_s: how long the first command waits for those of other models, where nothing else is to be done; and how long a
            batch waits for models that were answered just now, and usually come again at once. Without that, tenants fall into
            two groups, each of which sends while the batch of the other one runs.
        max_tokens: once so many tokens are there, nothing waits.
        stopped: asked now and then; once it says True, the inbox is closed.
    """

    def __init__(self, window_s: float, max_tokens: int, stopped: Callable[[], bool] = lambda: False) -> None:
        self._window_s, self._max_tokens, self._stopped = window_s, max_tokens, stopped
        self._commands: list[Command] = []
        self._changed = threading.Condition()
        self._closed = False
        self._models = 0
        self._answered: dict[str, float] = {}  # when models were answered that have sent nothing since
        self._pauses: dict[str, float] = {}  # of models, from their last answer to what came after it
        self._missed: set[str] = set()  # were waited for in vain

    def put(self, *commands: Command) -> None:
        """Add commands; several are taken together."""
        with self._changed:
            self._commands.extend(commands)
            for command in commands:
                self._note(command)
            self._changed.notify()

    def set_models(self, count: int) -> None:
        """Set how many models there are: once each has a command here, there is nobody to wait for."""
        with self._changed:
            self._models = count
            self._changed.notify()

    def close(self) -> None:
        """Let :meth:`take` return None from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def answered(self, models: Iterable[str]) -> None:
        """Note that all requests of these models have their answers."""
        with self._changed:
            gone = {command.adapter for command in self._commands if isinstance(command, Remove)}
            self._answered |= dict.fromkeys([model for model in models if model not in gone], time.monotonic())

    def take(self, *, wait: bool, ready: int = 0) -> list[Command] | None:
        """Take all commands that are there; perhaps none. None once the inbox is closed.

        Args:
            wait: wait up to a second for the first one, and then as long as the window is for others.
            ready: tokens of the next batch, without what is here. If there are any, models that were answered just now are
                waited for, as long as the window is.
        """
        with self._changed:
            if wait and self._changed.wait_for(lambda: self._commands or self._closed, KEEP_ALIVE_S):
                end = time.monotonic() + self._window_s
                self._changed.wait_for(self._complete, max(0.0, end - time.monotonic()))
            elif 0 < ready < self._max_tokens:
                self._wait_for_expected(ready)
            if self._closed or self._stopped():
                return None
            commands, self._commands = self._commands, []
            return commands

    def _wait_for_expected(self, ready: int) -> None:
        now = time.monotonic()
        expected = {
            model: since + self._window_s
            for model, since in self._answered.items()
            if since + self._window_s > now and self._pauses.get(model, math.inf) <= SOON * self._window_s
        }

        def there() -> bool:
            enough = ready + self._tokens() >= self._max_tokens
            return self._closed or enough or self._answered.keys().isdisjoint(expected)

        if expected and not self._changed.wait_for(there, max(expected.values()) - now):
            self._missed |= self._answered.keys() & expected

    def _note(self, command: Command) -> None:
        """Note how long a model has taken to come again."""
        model, since = command.adapter, self._answered.pop(command.adapter, None)
        if isinstance(command, Remove):
            self._pauses.pop(model, None)
            self._missed.discard(model)
        elif since is not None:
            missed = model in self._missed  # is not waited for the next time
            self._missed.discard(model)
            self._pauses[model] = math.inf if missed else time.monotonic() - since

    def _tokens(self) -> int:
        return sum(command.tokens for command in self._commands)

    def _complete(self) -> bool:
        enough = self._tokens() >= self._max_tokens
        return self._closed or enough or len({command.adapter for command in self._commands}) >= self._models
