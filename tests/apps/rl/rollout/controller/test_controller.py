"""Effects on engines are undone on failure, when leases lapse, and on close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from controller_doubles import ManualClock, NotingEngine, a_seal, an_offer, settle
from hypothesis import given, settings
from hypothesis import strategies as st

from megascend.apps.rl.rollout.controller.controller import (
    RESUME_AGAIN_S,
    RESUME_ATTEMPTS,
    Claim,
    Controller,
    ControllerLimits,
)
from megascend.errors import (
    ControllerError,
    ControllerLostError,
    EngineError,
    EngineOwnedError,
    EngineTimeoutError,
    LeaseLapsedError,
    MessageError,
)

pytestmark = pytest.mark.waiting


class World:
    """A controller of two engines on a manual clock."""

    def __init__(self, **limits: float) -> None:
        self.clock = ManualClock()
        self.engines = self.first, self.second = NotingEngine("one"), NotingEngine("two", receivers=2)
        self.controller = Controller(list(self.engines), limits=ControllerLimits(**limits), clock=self.clock)  # type: ignore[arg-type]

    async def update(self, claim: Claim, name: str, timeout_s: float = 60) -> None:
        """Run a complete update of all three members."""
        engine = self.controller.engine(claim.id)
        await engine.begin_update(an_offer(name, 3))
        await engine.verify(a_seal(name), timeout_s)
        await engine.commit(name)


def with_world(test: Callable[[World], Coroutine[Any, Any, None]], **limits: float) -> None:
    async def run() -> None:
        world = World(**limits)
        try:
            await asyncio.wait_for(test(world), 60)
        finally:
            await world.controller.close()
            assert not any(engine.paused for engine in world.engines)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_update_is_committed_when_all_engines_have_verified_it() -> None:
    async def test(world: World) -> None:
        control = world.controller
        claim = await control.claim("trainer", lease_s=60)
        assert await control.engine(claim.id).receivers() == 3
        await world.update(claim, "a")
        assert [engine.in_force for engine in world.engines] == ["a", "a"]
        assert world.first.calls == ["receivers", "begin a as 1+1", "verify a", "commit a"]
        assert world.second.calls == ["receivers", "begin a as 2+2", "verify a", "commit a"]
        await control.engine(claim.id).begin_update(an_offer("b", 3))
        with pytest.raises(ControllerError, match="'b' of 'trainer' has not been verified on all engines"):
            await control.engine(claim.id).commit("b")
        with pytest.raises(ControllerError, match="no update 'c': 'b' is open"):
            await control.engine(claim.id).verify(a_seal("c"), timeout_s=1)
        with pytest.raises(ControllerError, match="update 'b' of 'trainer' is open"):
            await control.engine(claim.id).begin_update(an_offer("c", 3))
        await control.engine(claim.id).verify(a_seal("b"), timeout_s=1)
        await control.engine(claim.id).commit("b")
        assert [engine.in_force for engine in world.engines] == ["b", "b"]
        with pytest.raises(MessageError, match="the offer is for 2 members; the engines one, two have 3"):
            await control.engine(claim.id).begin_update(an_offer("c", 2))
        await control.engine(claim.id).begin_update(an_offer("c", 3))
        await control.engine(claim.id).drop("c")
        with pytest.raises(ControllerError, match="no update 'c': none is open"):
            await control.engine(claim.id).commit("c")
        assert [engine.open for engine in world.engines] == [None, None]

    with_world(test)


@pytest.mark.parametrize("call", ["begin", "verify", "commit"])
@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_failed_update_is_dropped_and_paused_engines_resume(call: str, how: str) -> None:
    async def test(world: World) -> None:
        claim = await world.controller.claim("trainer", lease_s=60)
        await world.controller.engine(claim.id).pause(lease_s=30)
        getattr(world.second, how).add(call)
        kind = EngineError if how == "fails" else EngineTimeoutError
        with pytest.raises(kind, match="engine 'two'"):
            await world.update(claim, "a", timeout_s=0.5)
        assert [engine.open for engine in world.engines] == [None, None]
        assert [engine.paused for engine in world.engines] == [False, False]
        assert world.second.in_force == ""
        assert world.first.in_force == ("a" if call == "commit" else "")
        getattr(world.second, how).clear()
        await world.update(claim, "b")
        assert [engine.in_force for engine in world.engines] == ["b", "b"]

    with_world(test, **dict.fromkeys(("engine_timeout_s", "commit_timeout_s"), 0.5 if how == "hangs" else 60))


def test_pause_ends_when_its_lease_lapses() -> None:
    async def test(world: World) -> None:
        claim = await world.controller.claim("trainer", lease_s=600)
        await world.controller.engine(claim.id).pause(lease_s=30)
        await world.clock.advance(29)
        assert [engine.paused for engine in world.engines] == [True, True]
        await world.controller.engine(claim.id).pause(lease_s=30)  # renewed
        await world.clock.advance(29)
        assert [engine.paused for engine in world.engines] == [True, True]
        await world.clock.advance(1)
        assert [engine.paused for engine in world.engines] == [False, False]
        assert world.first.calls == ["pause 30", "pause 30", "resume"]
        assert world.controller.status()["engines"]["one"]["owner"] == "trainer"

    with_world(test)


def test_failed_resume_is_retried_a_few_times() -> None:
    async def test(world: World) -> None:
        claim = await world.controller.claim("trainer", lease_s=600)
        await world.controller.engine(claim.id).pause(lease_s=30)
        world.second.fails.add("resume")
        await world.clock.advance(30 + 2 * RESUME_AGAIN_S)
        assert world.first.calls.count("resume") == 1
        assert world.second.calls.count("resume") == 3
        world.second.fails.clear()
        await world.clock.advance(RESUME_AGAIN_S)
        assert not world.second.paused
        await world.clock.advance(100)
        assert world.second.calls.count("resume") == 4
        await world.controller.engine(claim.id).pause(lease_s=30)
        world.second.fails.add("resume")
        await world.clock.advance(500)
        assert world.second.calls.count("resume") == 4 + RESUME_ATTEMPTS
        world.second.paused = False  # the engine's own lease ends the pause

    with_world(test)


def test_lapsed_claim_undoes_its_calls_and_releases_the_engines() -> None:
    async def test(world: World) -> None:
        claim = await world.controller.claim("first", lease_s=60)
        await world.controller.engine(claim.id).begin_update(an_offer("a", 3))
        await world.controller.engine(claim.id).pause(lease_s=600)
        await world.clock.advance(59)
        with pytest.raises(EngineOwnedError, match=r"'one' belongs to 'first', since 59.0 s ago, for another 1.0 s"):
            await world.controller.claim("second", lease_s=60)
        await world.clock.advance(1)
        assert [engine.calls[-2:] for engine in world.engines] == [["drop a", "resume"]] * 2
        assert (await world.controller.claim("second", lease_s=60)).owner == "second"
        with pytest.raises(LeaseLapsedError, match=r"the lease of 'first' on one, two lapsed; claim the engines again"):
            await world.controller.engine(claim.id).commit("a")
        with pytest.raises(LeaseLapsedError, match="lapsed"):
            world.controller.renew(claim.id, 60)

    with_world(test)


def test_calls_and_renewals_keep_a_claim() -> None:
    async def test(world: World) -> None:
        claim = await world.controller.claim("trainer", lease_s=60)
        for _ in range(3):
            await world.clock.advance(50)
            world.controller.renew(claim.id, 60)
        for _ in range(3):
            await world.clock.advance(50)
            await world.controller.engine(claim.id).receivers()
        world.first.hangs.add("receivers")
        running = asyncio.ensure_future(world.controller.engine(claim.id).receivers())
        await settle()
        await world.clock.advance(500)  # not while a call of the owner runs
        assert world.controller.status()["engines"]["one"]["owner"] == "trainer"
        running.cancel()
        await settle()
        await world.clock.advance(60)
        assert world.controller.status()["engines"]["one"]["owner"] is None

    with_world(test)


def test_claim_of_an_owned_engine_is_refused_or_waits() -> None:
    async def test(world: World) -> None:
        first = await world.controller.claim("first", ["one"], lease_s=60)
        await world.controller.claim("beside", ["two"], lease_s=600)
        with pytest.raises(EngineOwnedError, match=r"belongs to 'first'.*'second' cannot"):
            await world.controller.claim("second", ["one", "two"], lease_s=60)
        waiting = asyncio.ensure_future(world.controller.claim("second", ["one"], lease_s=60, wait_s=30))
        too_short = asyncio.ensure_future(world.controller.claim("third", ["one"], lease_s=60, wait_s=10))
        await world.clock.advance(15)
        assert not waiting.done()
        with pytest.raises(EngineOwnedError, match="'third' cannot"):
            await too_short
        await world.controller.release(first.id)
        assert (await waiting).owner == "second"
        with pytest.raises(LeaseLapsedError, match="'first' on one was released"):
            await world.controller.engine(first.id).pause(lease_s=1)
        with pytest.raises(ControllerError, match="no such claim"):
            await world.controller.engine("0" * 32).pause(lease_s=1)
        with pytest.raises(ControllerError, match="unknown engine 'three'; known: one, two"):
            await world.controller.claim("x", ["three"], lease_s=1)
        for lease in (0, -1, 601, float("nan"), float("inf")):
            with pytest.raises(ControllerError, match="a lease of"):
                await world.controller.engine((await waiting).id).pause(lease_s=lease)

    with_world(test)


def test_a_cancelled_call_is_undone() -> None:
    async def test(world: World) -> None:
        claim = await world.controller.claim("trainer", lease_s=60)
        await world.controller.engine(claim.id).pause(lease_s=60)
        world.first.hangs.add("verify")
        running = asyncio.ensure_future(world.update(claim, "a"))
        await settle()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await settle()
        assert [(engine.open, engine.paused) for engine in world.engines] == [(None, False)] * 2

    with_world(test)


def test_close_cancels_calls_and_resumes_engines() -> None:
    async def test(world: World) -> None:
        claim = await world.controller.claim("trainer", lease_s=60)
        await world.controller.engine(claim.id).pause(lease_s=60)
        world.second.hangs.add("verify")
        running = asyncio.ensure_future(world.update(claim, "a"))
        waiting = asyncio.ensure_future(world.controller.claim("second", lease_s=60, wait_s=60))
        rollout = world.controller.tasks.expect("r", deadline_s=60)
        await settle()
        await asyncio.gather(world.controller.close("the end"), world.controller.close("again"))
        for ended in (running, waiting):
            with pytest.raises(ControllerLostError, match="closing"):
                await ended
        with pytest.raises(ControllerError, match="rollout 'r': the end"):
            await rollout
        assert [(engine.open, engine.paused) for engine in world.engines] == [(None, False)] * 2
        with pytest.raises(ControllerLostError, match="closing"):
            await world.controller.claim("x", lease_s=1)

    with_world(test)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "renew", "release", "begin", "verify", "commit", "drop", "pause", "resume", "time"]),
        st.sampled_from(["a", "b"]),
        st.integers(1, 3),
        st.sampled_from(["", "", "", "one", "two"]),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_any_sequence_of_calls_leaves_nothing_paused_or_open(steps: list[tuple[str, str, int, str]]) -> None:
    """Run any calls of two owners on failing engines: one owner at a time, and everything is undone at the end."""

    async def test(world: World) -> None:
        claims: dict[str, str] = {}
        control = world.controller
        for call, owner, number, failing in steps:
            for engine in world.engines:
                engine.fails = {"begin", "verify", "commit", "pause"} if engine.name == failing else set()
            claim_id = claims.get(owner, "0" * 32)
            before = {engine.name: control.status()["engines"][engine.name]["owner"] for engine in world.engines}
            calls = [len(engine.calls) for engine in world.engines]
            try:
                if call == "claim":
                    claims[owner] = (await control.claim(owner, lease_s=10.0 * number)).id
                    assert set(before.values()) == {None}
                elif call == "renew":
                    control.renew(claim_id, 10.0 * number)
                elif call == "release":
                    await control.release(claim_id)
                elif call == "time":
                    await world.clock.advance(7.0 * number)
                elif call == "begin":
                    await control.engine(claim_id).begin_update(an_offer(str(number), 3))
                elif call == "verify":
                    await control.engine(claim_id).verify(a_seal(str(number)), timeout_s=60)
                elif call == "pause":
                    await control.engine(claim_id).pause(lease_s=5.0 * number)
                elif call == "resume":
                    await control.engine(claim_id).resume()
                else:
                    await getattr(control.engine(claim_id), call)(str(number))
            except ControllerError:
                assert [len(engine.calls) for engine in world.engines] == calls, "a refused call reached engines"
            except EngineError:
                assert failing
                assert not any(engine.paused for engine in world.engines)
            if call not in ("claim", "time") and owner not in before.values():
                assert [len(engine.calls) for engine in world.engines] == calls, (
                    "a caller without a claim reached engines"
                )
        await world.clock.advance(100)
        assert [(engine.paused, engine.open) for engine in world.engines] == [(False, None)] * 2
        assert world.controller.status()["engines"]["one"]["owner"] is None

    with_world(test)
