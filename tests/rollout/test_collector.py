"""Prompts that an engine fails at go to others; when there are none, the run ends with the engine's words."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from megascend.errors import DataError, EngineLostError
from megascend.rollout import collector
from megascend.rollout.buffer import RolloutBuffer
from megascend.rollout.collector import RolloutCollector, Task
from megascend.rollout.controller import client
from weightwire.engine import Completion, Sampling

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
        self.name, self.lost, self.asked, self.version = name, lost, [], 0

    async def generate(self, tokens: list[int], sampling: Sampling, n: int) -> list[Completion]:
        self.asked.append(tokens[0])
        if self.lost:
            raise EngineLostError(f"{self.name} is lost")
        return [Completion((number,), (-0.5,), "stop", self.version, self.version) for number in range(n)]

    async def close(self) -> None:
        pass


@contextmanager
def collecting(monkeypatch: pytest.MonkeyPatch, *engines: Engine, **changes: Any) -> Iterator[RolloutCollector]:
    monkeypatch.setattr(collector, "BACKOFF_S", 0.01)
    task = Task(
        encode=lambda prompt: [prompt["prompt"]],
        decode=lambda tokens: str(tokens[0]),
        reward=lambda response, prompt: float(response),
        sampling=Sampling(max_tokens=1),
        group_size=2,
    )
    task = replace(task, **changes)
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


def test_an_engine_that_does_not_close_is_left_with_a_warning(monkeypatch, caplog):
    """The run's own error is told, and not that its end took too long."""

    async def hang() -> None:
        await asyncio.Event().wait()

    engine = Engine("one")
    engine.close = hang
    assert client.RELEASE_S < collector.CLOSE_S
    monkeypatch.setattr(collector, "CLOSE_S", 0.05)
    with caplog.at_level(logging.WARNING), collecting(monkeypatch, engine) as found:
        found.take(0, DEADLINE_S)
    assert "did not close within 0.05 s" in caplog.text


def test_prompts_that_all_engines_fail_at_end_the_run_with_the_engines_words(monkeypatch):
    engines = Engine("one", lost=True), Engine("two", lost=True)
    with collecting(monkeypatch, *engines) as found, pytest.raises(EngineLostError, match="is lost"):
        found.take(0, DEADLINE_S)
    asked = [engine.asked.count(number) for number in range(4) for engine in engines]
    assert max(asked) <= 2
    assert max(first + second for first, second in zip(asked[::2], asked[1::2], strict=True)) == collector.ATTEMPTS


@pytest.mark.parametrize(
    ("reward", "shown"),
    [
        (lambda response, prompt: 0.0, "gave the 80 responses 0 to all of them"),
        (lambda response, prompt: 1e-12 * float(response), "gave the 80 responses 1e-12 to all of them"),
        (lambda response, prompt: float(prompt["prompt"] % 2), "gave the 80 responses 0 to 1"),
    ],
    ids=["constant", "tiny differences", "constant for each prompt"],
)
def test_groups_without_signal_end_the_run_at_the_bound(reward, shown, monkeypatch, caplog):
    engine = Engine("one")
    with (
        collecting(monkeypatch, engine, reward=reward, most_equal=40) as found,
        caplog.at_level(logging.WARNING),
        pytest.raises(DataError, match="step 1: the last 40 groups have no learning signal") as raised,
    ):
        found.take(0, DEADLINE_S)
    message = str(raised.value)
    assert shown in message
    assert "test_collector.py:<lambda>" in message
    assert "rollout.max_groups_without_signal (40)" in message
    (warning,) = caplog.messages
    assert "the last 20 groups have no learning signal" in warning
    assert "the run ends after 40" in warning
    assert len(engine.asked) < 50


def test_responses_that_are_all_cut_off_are_told(monkeypatch):
    class CutOff(Engine):
        async def generate(self, tokens, sampling, n):
            return [replace(each, finish_reason="length") for each in await super().generate(tokens, sampling, n)]

    with (
        collecting(monkeypatch, CutOff("one"), reward=lambda response, prompt: 0.0, most_equal=4) as found,
        pytest.raises(DataError, match="8 of them were cut off at max_tokens: 1"),
    ):
        found.take(0, DEADLINE_S)


def test_one_group_with_signal_begins_the_count_anew(monkeypatch):
    """Every seventh prompt teaches something, so a bound of eight is never reached and batches of four fill."""
    reward = lambda response, prompt: float(response) * (prompt["prompt"] % 7 == 6)  # noqa: E731
    with collecting(monkeypatch, Engine("one"), reward=reward, most_equal=11) as found:
        groups = found.take(0, DEADLINE_S)
    assert groups is not None
    assert [group.number % 7 for group in groups] == [6, 6, 6, 6]


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "no bound"])
def test_without_a_bound_groups_without_signal_are_warned_of(kept, monkeypatch, caplog):
    """Also where they are learned from."""
    settings = {"drop_equal": False, "most_equal": 8} if kept else {}
    reward = lambda response, prompt: float(response) * (prompt["prompt"] >= 50)  # noqa: E731
    engine = Engine("one")
    with caplog.at_level(logging.WARNING), collecting(monkeypatch, engine, reward=reward, **settings) as found:
        for step in range(12 if kept else 1):
            engine.version = step
            found.updated(step)
            assert found.take(step, DEADLINE_S) is not None
    assert [message.split(" groups")[0].split()[-1] for message in caplog.messages] == ["20", "40"]
    assert "no limit is set" in caplog.messages[0]


def test_what_a_reward_raises_names_the_line_of_the_prompt(monkeypatch):
    with (
        collecting(
            monkeypatch, Engine("one"), reward=lambda *_: None, locate=lambda p: f"p.jsonl:{p['prompt']}"
        ) as found,
        pytest.raises(DataError, match=r"^p.jsonl:\d: the reward function .* returned None, not a finite number"),
    ):
        found.take(0, DEADLINE_S)


def test_a_reward_that_never_returns_is_named(monkeypatch):
    never = threading.Event()

    def stuck(response, prompt):
        never.wait()
        return 0.0

    with collecting(monkeypatch, Engine("one"), reward=stuck, locate=lambda prompt: "p.jsonl:3") as found:
        assert found.take(0, 0.2) is None
        assert "stuck has not returned for 0 s for the prompt at p.jsonl:3" in found.hold_up()
        never.set()
    with collecting(monkeypatch, Engine("one")) as found:
        assert found.take(0, DEADLINE_S) is not None
        assert found.hold_up() == "no engine has answered"
        assert found.graded() >= 4


def test_a_reward_that_never_returns_keeps_no_process_alive():
    program = """
import time
from megascend.rollout.collector import Graders
graders = Graders(2)
for _ in range(3):
    graders.submit({}, lambda: time.sleep(1000))
graders.close()
"""
    subprocess.run([sys.executable, "-c", program], timeout=DEADLINE_S, check=True)
