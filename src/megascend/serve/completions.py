"""Which requests of a sampler have ended, so that a client can ask for all of them at once."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field

CLONE = 1_000_000_000
"""Clients that share a sampler count their requests from a multiple of this on."""
_REQUEST = re.compile(r"(s-[0-9a-f]{32}:sample:[0-9]+):request:([0-9]+)")


@dataclass
class _Log:
    """Requests of one client of a sampler that have ended, in their order: by name, their place and whether they succeeded."""

    ended: dict[str, tuple[int, bool]] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0


class Completions:
    """Requests to sample that have ended, for each client of each sampler. What a request is called says whose it is."""

    def __init__(self) -> None:
        self._count = 0
        self._logs: dict[tuple[str, int], _Log] = {}

    def add(self, request: str, *, succeeded: bool) -> None:
        """A request has ended; those that are not a sampler's are passed over."""
        match = _REQUEST.fullmatch(request)
        if match is None:
            return
        self._count += 1
        log = self._logs.setdefault((match[1], int(match[2]) // CLONE), _Log())
        log.ended[request] = (self._count, succeeded)
        log.changed.set()

    async def since(self, sampler: str, clone: int, seen: int, timeout_s: float) -> tuple[dict[str, bool], int]:
        """Requests that have ended, and whether they succeeded; waits for one if there is none.

        Args:
            seen: what the last call gave beside them; those up to there are forgotten. 0: none.
        """
        log = self._logs.setdefault((sampler, clone), _Log())
        log.waiting += 1
        try:
            for name in [name for name, (place, _) in log.ended.items() if place <= seen]:
                del log.ended[name]
            if not log.ended and timeout_s > 0:
                log.changed.clear()
                await asyncio.wait_for(log.changed.wait(), timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            return {}, seen
        finally:
            log.waiting -= 1
            self._tidy(sampler, clone, log)
        last = max((place for place, _ in log.ended.values()), default=seen)
        return {name: succeeded for name, (_, succeeded) in log.ended.items()}, last

    def drop(self, request: str) -> None:
        """A request's answer is forgotten."""
        match = _REQUEST.fullmatch(request)
        key = (match[1], int(match[2]) // CLONE) if match is not None else ("", 0)
        if key in self._logs:
            self._logs[key].ended.pop(request, None)
            self._tidy(*key, self._logs[key])

    def _tidy(self, sampler: str, clone: int, log: _Log) -> None:
        if not log.ended and not log.waiting:
            self._logs.pop((sampler, clone), None)
