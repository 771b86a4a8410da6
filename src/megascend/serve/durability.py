"""What the service tells of all that a restart should find. Without ``--durable`` nothing comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megascend.serve.commands import Outcome
    from megascend.serve.futures import Future
    from megascend.serve.tenancy import Model, Session
    from megascend.serve.wire import TrainRequest


class Durability:
    """Keeps nothing: sessions, models and their steps end with the server.

    Called on the event loop, in the order in which things happen.

    Attributes:
        repeating: requests that were taken before are being put in line again.
    """

    repeating = False

    @property
    def recovered(self) -> bool:
        """Whether all that was repeated after a restart has ended."""
        return True

    @property
    def stalled(self) -> bool:
        """Whether nothing can be kept now, as the disk is full, for example."""
        return False

    def check_number(self, number: int | None) -> None:
        """Raise if a request without a number cannot be kept."""

    def session(self, session: Session) -> None:
        """A session was opened."""

    def ended(self, session: Session) -> None:
        """A session has ended."""

    def sampler(self, session: Session, name: str, path: str | None) -> None:
        """A session has a sampler."""

    def asked(self, future: Future, path: str, body: bytes | Mapping[str, Any], number: int | None = None) -> None:
        """A future was made for a request, or found, if it came before.

        Args:
            path: of the request under /api/v1.
            body: that the same request can be made from; a mapping is kept as JSON.
        """

    def resolved(self, future: Future, request: TrainRequest) -> None:
        """As :meth:`asked`, of a request with what the server remembered put in."""

    def turn(self, model: Model, future: Future, number: int | None) -> None:
        """A request's command was given to the ranks, if it has one."""

    def unloaded(self, model: Model) -> None:
        """A model is gone."""

    def hold(self, future: Future, outcome: Outcome) -> bool:
        """Whether a future must not end yet with what came of it; it is ended later."""
        return False

    def over(self, future: Future) -> None:
        """A future has ended."""

    async def writable(self) -> None:
        """Raise 503 if nothing can be kept now."""

    async def durable(self) -> None:
        """Return when all that was told is on the disk; raise 503 if it is not yet."""

    def close(self) -> None:
        """The server ends."""
