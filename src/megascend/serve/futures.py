"""Promises to clients: made when a request is taken, kept or broken when it has run, forgotten some time later.

Used from the HTTP server's event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megascend.serve.completions import Completions
from megascend.serve.errors import Failure

RETRIEVED_S = 120.0
"""An answer that was fetched is kept so long, for a client that lost it on the way."""


@dataclass(eq=False)
class Future:
    """What a request will give.

    Attributes:
        name: what clients ask for it by.
        model: that the request is for; None for others.
        kind: of the request, for logs and figures.
        tokens: that it reads.
        parts: responses, of a request to sample.
        answer_of: makes the answer from what the ranks return.
        then: called with True when it has succeeded, False when it has failed.
        answer: for the client, once it is there.
        number_in_line: of its model's request, if it has one.
        noted: the database has its request.
        internal: no client knows its name: it is forgotten when it has ended.
        size: bytes that its answer is taken to have.
    """

    number: int
    name: str
    tenant: str
    model: str | None
    kind: str
    made: float
    tokens: int = 0
    parts: int = 1
    answer_of: Callable[[Any], Any] = field(default=lambda value: {})
    then: Callable[[bool], None] = field(default=lambda succeeded: None)
    answer: Any = None
    failure: Failure | None = None
    ended: float | None = None
    retrieved: float | None = None
    number_in_line: int | None = None
    noted: bool = False
    internal: bool = False
    size: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


MOST_KEPT = 16384
"""Answers of one tenant that are kept; the oldest makes room, fetched or not."""

LEAST_BYTES = 2048
"""Of an answer, with all that is kept beside it."""


class Futures:
    """All futures that are not forgotten.

    Args:
        clock: seconds, monotonic.
        keep_s: how long an answer is kept that nobody fetches.
        most_bytes: of one tenant's answers; of those that were fetched, the oldest make room.
    """

    def __init__(self, clock: Callable[[], float], keep_s: float, most_bytes: int = 2**62) -> None:
        self._clock, self._keep_s, self._most_bytes = clock, keep_s, most_bytes
        self._by_name: dict[str, Future] = {}
        self._by_number: dict[int, Future] = {}
        self._ended: deque[Future] = deque()
        self._kept: dict[str, deque[int]] = {}
        self._bytes: dict[str, int] = {}
        self._count = 0
        self.completions = Completions()
        self._tokens: dict[str, int] = {}
        self._pending: dict[str, int] = {}

    def make(self, name: str, tenant: str, model: str | None, kind: str, **values: Any) -> Future:
        """A new future, which is pending."""
        self._count += 1
        future = Future(self._count, name, tenant, model, kind, self._clock(), **values)
        self._by_name[name] = self._by_number[future.number] = future
        self._tokens[tenant] = self._tokens.get(tenant, 0) + future.tokens
        self._pending[model or ""] = self._pending.get(model or "", 0) + 1
        return future

    def get(self, name: str, tenant: str) -> Future | None:
        """A tenant's future; None if it is another's, forgotten, or was never made."""
        found = self._by_name.get(name)
        return found if found is not None and found.tenant == tenant else None

    def numbered(self, number: int) -> Future | None:
        """The future of a command."""
        return self._by_number.get(number)

    def pending(self, model: str) -> int:
        """How many of a model's have not ended."""
        return self._pending.get(model, 0)

    def tokens(self, tenant: str) -> int:
        """Tokens of a tenant's that have not ended."""
        return self._tokens.get(tenant, 0)

    def full(self, tenant: str) -> bool:
        """Whether a tenant's answers that were not fetched take all the room that there is for its answers."""
        if self._over(tenant):
            self._drop_fetched(tenant)
        return self._over(tenant)

    def _over(self, tenant: str) -> bool:
        return self._bytes.get(tenant, 0) > self._most_bytes

    def pending_by_kind(self) -> Mapping[str, int]:
        """How many have not ended, by kind."""
        found: dict[str, int] = {}
        for future in self._by_number.values():
            if future.ended is None:
                found[future.kind] = found.get(future.kind, 0) + 1
        return found

    def ended_of(self, model: str) -> list[Future]:
        """A model's that have ended and are not forgotten, in the order they were made."""
        return [each for each in self._by_number.values() if each.model == model and each.ended is not None]

    def keep_longer(self) -> None:
        """Count the time of all answers from now on, as nobody could fetch them."""
        for future in self._ended:
            future.ended = self._clock()
            future.retrieved = None if future.retrieved is None else self._clock()

    def keep(self, future: Future, value: Any) -> None:
        """End a future with what the ranks returned."""
        try:
            future.answer = future.answer_of(value)
        except Exception as error:  # noqa: BLE001  an answer that cannot be made must not end the server
            self.break_(future, Failure.of(error))
            return
        self._end(future, True)

    def break_(self, future: Future, failure: Failure) -> None:
        """End a future with a failure."""
        future.failure = failure
        self._end(future, False)

    def _end(self, future: Future, succeeded: bool) -> None:
        if future.ended is not None:
            return
        future.ended = self._clock()
        _subtract(self._tokens, future.tenant, future.tokens)
        _subtract(self._pending, future.model or "", 1)
        if future.internal:
            self._drop(future)
        else:
            self._ended.append(future)
            self._make_room(future)
            self.completions.add(future.name, succeeded=succeeded)
        future.then(succeeded)
        future.changed.set()
        future.answer_of, future.then = _answered, _answered  # what they held of the request is not needed any more

    def release(self, name: str, tenant: str) -> None:
        """Forget an answer that its client has, as it says."""
        future = self.get(name, tenant)
        if future is not None and future.ended is not None:
            future.retrieved = future.retrieved or self._clock()

    def _make_room(self, future: Future) -> None:
        """Count an answer that is kept from now on, and drop the tenant's oldest if there are too many."""
        future.size = LEAST_BYTES + getattr(future.answer, "nbytes", 0)
        self._bytes[future.tenant] = self._bytes.get(future.tenant, 0) + future.size
        kept = self._kept.setdefault(future.tenant, deque())
        kept.append(future.number)
        while len(kept) > MOST_KEPT:
            oldest = self._by_number.get(kept.popleft())
            if oldest is not None:
                self._drop(oldest)
        self.full(future.tenant)

    def _drop_fetched(self, tenant: str) -> None:
        """Drop what was fetched of a tenant, the oldest first, until the rest fits."""
        for number in list(self._kept[tenant]):
            if not self._over(tenant):
                return
            found = self._by_number.get(number)
            if found is not None and found.retrieved is not None:
                self._drop(found)

    def forget_fetched(self, model: str) -> None:
        """Drop what was fetched of a model that is gone: its client goes on with others."""
        for future in self.ended_of(model):
            if future.retrieved is not None:
                self._drop(future)

    def forget(self) -> None:
        """Drop answers whose time is over."""
        now, left = self._clock(), deque[Future]()
        for future in self._ended:
            if future.number not in self._by_number:
                continue
            old = future.ended is not None and now - future.ended > self._keep_s
            if old or (future.retrieved is not None and now - future.retrieved > RETRIEVED_S):
                self._drop(future)
            else:
                left.append(future)
        self._ended = left
        for tenant, kept in list(self._kept.items()):
            self._kept[tenant] = deque(number for number in kept if number in self._by_number)
            if not self._kept[tenant]:
                del self._kept[tenant]

    def _drop(self, future: Future) -> None:
        if self._by_number.pop(future.number, None) is None:
            return
        if future.size:
            _subtract(self._bytes, future.tenant, future.size)
        if self._by_name.get(future.name) is future:
            del self._by_name[future.name]
            self.completions.drop(future.name)


def _subtract(counts: dict[str, int], key: str, number: int) -> None:
    counts[key] = counts.get(key, 0) - number
    if counts[key] <= 0:
        del counts[key]


def _answered(value: Any) -> Any:
    raise AssertionError("this future has ended")
