"""Memory that was freed, given back to the system.

glibc keeps what was freed below anything that is still in use. A server that makes and forgets tensors of many sizes, and keeps
small answers for minutes, would come to hold a multiple of what it needs.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

EVERY_S = 30.0
"""How often it is given back."""


@cache
def _trim() -> Callable[[int], int] | None:
    """glibc's ``malloc_trim``; None where the C library is another one."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def return_freed() -> None:
    """Give whole pages of freed memory back, in all arenas. Takes milliseconds, in which Python's other threads run."""
    trim = _trim()
    if trim is not None:
        trim(0)
