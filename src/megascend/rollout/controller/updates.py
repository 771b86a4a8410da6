"""Updates of several engines: no engine commits before all have verified, and what is not committed can be dropped."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from itertools import accumulate

from megascend.errors import ControllerError, EngineError, MessageError
from megascend.rollout.controller.engine_calls import EngineCalls, UpdatedEngine
from megascend.rollout.controller.ownership import Claim
from weightwire.offer import Offer, Seal

log = logging.getLogger(__name__)


@dataclass
class _Update:
    """An update of one claim.

    Attributes:
        engines: those that may be receiving it, or have it.
    """

    name: str
    engines: set[str]
    verified: bool = False


class Updates:
    """At most one for each claim."""

    def __init__(self, calls: EngineCalls) -> None:
        self._calls = calls
        self._updates: dict[str, _Update] = {}  # by claim
        self._members: dict[str, dict[str, int]] = {}  # claim -> engine -> members of a group

    async def init_group(self, claim: Claim) -> dict[str, int]:
        """Engine -> how many members of a group it is, in the claim's order."""
        members = await self._calls.each(claim.engines, "receivers", lambda engine: engine.receivers())
        self._members[claim.id] = members
        return members

    async def begin(self, claim: Claim, offer: Offer) -> None:
        """Offer each engine its places in the group.

        Raises:
            ControllerError: another update is open.
            MessageError: the offer is to another number of members.
        """
        if (there := self._updates.get(claim.id)) is not None:
            raise ControllerError(f"update {there.name!r} of {claim.owner!r} is open: commit or drop it first")
        members = self._members.get(claim.id) or await self.init_group(claim)
        if (offer.first, offer.workers) != (1, sum(members.values())):
            raise MessageError(
                f"the offer is to {offer.workers} members from number {offer.first} on; the engines {', '.join(members)} are "
                f"{sum(members.values())}, from 1 on"
            )
        firsts = dict(zip(members, accumulate(members.values(), initial=1), strict=False))

        async def one(engine: UpdatedEngine) -> None:
            await engine.begin_update(replace(offer, first=firsts[engine.name], workers=members[engine.name]))

        self._updates[claim.id] = _Update(offer.update, set(claim.engines))
        await self._calls.each(claim.engines, "begin_update", one)

    async def verify(self, claim: Claim, seal: Seal, timeout_s: float) -> None:
        """Have all engines hold what they have against the seal."""
        update = self._open(claim, seal.update)
        await self._calls.each(claim.engines, "verify", lambda engine: engine.verify(seal, timeout_s), timeout_s)
        update.verified = True

    async def commit(self, claim: Claim, name: str) -> None:
        """Put in force what all have verified.

        Raises:
            ControllerError: they have not, or there is no such update.
        """
        update = self._open(claim, name)
        if not update.verified:
            raise ControllerError(f"update {name!r} of {claim.owner!r} has not been verified on all engines")

        async def one(engine: UpdatedEngine) -> None:
            await engine.commit(name)
            update.engines.discard(engine.name)

        await self._calls.each(claim.engines, "commit", one)
        self._updates.pop(claim.id, None)

    async def drop(self, claim: Claim, name: str) -> None:
        """Give one up."""
        await self._calls.each(claim.engines, "drop", lambda engine: engine.drop(name))
        if (update := self._updates.get(claim.id)) is not None and update.name == name:
            del self._updates[claim.id]

    async def undo(self, claim: Claim) -> None:
        """Give up whatever is open; never raises."""
        if (update := self._updates.pop(claim.id, None)) is not None:
            try:
                await self._calls.each(sorted(update.engines), "drop", lambda engine: engine.drop(update.name))
            except EngineError as error:
                log.error("update %r of %r could not be dropped everywhere: %s", update.name, claim.owner, error)

    def forget(self, claim: Claim) -> None:
        """The claim has ended."""
        self._members.pop(claim.id, None)

    def _open(self, claim: Claim, name: str) -> _Update:
        update = self._updates.get(claim.id)
        if update is None or update.name != name:
            there = "none is open" if update is None else f"{update.name!r} is open"
            raise ControllerError(f"{claim.owner!r} has no update {name!r}: {there}")
        return update
