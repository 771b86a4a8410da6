"""Prompts that an engine fails at go to others; when there are none, the run ends with the engine's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megascend.errors import EngineLostError
from megascend.rollout import collector
from megascend.rollout.buffer import RolloutBuffer
from megascend.rollout.collector import RolloutCollector, Task
from megascend.rollout.engines.base import Completion, Sampling

DEADLINE_S = 60.0


class Prompts:
    """The numbers from 0 on."""

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
    """Answers at once, or is lost."""

    def __init__(self, name: str, lost: bool = False) -> None:
        self.name, self.lost, self.asked = name, lost, []

    async def generate(self, tokens: list[int], sampling: Sampling, n: int) -> list[Completion]:
        self.asked.append(tokens[0])
        if self.lost:
            raise EngineLostError(f"{self.name} is lost")
        return [Completion((number,), (-0.5,), "stop", 0, 0) for number in range(n)]

    async def close(self) -> None:
        pass


@contextmanager
def collecting(monkeypatch: pytest.MonkeyPatch, *engines: Engine) -> Iterator[RolloutCollector]:
    monkeypatch.setattr(collector, "BACKOFF_S", 0.01)
    task = Task(
        encode=lambda prompt: [prompt["prompt"]],
        decode=lambda tokens: str(tokens[0]),
        reward=lambda response, prompt: float(response),
        sampling=Sampling(max_tokens=1),
        group_size=2,
    )
    found = RolloutCollector(engines, Prompts(), RolloutBuffer(4, 0), task)
    try:
        found.start(step=0, offset=0)
        yield found
    finally:
        found.close()


def test_a_prompt_that_fails_at_one_engine_is_answered_by_another(monkeypatch):
    lost, sound = Engine("one", lost=True), Engine("two")
    with collecting(monkeypatch, lost, sound) as found:
        groups = found.take(0, DEADLINE_S)
    assert groups is not None
    assert sorted(group.number for group in groups) == sorted(sound.asked) == [0, 1, 2, 3]
    assert len(lost.asked) == 1  # although it has the least work


def test_prompts_that_all_engines_fail_at_end_the_run_with_the_engines_words(monkeypatch):
    engines = Engine("one", lost=True), Engine("two", lost=True)
    with collecting(monkeypatch, *engines) as found, pytest.raises(EngineLostError, match="is lost"):
        found.take(0, DEADLINE_S)
    asked = [engine.asked.count(number) for number in range(4) for engine in engines]
    assert max(asked) <= 2
    assert max(first + second for first, second in zip(asked[::2], asked[1::2], strict=True)) == collector.ATTEMPTS
