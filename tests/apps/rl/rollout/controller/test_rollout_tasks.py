"""Rollout futures are completed once, within their deadline, and bounded in number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from controller_doubles import ManualClock, settle

from megascend.apps.rl.rollout.controller.tasks import RolloutTasks
from megascend.errors import ControllerBusyError, MessageError, RolloutTaskError

pytestmark = pytest.mark.waiting


def with_tasks(test: Callable[[RolloutTasks, ManualClock], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        clock = ManualClock()
        tasks = RolloutTasks(clock, max_tasks=4, max_kept_bytes=100)
        await asyncio.wait_for(test(tasks, clock), 30)
        tasks.close("the end")
        assert tasks.status() == {"in_flight": 0, "kept": 0, "kept_bytes": 0}

    asyncio.run(run())


def test_a_result_arrives_once() -> None:
    async def test(tasks: RolloutTasks, clock: ManualClock) -> None:
        future = tasks.expect("a", 60)
        tasks.complete("a", {"tokens": [1]})
        assert await future == {"tokens": [1]}
        with pytest.raises(RolloutTaskError, match="'a' is completed"):
            tasks.complete("a", {"tokens": [2]})
        with pytest.raises(RolloutTaskError, match="'b' is not expected here"):
            tasks.complete("b", {})
        with pytest.raises(MessageError, match="a name of its own"):
            tasks.expect("a", 60)
        failed = tasks.expect("c", 60)
        tasks.fail("c", "out of memory")
        with pytest.raises(RolloutTaskError, match="'c' failed: out of memory"):
            await failed
        assert future.result() == {"tokens": [1]}

    with_tasks(test)


def test_deadlines_and_cancellation() -> None:
    async def test(tasks: RolloutTasks, clock: ManualClock) -> None:
        late, given_up = tasks.expect("late", 60), tasks.expect("given up", 60)
        given_up.cancel()
        await settle()
        with pytest.raises(RolloutTaskError, match="'given up' was cancelled"):
            tasks.complete("given up", {})
        await clock.advance(60)
        with pytest.raises(RolloutTaskError, match="'late' was not completed within 60 s"):
            await late
        with pytest.raises(RolloutTaskError, match="not completed within 60 s"):
            tasks.complete("late", {})

    with_tasks(test)


def test_number_and_bytes_are_bounded() -> None:
    async def test(tasks: RolloutTasks, clock: ManualClock) -> None:
        with pytest.raises(ControllerBusyError, match="at most 4"):
            tasks.expect_all(list("abcde"), 60)
        assert tasks.status()["in_flight"] == 0  # none of them
        tasks.expect_all(list("abcd"), 60)
        with pytest.raises(ControllerBusyError):
            tasks.expect("e", 60)
        tasks.complete("a", {}, size=90)
        with pytest.raises(ControllerBusyError, match="90 bytes"):
            tasks.complete("b", {}, size=11)
        assert tasks.status() == {"in_flight": 3, "kept": 1, "kept_bytes": 90}
        tasks.forget(["a", "unknown"])
        tasks.complete("b", {"b": 1}, size=11)
        assert await tasks.wait(["b", "c"], 60) == {"b": {"b": 1}}
        results = await tasks.wait(["a", "b"], 60)
        assert "'a' is over, and its result was fetched" in str(results["a"])
        assert results["b"] == {"b": 1}
        with pytest.raises(RolloutTaskError, match="'e' is not expected here"):
            await tasks.wait(["b", "e"], 60)

    with_tasks(test)


def test_unfetched_results_expire() -> None:
    async def test(tasks: RolloutTasks, clock: ManualClock) -> None:
        tasks.expect_all(["a"], 60)
        tasks.complete("a", {}, size=10, keep_s=100)
        await clock.advance(99)
        assert await tasks.wait(["a"], 60) == {"a": {}}
        await clock.advance(1)
        assert "nobody fetched its result within 100 s" in str((await tasks.wait(["a"], 60))["a"])

    with_tasks(test)


def test_wait_returns_available_results_up_to_a_size() -> None:
    async def test(tasks: RolloutTasks, clock: ManualClock) -> None:
        tasks.expect_all(["a", "b", "c"], 60)
        waiting = asyncio.ensure_future(tasks.wait(["a", "b", "c"], 3600, max_bytes=50))
        await settle()
        assert not waiting.done()
        tasks.complete("b", {"n": 2}, size=40)
        assert await waiting == {"b": {"n": 2}}
        tasks.complete("a", {"n": 1}, size=40)
        assert len(await tasks.wait(["a", "b", "c"], 3600, max_bytes=50)) == 1
        assert len(await tasks.wait(["a", "b", "c"], 3600)) == 2
        assert len(await tasks.wait(["a"], 3600, max_bytes=1)) == 1
        await clock.advance(60)
        assert isinstance((await tasks.wait(["c"], 60))["c"], RolloutTaskError)
        assert await tasks.wait([], 60) == {}

    with_tasks(test)
