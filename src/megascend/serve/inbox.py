"""Commands on their way from the HTTP server's thread to the ranks, gathered so that several models share a batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from megascend.serve.commands import Command

KEEP_ALIVE_S = 1.0
"""Ranks without work meet this often, so that one that is gone is noticed."""


class Inbox:
    """A thread-safe line of commands.

    Args:
        window_s: how long the first command waits for those of other models, where nothing else is to be done.
        max_tokens: once so many tokens are there, nothing waits.
        stopped: asked now and then; once it says True, the inbox is closed.
    """

    def __init__(self, window_s: float, max_tokens: int, stopped: Callable[[], bool] = lambda: False) -> None:
        self._window_s, self._max_tokens, self._stopped = window_s, max_tokens, stopped
        self._commands: list[Command] = []
        self._changed = threading.Condition()
        self._closed = False
        self._models = 0

    def put(self, command: Command) -> None:
        """Add a command."""
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def set_models(self, count: int) -> None:
        """How many models there are: once each has a command here, there is nobody to wait for."""
        with self._changed:
            self._models = count
            self._changed.notify()

    def close(self) -> None:
        """No command will follow; :meth:`take` then gives None."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, *, wait: bool) -> list[Command] | None:
        """All commands that are there; perhaps none. None once the inbox is closed.

        Args:
            wait: wait up to a second for the first one, and then as long as the window is for others.
        """
        with self._changed:
            if wait and self._changed.wait_for(lambda: self._commands or self._closed, KEEP_ALIVE_S):
                end = time.monotonic() + self._window_s
                self._changed.wait_for(self._complete, max(0.0, end - time.monotonic()))
            if self._closed or self._stopped():
                return None
            commands, self._commands = self._commands, []
            return commands

    def _complete(self) -> bool:
        enough = sum(command.tokens for command in self._commands) >= self._max_tokens
        return self._closed or enough or len({command.adapter for command in self._commands}) >= self._models
