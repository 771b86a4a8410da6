"""Every call is executed at most once."""

from __future__ import annotations

import asyncio

import pytest

from megascend.apps.rl.rollout.controller.messages import Call, new_id
from megascend.apps.rl.rollout.controller.replies import Replies
from megascend.apps.rl.rollout.http_client import Answer
from megascend.errors import ControllerBusyError, MessageError

pytestmark = pytest.mark.waiting


class World:
    """Replies on a manual clock, with a record of executed calls."""

    def __init__(self, max_replies: int = 100) -> None:
        self.now = 1_800_000_000.0
        self.replies = Replies(keep_s=100, max_replies=max_replies, clock=lambda: self.now)
        self.executed: list[str] = []

    def call(self) -> Call:
        return call_of(new_id(lambda: self.now))

    async def say(self, call: Call, gate: asyncio.Event | None = None, fails: bool = False) -> Answer:
        async def carry_out() -> Answer:
            self.executed.append(call.id)
            if gate is not None:
                await gate.wait()
            if fails:
                raise ControllerBusyError("full")
            return Answer(200, call.id.encode())

        return await self.replies.once(call, "/x", b"body", carry_out)


def test_answers_are_kept_and_expired_calls_are_not_executed() -> None:
    async def run() -> None:
        world = World()
        first = world.call()
        answer = await world.say(first)
        world.now += 99
        assert await world.say(first) is answer
        assert len(world.replies) == 1
        world.now += 2
        await world.say(world.call())
        assert len(world.replies) == 1  # the first was forgotten
        with pytest.raises(MessageError, match=r"made 101.0 s ago; after 100 s"):
            await world.say(first)
        world.now -= 50  # a clock that is set back does not make it new
        with pytest.raises(MessageError, match="not executed"):
            await world.say(first)
        assert world.executed.count(first.id) == 1

    asyncio.run(run())


def test_a_call_that_takes_longer_than_answers_are_kept() -> None:
    async def run() -> None:
        world, gate = World(max_replies=3), asyncio.Event()
        long = world.call()
        first = asyncio.ensure_future(world.say(long, gate))
        await asyncio.sleep(0)
        for _ in range(5):  # other answers still expire while the long call runs
            world.now += 60
            await world.say(world.call())
        repeated = asyncio.ensure_future(world.say(long, gate))
        await asyncio.sleep(0)
        first.cancel()  # its caller is gone
        gate.set()
        answer = await repeated
        world.now += 99
        assert await world.say(long) is answer
        assert world.executed.count(long.id) == 1

    asyncio.run(run())


def test_refused_call_may_be_retried_and_reply_count_is_bounded() -> None:
    async def run() -> None:
        world = World(max_replies=2)
        call = world.call()
        with pytest.raises(ControllerBusyError, match="full"):
            await world.say(call, fails=True)
        assert len(world.replies) == 0
        assert (await world.say(call)).body == call.id.encode()
        await world.say(world.call())
        with pytest.raises(ControllerBusyError, match="2 calls arrived within 100 s"):
            await world.say(world.call())
        assert (await world.say(call)).status == 200  # a repeated call still gets its stored answer
        world.now += 101
        await world.say(world.call())
        with pytest.raises(MessageError, match="used for another call"):
            await world.replies.once(replies_last(world), "/y", b"body", lambda: pytest.fail("carried out"))

    asyncio.run(run())


def replies_last(world: World) -> Call:
    """Return the last call, to be sent to another route."""
    return call_of(world.executed[-1])


def call_of(call_id: str) -> Call:
    return Call(version=1, instance="", id=call_id, caller="x", arguments={})
