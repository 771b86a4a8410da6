"""Idempotency of calls: each is executed once, and a repeated call gets the first answer."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from megascend.apps.rl.rollout.controller.messages import Call
from megascend.apps.rl.rollout.http_client import Answer
from megascend.errors import ControllerBusyError, ControllerLostError, MessageError


@dataclass
class _Reply:
    digest: bytes
    created: float
    answer: asyncio.Future[Answer]


class Replies:
    """Answers by call id, kept for ``keep_s`` after the answer. An older call is refused, not executed.

    Args:
        keep_s: time for which a caller may repeat a call, in seconds.
        max_replies: maximum number kept; with more within ``keep_s``, calls are refused as busy.
        clock: seconds since 1970. The time of a call is the caller's, so clocks must agree as closely as for signatures.
    """

    def __init__(self, *, keep_s: float, max_replies: int, clock: Callable[[], float] = time.time) -> None:
        self._keep_s = keep_s
        self._max_replies = max_replies
        self._clock = clock
        self._replies: dict[str, _Reply] = {}
        self._expiries: deque[tuple[str, float]] = deque()  # (call, seconds since 1970), the first to expire first
        self._running: set[asyncio.Future[Answer]] = set()
        self._forgotten_until = float("-inf")

    def __len__(self) -> int:
        return len(self._replies)

    async def once(self, call: Call, route: str, body: bytes, execute: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the answer to a call: the result of ``execute``, now or in an earlier attempt.

        ``execute`` continues if the caller disconnects. If it raises, the call was refused without effect: that is not kept, and
        a repeated call is executed again.

        Raises:
            MessageError: another call had this id, or it is too old.
            ControllerBusyError: too many calls.
            Exception: raised by ``execute``.
        """
        # An id that comes with another body is a mistake of the caller's, and not a repetition.
        digest = hashlib.sha256(f"{route}\n".encode() + body).digest()
        reply = self._replies.get(call.id)
        if reply is None:
            reply = self._new(call, digest)
            task = asyncio.ensure_future(execute())
            self._running.add(task)  # the event loop holds only weak references
            task.add_done_callback(lambda task: self._settle(call.id, reply, task))
        elif reply.digest != digest:
            raise MessageError(f"the id {call.id} was used for another call")
        # One of several callers that gives up must not cancel the answer of the others.
        return await asyncio.shield(reply.answer)

    def _new(self, call: Call, digest: bytes) -> _Reply:
        now = self._clock()
        self._forget(now)
        # Its answer may have been forgotten: executing it could be the second time.
        if now - call.created > self._keep_s or call.created <= self._forgotten_until:
            raise MessageError(
                f"call {call.id} was made {now - call.created:.1f} s ago; after {self._keep_s:g} s a call is not executed, "
                "since it may have been before"
            )
        if call.created - now > self._keep_s:
            raise MessageError(f"call {call.id} was made {call.created - now:.1f} s from now: the clocks differ")
        if len(self._replies) >= self._max_replies:
            raise ControllerBusyError(f"{self._max_replies} calls arrived within {self._keep_s:g} s; retry later")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        reply = self._replies[call.id] = _Reply(digest, call.created, answer)
        return reply

    def _forget(self, now: float) -> None:
        """Remove expired answers, in the order in which they were given."""
        while self._expiries:
            call_id, expires = self._expiries[0]
            if expires >= now:
                return
            self._expiries.popleft()
            self._forgotten_until = max(self._forgotten_until, self._replies.pop(call_id).created)

    def _settle(self, call_id: str, reply: _Reply, task: asyncio.Future[Answer]) -> None:
        self._running.discard(task)
        if task.cancelled():
            error: BaseException | None = ControllerLostError("the controller is closing")
        else:
            error = task.exception()
        if error is None:
            # Kept from the time of the answer, since a caller that waited long may retry, and at least until the call's own time
            # (by a clock that may be ahead of ours) makes it too old to be executed again.
            self._expiries.append((call_id, max(reply.created, self._clock()) + self._keep_s))
            reply.answer.set_result(task.result())
            return
        # Refused without effect: the next attempt is executed.
        self._replies.pop(call_id, None)
        reply.answer.set_exception(error)
        reply.answer.exception()  # retrieved: asyncio would log it if the caller has disconnected
