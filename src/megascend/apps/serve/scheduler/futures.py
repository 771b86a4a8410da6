"""Futures of requests: created on arrival, completed or failed when the command has run, dropped some time later.

Used from the HTTP server's event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

from megascend.apps.serve.errors import Failure
from megascend.errors import MegascendError

RETRIEVED_S = 120.0
"""Retention of a fetched answer, for a client that lost the response."""
MAX_ANSWERS = 16384
"""Number of one tenant's answers beyond which fetched ones are dropped, oldest first, and then new requests are refused."""
MAX_COMPLETIONS = 1024
"""Most finished requests named in one answer to a poll for many."""
ANSWER_OVERHEAD_BYTES = 2048
"""Bytes charged for an answer in addition to its arrays."""
log = logging.getLogger("megascend.apps.serve")


@dataclass(eq=False)
class Future:
    """The pending or finished result of a request.

    Attributes:
        name: request id known to the client.
        model: model of the request, or None.
        kind: kind of the request, for logs and metrics.
        tokens: number of tokens that it processes.
        parts: number of responses of a sampling request.
        work: disk work on the ranks' return value, done in a thread before ``answer_of``; None: there is none.
        answer_of: builds the answer from the ranks' return value, or from that of ``work``.
        then: callback, called with True on success and False on failure.
        answer: answer for the client, once finished.
        number_in_line: number in its model's order, or None.
        digest: digest of its request's body, by which a repeated request is told from another one; None if unknown.
        recorded: True once the database has its request.
        internal: no client knows its name; dropped as soon as it ends.
        size: bytes charged for its answer.
    """

    number: int
    name: str
    tenant: str
    model: str | None
    kind: str
    created: float
    tokens: int = 0
    parts: int = 1
    work: Callable[[Any], Any] | None = None
    answer_of: Callable[[Any], Any] = field(default=lambda value: {})
    then: Callable[[bool], None] = field(default=lambda succeeded: None)
    answer: Any = None
    failure: Failure | None = None
    ended: float | None = None
    retrieved: float | None = None
    number_in_line: int | None = None
    digest: str | None = None
    recorded: bool = False
    internal: bool = False
    size: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Account:
    """Resources in use by one tenant.

    Attributes:
        tokens: tokens of its pending requests.
        answers: retained answers by future number, in the order they ended.
        bytes: size of the retained answers.
    """

    tokens: int = 0
    answers: dict[int, Future] = field(default_factory=dict)
    bytes: int = 0


class Futures:
    """All futures that have not been dropped.

    Args:
        clock: monotonic seconds.
        keep_s: retention of an answer that is not fetched.
        max_bytes: limit of one tenant's answers; beyond it, and beyond :data:`MAX_ANSWERS`, fetched ones are dropped, oldest
            first.
    """

    def __init__(self, clock: Callable[[], float], keep_s: float, max_bytes: int = 2**62) -> None:
        self._clock, self._keep_s, self._max_bytes = clock, keep_s, max_bytes
        self._by_number: dict[int, Future] = {}
        self._by_name: dict[str, Future] = {}
        self._accounts: defaultdict[str, Account] = defaultdict(Account)
        self._pending: Counter[str] = Counter()
        self._pending_by_kind: Counter[str] = Counter()
        self._count = 0
        self.completions = Completions()

    def make(self, name: str, tenant: str, model: str | None, kind: str, **values: Any) -> Future:
        """Create a pending future."""
        self._count += 1
        future = Future(self._count, name, tenant, model, kind, self._clock(), **values)
        self._by_name[name] = self._by_number[future.number] = future
        self._accounts[tenant].tokens += future.tokens
        self._pending[model or ""] += not future.internal
        self._pending_by_kind[kind] += 1
        return future

    def get(self, name: str, tenant: str) -> Future | None:
        """Return a tenant's future; None if it is unknown, dropped or another tenant's."""
        future = self._by_name.get(name)
        # The same answer for another tenant's future as for none, so that names cannot be probed.
        return future if future is not None and future.tenant == tenant else None

    def by_number(self, number: int) -> Future | None:
        """Return the future with the number that its command carries."""
        return self._by_number.get(number)

    def pending(self, model: str) -> int:
        return self._pending[model]

    def tokens(self, tenant: str) -> int:
        return self._accounts[tenant].tokens if tenant in self._accounts else 0

    def full(self, tenant: str) -> bool:
        """Check whether a tenant's unfetched answers exceed its limit, after dropping fetched ones."""
        account = self._accounts.get(tenant)
        if account is None:
            return False
        # Unfetched answers are never dropped: their clients would lose results that they paid a step for. The tenant is refused
        # instead until it fetches some.
        if self._over(account):
            for future in [
                future for future in account.answers.values() if future.retrieved is not None
            ]:  # oldest first
                self._drop(future)
                if not self._over(account):
                    break
        return self._over(account)

    def _over(self, account: Account) -> bool:
        return account.bytes > self._max_bytes or len(account.answers) > MAX_ANSWERS

    def pending_by_kind(self) -> Mapping[str, int]:
        return +self._pending_by_kind

    def ended_of(self, tenant: str, model: str) -> list[Future]:
        """List the finished futures of a tenant's model that are still retained."""
        account = self._accounts.get(tenant)
        return [] if account is None else [future for future in account.answers.values() if future.model == model]

    def restart_retention(self) -> None:
        """Restart the retention of all answers, after a time in which they could not be fetched."""
        for account in self._accounts.values():
            for future in account.answers.values():
                future.ended = self._clock()
                future.retrieved = None if future.retrieved is None else self._clock()

    def complete(self, future: Future, value: Any) -> None:
        """Complete a future with the ranks' return value; it fails if no answer can be built from that."""
        try:
            future.answer = future.answer_of(value)
        except Exception as error:  # an error in one answer must not end the server
            if not isinstance(error, MegascendError):  # the client gets only its class
                log.exception("the answer to a %s cannot be built", future.kind)
            self.fail(future, Failure.of(error))
            return
        self._end(future, True)

    def fail(self, future: Future, failure: Failure) -> None:
        future.failure = failure
        self._end(future, False)

    def _end(self, future: Future, succeeded: bool) -> None:
        if future.ended is not None:
            return  # the first outcome counts
        future.ended = self._clock()
        account = self._accounts[future.tenant]
        account.tokens -= future.tokens
        self._pending[future.model or ""] -= not future.internal
        self._pending_by_kind[future.kind] -= 1
        if not self._pending[future.model or ""]:
            del self._pending[future.model or ""]
        if future.internal:
            self._drop(future)
        else:
            self._make_room(account, future)
            self.completions.add(future.name, succeeded=succeeded)
        future.then(succeeded)  # before the client is woken, whose next request may depend on it
        future.changed.set()
        future.answer_of, future.then = (
            _already_ended,
            _already_ended,
        )  # releases the request's samples, which the closures hold

    def _make_room(self, account: Account, future: Future) -> None:
        """Charge a new answer to its tenant; drop fetched ones beyond the limits."""
        future.size = ANSWER_OVERHEAD_BYTES + getattr(future.answer, "nbytes", 0)
        account.answers[future.number] = future
        account.bytes += future.size
        self.full(future.tenant)

    def mark_fetched(self, future: Future) -> None:
        """Mark a finished future as fetched, from which its shorter retention counts; a repeated fetch does not extend it."""
        if future.ended is not None and future.retrieved is None:
            future.retrieved = self._clock()

    def forget_fetched(self, tenant: str, model: str) -> None:
        """Drop fetched answers of a removed model: its client will not ask again."""
        for future in self.ended_of(tenant, model):
            if future.retrieved is not None:
                self._drop(future)

    def forget(self) -> None:
        """Drop answers past their retention."""
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
        # Its name may be in use by a newer future: that of a request sent again after this one was dropped.
        if self._by_name.get(future.name) is future:
            del self._by_name[future.name]
            self.completions.drop(future.name)


def _already_ended(value: Any) -> Any:
    raise AssertionError("this future has ended")


CLONE = 1_000_000_000
"""Clients that share a sampler number their requests from multiples of this."""
# Only sampling requests with a number have such names; they are what clients poll for in bulk.
_REQUEST = re.compile(r"(s-[0-9a-f]{32}:sample:[0-9]+):request:([0-9]+)")


@dataclass
class _Log:
    """Finished requests of one client of a sampler, in order: name to (position, succeeded)."""

    ended: dict[str, tuple[int, bool]] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0


class Completions:
    """Finished sampling requests by client of a sampler, so that one call can poll for all of them."""

    def __init__(self) -> None:
        # Not from 0: a client of the server before this one would acknowledge these requests with its old cursor.
        self._count = time.time_ns() // 1000
        self._logs: dict[tuple[str, int], _Log] = {}

    def add(self, request: str, *, succeeded: bool) -> None:
        """Record a finished request; requests that are not a sampler's are ignored."""
        match = _REQUEST.fullmatch(request)
        if match is None:
            return
        self._count += 1
        log = self._logs.setdefault((match[1], int(match[2]) // CLONE), _Log())
        log.ended.pop(request, None)  # sent again after its answer was dropped: its place is the last
        log.ended[request] = (self._count, succeeded)
        log.changed.set()

    async def since(self, sampler: str, clone: int, cursor: int, timeout_s: float) -> tuple[dict[str, bool], int]:
        """Return (name to succeeded of finished requests, cursor); wait for one if there is none.

        Args:
            cursor: that of the previous call, which acknowledges everything up to it; 0 at first.
        """
        # From a server whose clock was ahead of this one's: it acknowledges nothing of this one.
        cursor = cursor if cursor <= self._count else 0
        log = self._logs.setdefault((sampler, clone), _Log())
        log.waiting += 1
        try:
            # In order of their positions: a poll takes time for what it acknowledges and returns, not for all that has ended.
            for name in [name for name, _ in takewhile(lambda entry: entry[1][0] <= cursor, log.ended.items())]:
                del log.ended[name]
            if not log.ended and timeout_s > 0:
                log.changed.clear()  # no await since the look at log.ended, so no completion can be missed
                await asyncio.wait_for(log.changed.wait(), timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            return {}, cursor
        finally:
            log.waiting -= 1
            self._tidy(sampler, clone, log)
        ended = dict(islice(log.ended.items(), MAX_COMPLETIONS))
        last = max((position for position, _ in ended.values()), default=cursor)
        return {name: succeeded for name, (_, succeeded) in ended.items()}, last

    def drop(self, request: str) -> None:
        """Remove a request whose answer has been dropped."""
        match = _REQUEST.fullmatch(request)
        key = (match[1], int(match[2]) // CLONE) if match is not None else ("", 0)
        if key in self._logs:
            self._logs[key].ended.pop(request, None)
            self._tidy(*key, self._logs[key])

    def _tidy(self, sampler: str, clone: int, log: _Log) -> None:
        # A waiting call holds a reference to its log: dropping it would let completions go to another one.
        if not log.ended and not log.waiting:
            self._logs.pop((sampler, clone), None)
