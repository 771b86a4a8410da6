"""Claims of owners on engines, with leases. Pure: times are arguments. Also the clock of leases and deadlines."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megascend.errors import ControllerError, EngineOwnedError, LeaseLapsedError
from weightwire.engine import Lease

REMEMBERED = 256
"""Number of ended claims for which :meth:`Ownership.get` can report the reason."""


class Timer(Protocol):
    """Handle of a call scheduled by :meth:`Clock.call_at`."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Monotonic clock in seconds, with scheduled calls."""

    def now(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer: ...


class LoopClock:
    """The clock of the running event loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_at(when, callback)


@dataclass(kw_only=True)
class Claim(Lease):
    """Engines that belong to one owner until the lease lapses.

    Attributes:
        id: secret by which the owner identifies itself to the controller.
        running: number of the owner's running calls; the claim does not lapse meanwhile.
        ending: released or lapsed; the engines are being resumed and are free after that.
    """

    id: str
    engines: tuple[str, ...]
    since: float
    running: int = 0
    ending: bool = False


class Ownership:
    """Claims on engines, at most one for each engine.

    Args:
        max_lease_s: the longest lease, in seconds.
    """

    def __init__(self, engines: Sequence[str], max_lease_s: float) -> None:
        if len(set(engines)) != len(engines):
            raise ControllerError(f"two engines of one name: {', '.join(sorted(engines))}")
        self._engines = tuple(engines)
        self._max_lease_s = max_lease_s
        self._claims: dict[str, Claim] = {}
        self._ended: deque[tuple[str, str]] = deque(maxlen=REMEMBERED)

    def claim(self, owner: str, engines: Sequence[str] | None, lease_s: float, now: float) -> Claim:
        """Claim engines (None: all) for an owner: all of them or none."""
        names = self._engines if engines is None else tuple(dict.fromkeys(engines))
        if unknown := [name for name in names if name not in self._engines]:
            raise ControllerError(
                f"unknown engine {', '.join(map(repr, unknown))}; known: {', '.join(self._engines) or 'none'}"
            )
        if not names:
            raise ControllerError("a claim on no engine")
        self.check_lease(lease_s)
        # All or none: two owners with a part each would wait for each other.
        for name in names:
            if (other := self.owner_of(name)) is not None:
                state = "is being released by" if other.ending else "belongs to"
                raise EngineOwnedError(
                    f"engine {name!r} {state} {other.owner!r}, since {now - other.since:.1f} s ago, for another "
                    f"{other.left_s(now):.1f} s unless renewed; {owner!r} cannot have it before"
                )
        claim = Claim(
            id=secrets.token_hex(16), owner=owner, engines=names, since=now, until=now + lease_s, lease_s=lease_s
        )
        self._claims[claim.id] = claim
        return claim

    def get(self, claim_id: str) -> Claim:
        """Return an active claim."""
        claim = self._claims.get(claim_id)
        if claim is not None and not claim.ending:
            return claim
        # A trainer whose lease has lapsed is told so, and by which cause; an id that never existed only that it is unknown.
        for ended, reason in self._ended:
            if ended == claim_id:
                raise LeaseLapsedError(f"{reason}; claim the engines again")
        raise ControllerError("no such claim")

    def renew(self, claim: Claim, lease_s: float, now: float) -> None:
        """Extend a claim to at least ``lease_s`` from now; it never becomes shorter."""
        self.check_lease(lease_s)
        claim.renew(now, lease_s)

    def begin_end(self, claim: Claim, reason: str) -> None:
        """Deactivate a claim; its engines are not free yet."""
        # Two steps: calls are refused from now on, while the engines are still being resumed.
        claim.ending = True
        self._ended.append((claim.id, reason))

    def end(self, claim: Claim) -> None:
        """Free the engines of a claim."""
        self._claims.pop(claim.id, None)

    def owner_of(self, engine: str) -> Claim | None:
        """Return the claim on an engine, even if it is ending; None if the engine is free."""
        return next((claim for claim in self._claims.values() if engine in claim.engines), None)

    def claims(self) -> list[Claim]:
        """Return all claims, including those that are ending."""
        return list(self._claims.values())

    def lapsed(self, now: float) -> list[Claim]:
        """Return the claims whose lease has ended."""
        # A running call keeps its claim; it renews the lease at its end.
        return [claim for claim in self._claims.values() if claim.until <= now and not (claim.ending or claim.running)]

    def next_lapse(self) -> float | None:
        """Return the end of the next lease; None without claims."""
        ends = [claim.until for claim in self._claims.values() if not (claim.ending or claim.running)]
        return min(ends, default=None)

    def check_lease(self, lease_s: float) -> None:
        """Raise ControllerError unless the length of a lease is permitted."""
        if not 0 < lease_s <= self._max_lease_s:
            raise ControllerError(f"a lease of {lease_s:g} s; it must be above 0 and at most {self._max_lease_s:g} s")
