"""Reward functions by name, and prompt files: what is wrong with one is said with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascend.errors import ConfigError, DataError
from megascend.rollout.prompts import parse_prompt, read_prompts
from megascend.rollout.rewards import checked, load_reward

CODE = """
def right(response, example):
    return float(response == example["answer"])

def one(response):
    return 1.0

def broken(response, example):
    return example["missing"]

LIMIT = 3
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(CODE)
    return path


def test_a_reward_is_found_in_a_file_and_in_a_module(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_reward(f"{code}:right")("4", {"answer": "4"}) == 1.0
    monkeypatch.syspath_prepend(code.parent)
    assert load_reward("my_rewards:right")("4", {"answer": "5"}) == 0.0


def test_a_reward_that_cannot_be_used_is_refused(code: Path) -> None:
    for name, message in {
        "right": "must name a function as",
        f"{code}:wrong": "no function 'wrong'; functions there: right, one, broken",
        f"{code}:LIMIT": "no function 'LIMIT'",
        f"{code}:one": "must take .response, example.",
        "no.such.module:f": "cannot be imported: ModuleNotFoundError",
        str(code.parent / "none.py:f"): "there is no file",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_reward(name)
    code.write_text("1 / 0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_reward(f"{code}:right")


def test_what_a_reward_does_wrong_shows_the_response(code: Path) -> None:
    with pytest.raises(DataError, match="raised KeyError: 'missing'; the response was 'abc'"):
        checked(load_reward(f"{code}:broken"), "abc", {})
    for value in (float("nan"), None, "1"):
        with pytest.raises(DataError, match="not a finite number; the response was 'abc'"):
            checked(lambda response, example, value=value: value, "abc", {})
    assert checked(lambda response, example: True, "abc", {}) == 1.0


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "2+2=", "answer": "4"}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    assert [sorted(prompt) for prompt in read_prompts(path)] == [["answer", "prompt"], ["messages"]]
    path.write_text("\n")
    with pytest.raises(DataError, match="no prompt in it"):
        read_prompts(path)
    with pytest.raises(DataError, match="not a file"):
        read_prompts(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"prompt": ""}',
        '{"prompt": "a", "messages": []}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "assistant", "content": "yes"}]}',
    ],
)
def test_a_bad_line_is_named(line: str) -> None:
    with pytest.raises(DataError, match=r"^prompts:7: "):
        parse_prompt(line, "prompts:7")
