"""A prompt that fails on one engine goes to another; when all fail, the run ends with the engine's error."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from megascend.apps.rl.rollout import collector
from megascend.apps.rl.rollout.buffer import RolloutBuffer
from megascend.apps.rl.rollout.collector import RolloutCollector, Task
from megascend.apps.rl.rollout.episodes import GradedResponses
from megascend.errors import DataError, EngineError, EngineLostError
from weightwire.engine import Completion, Sampling

DEADLINE_S = 60.0


class Prompts:
    """Prompts that are the numbers from 0."""

    def __init__(self) -> None:
        self.drawn = -1

    def __next__(self) -> list[dict[str, Any]]:
        self.drawn += 1
        return [{"prompt": self.drawn}]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


class Engine:
    """Engine double that answers at once, or raises EngineLostError."""

    def __init__(self, name: str, fails: type[EngineError] | None = None) -> None:
        self.name, self.fails, self.requests, self.weights = name, fails, [], 0

    async def generate(self, tokens: list[int], sampling: Sampling, n: int) -> list[Completion]:
        self.requests.append(tokens[0])
        if self.fails is not None:
            raise self.fails(f"{self.name} has failed")
        return [Completion((number,), (-0.5,), "stop", self.weights, self.weights) for number in range(n)]

    async def version(self) -> int:
        if self.fails is EngineLostError:
            raise EngineLostError(f"{self.name} is lost")
        return self.weights

    async def revive(self) -> bool:
        return False

    async def close(self) -> None:
        pass


@contextmanager
def collecting(monkeypatch: pytest.MonkeyPatch, *engines: Engine, **changes: Any) -> Iterator[RolloutCollector]:
    monkeypatch.setattr(collector, "BACKOFF_S", 0.01)

    def decode(tokens: Sequence[int]) -> str:
        return str(tokens[0])

    grading: dict[str, Any] = {"reward": lambda response, prompt: float(response)}
    grading |= {name: changes.pop(name) for name in ("reward", "locate") if name in changes}
    episodes = GradedResponses(lambda prompt: [prompt["prompt"]], decode, **grading)
    changes = {"sampling": Sampling(max_tokens=1)} | changes
    task = Task(episodes, decode, group_size=2, **changes)
    rollouts = RolloutCollector(engines, Prompts(), RolloutBuffer(4, 0), task)
    try:
        rollouts.updated(0)
        rollouts.start(step=0, offset=0)
        yield rollouts
    finally:
        rollouts.close()


def test_a_prompt_that_fails_at_one_engine_is_answered_by_another(monkeypatch):
    failing, sound = Engine("one", fails=EngineError), Engine("two")
    with collecting(monkeypatch, failing, sound) as rollouts:
        groups = rollouts.take(0, DEADLINE_S)
    assert groups is not None
    assert sorted(group.number for group in groups) == sorted(sound.requests) == [0, 1, 2, 3]
    assert len(failing.requests) == 1  # although it has the least work


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_prompt_whose_logprobs_are_not_finite_is_answered_by_another_engine(value, monkeypatch, caplog):
    class Broken(Engine):
        async def generate(self, tokens: list[int], sampling: Sampling, n: int) -> list[Completion]:
            completions = await super().generate(tokens, sampling, n)
            return [*completions[:-1], replace(completions[-1], logprobs=(value,))]

    broken, sound = Broken("one"), Engine("two")
    with caplog.at_level(logging.WARNING), collecting(monkeypatch, broken, sound) as rollouts:
        groups = rollouts.take(0, DEADLINE_S)
    assert groups is not None
    assert all(trajectory.logprobs == (-0.5,) for group in groups for trajectory in group.trajectories)
    with (
        collecting(monkeypatch, Broken("one")) as rollouts,
        pytest.raises(EngineError, match=f"log-probability {value}"),
    ):
        rollouts.take(0, DEADLINE_S)


def test_prompt_of_an_evaluation_that_fails_at_one_engine_is_answered_by_another(monkeypatch):
    failing, sound = Engine("one", fails=EngineError), Engine("two")
    with collecting(monkeypatch, failing, sound) as rollouts:
        groups = rollouts.evaluate([{"prompt": number} for number in range(100, 104)], 1.0, 2).result(DEADLINE_S)
        assert [group.trajectories[0].prompt_tokens for group in groups] == [(100,), (101,), (102,), (103,)]
        sound.fails = EngineError
        with pytest.raises(EngineError, match="has failed"):
            rollouts.evaluate([{"prompt": 104}], 1.0, 2).result(DEADLINE_S)
        assert [*failing.requests, *sound.requests].count(104) == collector.ATTEMPTS


def test_prompt_failed_by_all_engines_raises_the_engines_error(monkeypatch):
    engines = Engine("one", fails=EngineError), Engine("two", fails=EngineError)
    with collecting(monkeypatch, *engines) as rollouts, pytest.raises(EngineError, match="has failed"):
        rollouts.take(0, DEADLINE_S)
    request_counts = [engine.requests.count(number) for number in range(4) for engine in engines]
    assert max(request_counts) <= 2
    assert (
        max(first + second for first, second in zip(request_counts[::2], request_counts[1::2], strict=True))
        == collector.ATTEMPTS
    )


def test_group_with_signal_resets_the_count(monkeypatch):
    """Give every seventh prompt a signal: the limit of 11 is never reached and batches of four fill."""
    reward = lambda response, prompt: float(response) * (prompt["prompt"] % 7 == 6)  # noqa: E731
    with collecting(monkeypatch, Engine("one"), reward=reward, max_equal_groups=11) as rollouts:
        groups = rollouts.take(0, DEADLINE_S)
    assert groups is not None
    assert [group.number % 7 for group in groups] == [6, 6, 6, 6]


def test_a_reward_that_never_returns_keeps_no_process_alive():
    program = """
import time
from megascend.apps.rl.rollout.episodes import on_daemon_thread
for _ in range(3):
    on_daemon_thread(lambda: time.sleep(1000))
"""
    subprocess.run([sys.executable, "-c", program], timeout=DEADLINE_S, check=True)


def test_reward_that_is_cancelled_ends_the_run(monkeypatch):
    def cancelled(response, prompt):
        raise asyncio.CancelledError

    with (
        collecting(monkeypatch, Engine("one"), reward=cancelled) as rollouts,
        pytest.raises(DataError, match=r"cancelled was cancelled at prompt \d, although the run has not ended"),
    ):
        rollouts.take(0, DEADLINE_S)


def test_what_a_reward_function_writes_into_its_example_stays_its_own(monkeypatch):
    seen = []

    def judge(response: str, example: Any) -> float:
        seen.append(json.dumps(example))
        example["prompt"], example["cache"] = -1, object()
        return float(response)

    engine = Engine("one")
    with collecting(monkeypatch, engine, reward=judge) as rollouts:
        rollouts.take(0, DEADLINE_S)
        json.dumps(rollouts.state_dict())
    assert sorted(seen) == sorted([json.dumps({"prompt": number}) for number in range(4)] * 2)


class Seeded(Engine):
    """Engine double that records the seed of every response, as vLLM and SGLang derive it."""

    def __init__(self) -> None:
        super().__init__("seeded")
        self.seeds: list[int] = []

    async def generate(self, tokens: list[int], sampling: Sampling, n: int) -> list[Completion]:
        assert sampling.seed is not None
        self.seeds += [sampling.seed + number for number in range(n)]
        return [Completion((number,), (-0.5,), "stop", self.weights, self.weights) for number in range(n)]


def test_no_two_responses_of_a_run_have_one_seed(monkeypatch):
    seeds = {
        collector._seed(run, number) + child
        for run in (1234, 1235)
        for number in range(-500, 5_000)
        for child in range(32)
    }
    assert len(seeds) == 2 * 5_500 * 32
    assert min(seeds) >= 0
    engine = Seeded()
    with collecting(monkeypatch, engine, sampling=Sampling(1, seed=7)) as rollouts:
        rollouts.take(0, DEADLINE_S)
        trained = len(engine.seeds)
        prompts = [{"prompt": number} for number in range(4)]
        rollouts.evaluate(prompts, 1.0, 8).result(DEADLINE_S)
        rollouts.evaluate(prompts, 1.0, 8).result(DEADLINE_S)
    assert len(set(engine.seeds)) == trained + 32
    assert engine.seeds[trained:][:32] == engine.seeds[trained:][32:], "evaluations are compared with each other"
