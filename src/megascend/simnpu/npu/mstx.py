"""Profiler marks (``torch_npu.npu.mstx``). Nothing profiles the simulated device; numbers and nesting are kept."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

_numbers = itertools.count(1)


class mstx:
    """Marks and ranges, accepted and dropped."""

    @staticmethod
    def mark(message: str, stream: object = None, domain: str = "default") -> None:
        """A point in time."""

    @staticmethod
    def range_start(message: str, stream: object = None, domain: str = "default") -> int:
        """Begin a range; the number returned ends it."""
        return next(_numbers)

    @staticmethod
    def range_end(range_id: int, domain: str = "default") -> None:
        """End the range with this number."""

    @staticmethod
    def mstx_range(message: str, stream: object = None, domain: str = "default") -> Callable[[Callable], Callable]:
        """A decorator that puts every call of a function in a range."""

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
