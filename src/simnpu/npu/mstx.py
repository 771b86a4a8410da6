"""Profiler marks (``torch_npu.npu.mstx``). Nothing profiles the simulated device; numbers and nesting are kept."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

_numbers = itertools.count(1)
_pushed: dict[str, list[str]] = {}  # by domain


class mstx:
    """Marks and ranges, accepted and dropped."""

    @staticmethod
    def mark(message: str, stream: object = None, domain: str = "default") -> None:
        """Mark a point in time."""

    @staticmethod
    def range_start(message: str, stream: object = None, domain: str = "default") -> int:
        """Begin a range; the number returned ends it."""
        return next(_numbers)

    @staticmethod
    def range_end(range_id: int, domain: str = "default") -> None:
        """End the range with this number."""

    @staticmethod
    def range_push(message: str, stream: object = None, domain: str = "default") -> int:
        """Begin a range inside the one that was begun last; returns how deep it is, from 0."""
        depth = len(_pushed.setdefault(domain, []))
        _pushed[domain].append(message)
        return depth

    @staticmethod
    def range_pop(domain: str = "default") -> int:
        """End the range that was pushed last; returns how deep it was, or -1 if there is none."""
        if not _pushed.get(domain):
            return -1
        _pushed[domain].pop()
        return len(_pushed[domain])

    @staticmethod
    def mstx_range(message: str, stream: object = None, domain: str = "default") -> Callable[[Callable], Callable]:
        """Decorate a function so that each call is a range."""

        def decorate(function: Callable) -> Callable:
            @functools.wraps(function)
            def in_range(*args: Any, **kwargs: Any) -> Any:
                number = mstx.range_start(message, stream, domain)
                try:
                    return function(*args, **kwargs)
                finally:
                    mstx.range_end(number, domain)

            return in_range

        return decorate


class annotate:
    """A range as a context manager or a decorator."""

    def __init__(self, message: str = "", stream: object = None, domain: str = "default") -> None:
        self.message, self.stream, self.domain = message, stream, domain
        self.number = 0

    def __enter__(self) -> annotate:
        self.number = mstx.range_start(self.message, self.stream, self.domain)
        return self

    def __exit__(self, *error: object) -> None:
        mstx.range_end(self.number, self.domain)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return mstx.mstx_range(self.message or function.__name__, self.stream, self.domain)(function)


mstx.annotate = annotate  # type: ignore[attr-defined]
