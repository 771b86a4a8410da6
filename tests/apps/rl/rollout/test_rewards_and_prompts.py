"""Reward functions by name, and prompt files: errors name the file and line."""

from __future__ import annotations

import functools
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from megascend.apps.cli.random_checkpoint import byte_tokenizer
from megascend.apps.data.columns import parse_record
from megascend.apps.data.findings import Findings
from megascend.apps.data.samples import Encoder, SampleLimits
from megascend.apps.rl.rollout.advantages import ESTIMATORS, advantages
from megascend.apps.rl.rollout.prompts import parse_prompt, prompt_tokens, read_prompts
from megascend.apps.rl.rollout.rewards import checked, load_reward, reward_name
from megascend.errors import ConfigError, DataError

CODE = """
def right(response, example):
    return float(response == example["answer"])

def one(response):
    return 1.0

def broken(response, example):
    return example["missing"]

async def later(response, example):
    return 1.0

async def stream(response, example):
    yield 1.0

class Grader:
    def __call__(self, response, example):
        return 0.5

class Later:
    async def __call__(self, response, example):
        return 0.5

grader, waiting = Grader(), Later()
LIMIT = 3
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(CODE)
    return path


def test_reward_loads_from_a_file_and_from_a_module(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_reward(f"{code}:right")("4", {"answer": "4"}) == 1.0
    monkeypatch.syspath_prepend(code.parent)
    assert load_reward("my_rewards:right")("4", {"answer": "5"}) == 0.0


def test_unusable_rewards_raise_config_error(code: Path) -> None:
    for name, message in {
        "right": "must name a function or class as",
        f"{code}:wrong": "no function or class 'wrong'; it has right, one, broken, later, stream, Grader",
        f"{code}:LIMIT": "no function or class 'LIMIT'",
        f"{code}:one": r"my_rewards.py:one\(response\) must take \(response, example\): too many",
        f"{code}:Grader": "is a class; name a function, or an instance",
        f"{code}:later": r"later is async; .* asyncio.run\(...\)",
        f"{code}:stream": "stream is async",
        f"{code}:waiting": "waiting is async",
        "no.such.module:f": "cannot be imported: ModuleNotFoundError",
        str(code.parent / "none.py:f"): "does not exist",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_reward(name)
    code.write_text("1 / 0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_reward(f"{code}:right")


@pytest.mark.parametrize(
    "value",
    [
        *(None, "1", b"1", [1.0], (1.0,), {"reward": {}}, {"reward": 1.0, "exact": None}, object(), 1j),
        *(float("nan"), float("inf"), -float("inf"), 10**400, Decimal("NaN"), Decimal("sNaN"), Decimal("1e999")),
        *(np.array([1.0]), np.ones(3), np.str_("1"), np.complex64(1), np.float32("nan"), np.datetime64("2026-01-01")),
        *(torch.ones(1), torch.ones(2, 2), torch.tensor(float("nan")), torch.tensor(1j)),
    ],
    ids=lambda value: f"{value!r:.16}",  # without addresses, which differ from worker to worker
)
def test_non_finite_reward_raises_with_value_function_and_response(value: object) -> None:
    def grade(response: str, example: object) -> object:
        return value

    message = r"test_rewards_and_prompts.py:test_non_finite_.*grade returned .*, not a finite number.*; the response was 'abc'"
    with pytest.raises(DataError, match=f"(?s){message}"):
        checked(grade, "abc", {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", [1e308, -1e308, 1.1e18, 10**30, Decimal("1e300"), torch.tensor(3e38)], ids=lambda value: f"{value!r:.24}"
)
def test_a_reward_whose_advantage_would_overflow_raises(value: object) -> None:
    with pytest.raises(DataError, match=r"returned .*, beyond 1e\+18, so that its advantage would overflow: scale it"):
        checked(lambda response, example: value, "abc", {})  # type: ignore[arg-type, return-value]
    for estimator in ESTIMATORS:
        with pytest.raises(DataError, match=r"response 1 is .*; beyond 1e\+18"):
            advantages([[0.0, float(value)]], estimator)  # type: ignore[arg-type]
        (values,) = advantages([[1e18, -1e18, 0.0]], estimator)
        assert all(abs(advantage) < 3e38 for advantage in values)


def test_mapping_without_reward_raises_with_its_names() -> None:
    """A sum of all values, as it might be expected, would count an accuracy twice."""
    message = (
        "returned a mapping without 'reward', the number that is learned from; its names: score, acc; the response was"
    )
    with pytest.raises(DataError, match=message):
        checked(lambda response, example: {"score": 1.0, "acc": 1.0}, "abc", {})
    with pytest.raises(DataError, match="returned 'no' as 'exact', not a finite number"):
        checked(lambda response, example: {"reward": 1.0, "exact": "no"}, "abc", {})  # type: ignore[dict-item, return-value]


def test_reward_exception_is_reported_with_function_and_response(code: Path) -> None:
    broken = load_reward(f"{code}:broken")
    with pytest.raises(DataError, match=r"my_rewards.py:broken raised KeyError: 'missing'; the response was 'abc'"):
        checked(broken, "abc", {})
    assert reward_name(functools.partial(broken)) == "my_rewards.py:broken"
    assert reward_name(load_reward(f"{code}:grader")) == "my_rewards.py:Grader"
    assert reward_name(max) == "max"  # type: ignore[reportArgumentType]


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "2+2=", "answer": "4"}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    assert [sorted(prompt) for prompt in read_prompts(path)] == [["answer", "prompt"], ["messages"]]
    path.write_text("\n")
    with pytest.raises(DataError, match="the file has no prompts"):
        read_prompts(path)
    with pytest.raises(DataError, match="not a file"):
        read_prompts(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "{\"prompt\": \"[{'role': 'user', 'content': 'a'}]\"}",  # as Python prints messages
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


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "20"}],
        [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": [{"type": "text", "text": "20"}]}],
        [{"role": "assistant", "content": "well", "reasoning_content": ""}, {"role": "user", "content": "so?"}],
        [{"role": "function_call", "content": json.dumps(CALL["function"])}, {"role": "observation", "content": "20"}],
    ],
)
def test_a_prompt_may_be_what_training_learns(turns: list[dict[str, Any]]) -> None:
    """Compare with the beginning of the sample that training makes of the prompt with an answer."""
    messages, tokenizer = [{"role": "user", "content": "w?"}, *turns], byte_tokenizer(4096)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}{% for c in m.tool_calls or [] %}"
        "{{ c.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    prompt = prompt_tokens(parse_prompt(json.dumps({"messages": messages}), "p:1"), tokenizer)
    learned = parse_record({"messages": [*messages, {"role": "assistant", "content": "20"}]}, "f:1")
    [sample] = Encoder(tokenizer, SampleLimits(4096), Findings()).encode(learned)
    assert sample.input_ids[: len(prompt)].tolist() == prompt
    assert prompt[-1] == ord("\n")


@pytest.mark.parametrize(
    ("record", "location"),
    [
        ({"messages": [{"role": "user", "content": "<image>what?"}], "images": ["cat.png"]}, "column 'images'"),
        ({"prompt": "what?", "image": "cat.png"}, "column 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"}]}]}, "parts of 'messages'"),
    ],
)
def test_images_of_a_prompt_are_refused_and_not_left_out(record: dict[str, Any], location: str) -> None:
    with pytest.raises(DataError) as error:
        parse_prompt(json.dumps(record), "prompts:7")
    assert str(error.value).startswith(f"prompts:7: images ({location}) are not supported in rollouts")
    assert parse_prompt(json.dumps({"prompt": "what?", "images": []}), "prompts:7")["images"] == []


def tokenizer_with_bos(*, closes: bool = False) -> PreTrainedTokenizerFast:
    """Build a byte tokenizer that begins every text with a token, like Llama's, and may end it with another."""
    tokenizer = byte_tokenizer(4096)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    ends = [("<|im_end|>", tokenizer.convert_tokens_to_ids("<|im_end|>"))] if closes else []
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=" ".join(["<s> $A", *(name for name, _ in ends)]),
        special_tokens=[("<s>", tokenizer.convert_tokens_to_ids("<s>")), *ends],
    )
    return tokenizer


@pytest.mark.parametrize("closes", [False, True], ids=["begins", "begins and closes"])
@pytest.mark.parametrize("text", ["2+2=", "<s>2+2="], ids=["without", "with the beginning in the text"])
def test_a_prompt_is_tokenised_as_in_supervised_training(text: str, closes: bool) -> None:
    tokenizer = tokenizer_with_bos(closes=closes)
    record = {"prompt": text, "completion": "4"}
    [sample] = Encoder(tokenizer, SampleLimits(99), Findings()).encode(parse_record(record, "f:1"))
    ids = [int(sample.input_ids[0]), *sample.target_ids.tolist()]
    prompt = prompt_tokens({"prompt": text}, tokenizer)
    assert tokenizer.decode(prompt) == "<s>2+2="
    assert ids[: len(prompt)] == prompt
    assert tokenizer.decode(ids[len(prompt) :]) == "4<|im_end|>"


def test_tools_and_template_variables_of_a_prompt_are_rendered_as_by_transformers() -> None:
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not think %}<no/>{% endif %}"
        "{% if brief %}<brief/>{% endif %}{% endif %}"
    )
    prompt = {"messages": [{"role": "user", "content": "up?"}]}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    variables: dict[str, Any] = {"think": True, "brief": True}
    expected: Any = tokenizer.apply_chat_template(
        prompt["messages"], tools=tools, add_generation_prompt=True, tokenize=False, **variables
    )
    line = {**prompt, "tools": tools, "chat_template_kwargs": {"think": True}}
    tokens = prompt_tokens(line, tokenizer, template_options={"think": False, "brief": True})
    assert tokenizer.decode(tokens) == expected
    tokenizer.chat_template = tokenizer.chat_template.replace("tools or []", "[]")
    with pytest.raises(DataError, match="'tools': the model's chat template does not write them"):
        prompt_tokens(line, tokenizer)
    for broken in ({"prompt": "a\ud83d"}, {"messages": [{"role": "user", "content": "a\ud83d"}]}):
        with pytest.raises(DataError, match="is half of a surrogate pair"):
            prompt_tokens(broken, tokenizer)
