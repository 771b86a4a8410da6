"""Promises to clients: made when a request is taken, kept or broken when it has run, forgotten some time later.

Used from the HTTP server's event loop only.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megascend.serve.errors import Failure

RETRIEVED_S = 120.0
"""An answer that was fetched is kept so long, for a client that lost it on the way."""
MOST_KEPT = 16384
"""Answers of one tenant that are kept; the oldest makes room, fetched or not."""
LEAST_BYTES = 2048
"""Of an answer, with all that is kept beside it."""


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


@dataclass
class Account:
    """What counts for one tenant.

    Attributes:
        tokens: of its requests that have not ended.
        answers: that are kept, by their futures' numbers, in the order they ended.
        bytes: of these.
    """

    tokens: int = 0
    answers: dict[int, Future] = field(default_factory=dict)
    bytes: int = 0


class Futures:
    """All futures that are not forgotten.

    Args:
        clock: seconds, monotonic.
        keep_s: how long an answer is kept that nobody fetches.
        most_bytes: of one tenant's answers; of those that were fetched, the oldest make room.
    """

    def __init__(self, clock: Callable[[], float], keep_s: float, most_bytes: int = 2**62) -> None:
        self._clock, self._keep_s, self._most_bytes = clock, keep_s, most_bytes
        self._by_number: dict[int, Future] = {}
        self._by_name: dict[str, Future] = {}
        self._accounts: defaultdict[str, Account] = defaultdict(Account)
        self._pending: Counter[str] = Counter()
        self._count = 0
        self.completions = Completions()

    def make(self, name: str, tenant: str, model: str | None, kind: str, **values: Any) -> Future:
        """Make a new future, which is pending."""
        self._count += 1
        future = Future(self._count, name, tenant, model, kind, self._clock(), **values)
        self._by_name[name] = self._by_number[future.number] = future
        self._accounts[tenant].tokens += future.tokens
        self._pending[model or ""] += 1
        return future

    def get(self, name: str, tenant: str) -> Future | None:
        """Return a tenant's future; None if it is another's, forgotten, or was never made."""
        future = self._by_name.get(name)
        return future if future is not None and future.tenant == tenant else None

    def numbered(self, number: int) -> Future | None:
        """Return the future of a command."""
        return self._by_number.get(number)

    def pending(self, model: str) -> int:
        """Count a model's futures that have not ended."""
        return self._pending[model]

    def tokens(self, tenant: str) -> int:
        """Count a tenant's tokens that have not ended."""
        return self._accounts[tenant].tokens if tenant in self._accounts else 0

    def full(self, tenant: str) -> bool:
        """Whether a tenant's answers that were not fetched take all the room that there is for its answers."""
        account = self._accounts.get(tenant)
        if account is None:
            return False
        for future in list(account.answers.values()):  # fetched ones make room, the oldest first
            if account.bytes <= self._most_bytes:
                break
            if future.retrieved is not None:
                self._drop(future)
        return account.bytes > self._most_bytes

    def pending_by_kind(self) -> Mapping[str, int]:
        """Count futures that have not ended, by kind."""
        return Counter(future.kind for future in self._by_number.values() if future.ended is None)

    def ended_of(self, model: str) -> list[Future]:
        """List a model's futures that have ended and are not forgotten, in the order they were made."""
        return [each for each in self._by_number.values() if each.model == model and each.ended is not None]

    def keep_longer(self) -> None:
        """Count the time of all answers from now on, as nobody could fetch them."""
        for account in self._accounts.values():
            for future in account.answers.values():
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
        account = self._accounts[future.tenant]
        account.tokens -= future.tokens
        self._pending[future.model or ""] -= 1
        if not self._pending[future.model or ""]:
            del self._pending[future.model or ""]
        if future.internal:
            self._drop(future)
        else:
            self._make_room(account, future)
            self.completions.add(future.name, succeeded=succeeded)
        future.then(succeeded)
        future.changed.set()
        future.answer_of, future.then = _answered, _answered  # what they held of the request is not needed any more

    def _make_room(self, account: Account, future: Future) -> None:
        """Count an answer that is kept from now on, and drop the tenant's oldest if there are too many."""
        future.size = LEAST_BYTES + getattr(future.answer, "nbytes", 0)
        account.answers[future.number] = future
        account.bytes += future.size
        while len(account.answers) > MOST_KEPT:
            self._drop(next(iter(account.answers.values())))
        self.full(future.tenant)

    def release(self, name: str, tenant: str) -> None:
        """Note that a client has an answer, as it says."""
        future = self.get(name, tenant)
        if future is not None and future.ended is not None:
            future.retrieved = future.retrieved or self._clock()

    def forget_fetched(self, model: str) -> None:
        """Drop what was fetched of a model that is gone: its client goes on with others."""
        for future in self.ended_of(model):
            if future.retrieved is not None:
                self._drop(future)

    def forget(self) -> None:
        """Drop answers whose time is over."""
        now = self._clock()
        for account in list(self._accounts.values()):
            for future in list(account.answers.values()):
                old = future.ended is not None and now - future.ended > self._keep_s
                if old or (future.retrieved is not None and now - future.retrieved > RETRIEVED_S):
                    self._drop(future)

    def _drop(self, future: Future) -> None:
        if self._by_number.pop(future.number, None) is None:
            return
        account = self._accounts[future.tenant]
        if account.answers.pop(future.number, None) is not None:
            account.bytes -= future.size
        if not account.answers and not account.tokens:
            del self._accounts[future.tenant]
        if self._by_name.get(future.name) is future:
            del self._by_name[future.name]
            self.completions.drop(future.name)


def _answered(value: Any) -> Any:
    raise AssertionError("this future has ended")


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
    """Requests to sample that have ended, for each client of each sampler, so that one call can ask for all of them."""

    def __init__(self) -> None:
        self._count = 0
        self._logs: dict[tuple[str, int], _Log] = {}

    def add(self, request: str, *, succeeded: bool) -> None:
        """Note that a request has ended; those that are not a sampler's are passed over."""
        match = _REQUEST.fullmatch(request)
        if match is None:
            return
        self._count += 1
        log = self._logs.setdefault((match[1], int(match[2]) // CLONE), _Log())
        log.ended[request] = (self._count, succeeded)
        log.changed.set()

    async def since(self, sampler: str, clone: int, seen: int, timeout_s: float) -> tuple[dict[str, bool], int]:
        """Return requests that have ended, and whether they succeeded; wait for one if there is none.

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
        """Forget a request whose answer is forgotten."""
        match = _REQUEST.fullmatch(request)
        key = (match[1], int(match[2]) // CLONE) if match is not None else ("", 0)
        if key in self._logs:
            self._logs[key].ended.pop(request, None)
            self._tidy(*key, self._logs[key])

    def _tidy(self, sampler: str, clone: int, log: _Log) -> None:
        if not log.ended and not log.waiting:
            self._logs.pop((sampler, clone), None)
