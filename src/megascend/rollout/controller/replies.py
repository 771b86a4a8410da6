"""Each call is carried out once: whoever says it again gets the first answer."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from megascend.errors import ControllerBusyError, ControllerLostError, MessageError
from megascend.rollout.controller.messages import Call
from megascend.rollout.http_client import Answer


@dataclass
class _Reply:
    digest: bytes
    made: float
    answer: asyncio.Future[Answer]


class Replies:
    """Answers by the id of the call, kept for ``keep_s`` after them. A call older than that is refused, not carried out.

    Args:
        keep_s: how long a caller may say a call again, in seconds.
        max_replies: most that are kept; with more within ``keep_s``, calls are refused as busy.
        clock: seconds since 1970. When a call was made is the caller's word, so clocks must agree as far as signatures ask for.
    """

    def __init__(self, *, keep_s: float, max_replies: int, clock: Callable[[], float] = time.time) -> None:
        self._keep_s = keep_s
        self._max_replies = max_replies
        self._clock = clock
        self._replies: dict[str, _Reply] = {}
        self._answered: deque[tuple[str, float]] = deque()  # and when they expire
        self._running: set[asyncio.Future[Answer]] = set()
        self._forgotten_until = float("-inf")

    def __len__(self) -> int:
        return len(self._replies)

    async def once(self, call: Call, route: str, body: bytes, carry_out: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer to a call: what ``carry_out`` returns, or has returned for it before.

        ``carry_out`` runs on when the caller goes. If it raises, the call was refused without effect: that is not kept, and
        whoever says the call again tries again.

        Raises:
            MessageError: another call had this id, or it is too old.
            ControllerBusyError: too many calls.
            Exception: what ``carry_out`` raises.
        """
        digest = hashlib.sha256(f"{route}\n".encode() + body).digest()
        reply = self._replies.get(call.id)
        if reply is None:
            reply = self._new(call, digest)
            task = asyncio.ensure_future(carry_out())
            self._running.add(task)  # the loop itself keeps no task alive
            task.add_done_callback(lambda done: self._settle(call.id, reply, done))
        elif reply.digest != digest:
            raise MessageError(f"call {call.id} was another one before")
        return await asyncio.shield(reply.answer)

    def _new(self, call: Call, digest: bytes) -> _Reply:
        now = self._clock()
        self._forget(now)
        if now - call.made > self._keep_s or call.made <= self._forgotten_until:
            raise MessageError(
                f"call {call.id} was made {now - call.made:.1f} s ago; after {self._keep_s:g} s a call is not carried out, "
                "since it may have been before"
            )
        if call.made - now > self._keep_s:
            raise MessageError(f"call {call.id} was made {call.made - now:.1f} s from now: the clocks differ")
        if len(self._replies) >= self._max_replies:
            raise ControllerBusyError(f"{self._max_replies} calls came within {self._keep_s:g} s; come back later")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        reply = self._replies[call.id] = _Reply(digest, call.made, answer)
        return reply

    def _forget(self, now: float) -> None:
        """Let go of what has expired, in the order of the answers."""
        while self._answered:
            call_id, expires = self._answered[0]
            if expires >= now:
                return
            self._answered.popleft()
            self._forgotten_until = max(self._forgotten_until, self._replies.pop(call_id).made)

    def _settle(self, call_id: str, reply: _Reply, done: asyncio.Future[Answer]) -> None:
        self._running.discard(done)
        if done.cancelled():
            error: BaseException | None = ControllerLostError("the controller is closing")
        else:
            error = done.exception()
        if error is None:
            # From the answer on: whoever waited long for it may ask again. And not before the call is too old to be new.
            self._answered.append((call_id, max(reply.made, self._clock()) + self._keep_s))
            reply.answer.set_result(done.result())
            return
        self._replies.pop(call_id, None)
        reply.answer.set_exception(error)
        reply.answer.exception()  # seen, should the caller be gone
