"""Who owns which engine, and until when: pure, times are passed in. And the clock of leases and deadlines."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megascend.errors import ControllerError, EngineOwnedError, LeaseLapsedError
from weightwire.lease import Lease

REMEMBERED = 256
"""Claims that have ended of which :meth:`Ownership.get` can still say why."""


class Timer(Protocol):
    """What :meth:`Clock.call_at` returns."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Seconds that only go forward, and calls at a time of theirs."""

    def now(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer: ...


class LoopClock:
    """The clock of the event loop that runs."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_at(when, callback)


@dataclass(kw_only=True)
class Claim(Lease):
    """Engines that belong to one owner until the lease lapses.

    Attributes:
        id: what the owner shows to act on them; a secret between the owner and the controller.
        running: calls of the owner that run now; the claim does not lapse meanwhile.
        ending: released or lapsed; the engines are being continued and are free after that.
    """

    id: str
    engines: tuple[str, ...]
    since: float
    running: int = 0
    ending: bool = False


class Ownership:
    """At most one claim on each engine.

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
        """Give engines (None: all) to an owner: all of them or none.

        Raises:
            EngineOwnedError: one of them belongs to somebody; the message names whom, since when and how long still.
            ControllerError: no such engine, or a lease that is too long.
        """
        names = self._engines if engines is None else tuple(dict.fromkeys(engines))
        if unknown := [name for name in names if name not in self._engines]:
            raise ControllerError(
                f"no engine {', '.join(map(repr, unknown))}; there are {', '.join(self._engines) or 'none'}"
            )
        if not names:
            raise ControllerError("a claim on no engine")
        self.check_lease(lease_s)
        for name in names:
            if (other := self.owner_of(name)) is not None:
                held = "is being released by" if other.ending else "belongs to"
                raise EngineOwnedError(
                    f"engine {name!r} {held} {other.owner!r}, since {now - other.since:.1f} s ago, for another "
                    f"{other.left_s(now):.1f} s unless renewed; {owner!r} cannot have it before"
                )
        claim = Claim(
            id=secrets.token_hex(16), owner=owner, engines=names, since=now, until=now + lease_s, lease_s=lease_s
        )
        self._claims[claim.id] = claim
        return claim

    def get(self, claim_id: str) -> Claim:
        """A claim in force.

        Raises:
            LeaseLapsedError: it has ended.
            ControllerError: there never was one, or it has been forgotten.
        """
        claim = self._claims.get(claim_id)
        if claim is not None and not claim.ending:
            return claim
        for ended, why in self._ended:
            if ended == claim_id:
                raise LeaseLapsedError(f"{why}; claim the engines again")
        raise ControllerError("no such claim")

    def renew(self, claim: Claim, lease_s: float, now: float) -> None:
        """Have a claim last at least ``lease_s`` from now; it never becomes shorter."""
        self.check_lease(lease_s)
        claim.renew(now, lease_s)

    def begin_end(self, claim: Claim, why: str) -> None:
        """A claim is in force no longer; its engines are not free yet."""
        claim.ending = True
        self._ended.append((claim.id, why))

    def end(self, claim: Claim) -> None:
        """A claim's engines are free."""
        self._claims.pop(claim.id, None)

    def owner_of(self, engine: str) -> Claim | None:
        """The claim on an engine, one that is ending included."""
        return next((claim for claim in self._claims.values() if engine in claim.engines), None)

    def claims(self) -> list[Claim]:
        """All claims, those that are ending included."""
        return list(self._claims.values())

    def lapsed(self, now: float) -> list[Claim]:
        """Claims whose lease is over."""
        return [claim for claim in self._claims.values() if claim.until <= now and not (claim.ending or claim.running)]

    def next_lapse(self) -> float | None:
        """When the next lease is over."""
        ends = [claim.until for claim in self._claims.values() if not (claim.ending or claim.running)]
        return min(ends, default=None)

    def check_lease(self, lease_s: float) -> None:
        """Raises ControllerError unless a lease may be that long."""
        if not 0 < lease_s <= self._max_lease_s:
            raise ControllerError(f"a lease of {lease_s:g} s; it must be above 0 and at most {self._max_lease_s:g} s")
