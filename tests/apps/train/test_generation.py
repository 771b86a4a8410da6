"""Prompts of a run: tokenization, stop tokens, and refusals before training."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megascend.apps.cli.random_checkpoint import byte_tokenizer
from megascend.apps.data.chat import ChatTemplate
from megascend.apps.data.samples import SampleLimits
from megascend.apps.rl.engines import response_ends
from megascend.apps.sampling.request import SampledSequence, SampleRequest, SampleResult
from megascend.apps.serve.server import end_tokens
from megascend.apps.train import generation
from megascend.apps.train.generation import AnswerSampler, stop_tokens
from megascend.config import Data, Generation
from megascend.config.rl import RlConfig
from megascend.config.serve import ServeConfig
from megascend.errors import ConfigError


def prepare(model: Path, limit: int = 256, **settings: object) -> AnswerSampler:
    """Prepare prompts with the tokenizer of `megascend new-model`: one token a byte, ChatML."""
    return AnswerSampler.prepare(
        Generation(**settings), Data(path=model), byte_tokenizer(256), SampleLimits(limit), model
    )


def test_text_prompt_is_a_user_turn_or_a_prefix(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(256)
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one?"}]
    answering = prepare(tmp_path, prompts=["one?", system], seed=7)
    texts = [tokenizer.decode(list(request.prompt)) for request in answering.requests]
    assert texts[0].endswith("user\none?<|im_end|>\n<|im_start|>assistant\n")
    assert texts[1].startswith("<|im_start|>system\nBe brief.")
    assert answering.titles == ("one?", "system: Be brief.\nuser: one?")
    assert [request.params.seed for request in answering.requests] == [7, 8]
    plain = prepare(tmp_path, prompts=["one?"], chat=False)
    assert tokenizer.decode(list(plain.requests[0].prompt)) == "one?"


def test_stop_tokens_of_an_answer(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(256)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in prepare(tmp_path, prompts=["one?"]).requests[0].params.stop  # closes a turn in ChatML
    # As of a base model: its end is another, and what closes a turn is an added token of no special use.
    tokenizer.eos_token = "<|endoftext|>"
    assert "<|im_end|>" not in tokenizer.all_special_tokens
    assert stop_tokens(tokenizer, tmp_path, ChatTemplate(tokenizer)) == {end, tokenizer.eos_token_id}
    tokenizer.eos_token = "<|im_end|>"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    generation = AnswerSampler.prepare(
        Generation(prompts=["one?"], chat=False), Data(path=tmp_path), tokenizer, SampleLimits(256), tmp_path
    )
    assert {5, 6, tokenizer.eos_token_id} == set(generation.requests[0].params.stop)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [5, 6]}, "config.json": {"eos_token_id": 7}}, {5, 6}),
        ({"generation_config.json": {"eos_token_id": 5}}, {5}),
        ({"config.json": {"eos_token_id": [7, 0]}}, {0, 7}),
        ({"config.json": {"text_config": {"eos_token_id": 8}}}, {8}),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 7}}, set()),
        ({}, set()),
    ],
    ids=str,
)
def test_end_tokens_are_those_of_every_sampler(files: Any, expected: set[int], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = byte_tokenizer(256)
    end, prompts = tokenizer.eos_token_id, tmp_path / "prompts.jsonl"
    assert stop_tokens(None, tmp_path) == expected
    assert stop_tokens(tokenizer, tmp_path) == {end, *expected}
    rollout = {"prompts": prompts, "reward": "m:f", "stop": ["."]}
    ends = response_ends(tokenizer, RlConfig(model=tmp_path, output=tmp_path / "o", steps=1, rollout=rollout))
    assert (ends[0], set(ends)) == (end, {end, ord("."), *expected})
    served = ServeConfig(model=tmp_path)
    assert end_tokens(served) == (None, sorted(expected)), "it has no tokenizer"


def test_invalid_prompts_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'one\?' has \d+ tokens and generation.max_tokens is 64: together more than 40 "
    ):
        prepare(tmp_path, 40, prompts=["one?"])
    with pytest.raises(ConfigError, match="prompts"):
        Generation(prompts=[])
    tokenizer = byte_tokenizer(256)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"no chat template; set generation\.chat: false"):
        AnswerSampler.prepare(Generation(prompts=["one?"]), Data(path=tmp_path), tokenizer, SampleLimits(256), tmp_path)


class Counting:
    """Fake sampler whose model counts bytes up and ends its third answer."""

    def __init__(self, backend: object) -> None:
        assert backend == "the backend"

    def generate(self, requests: list[SampleRequest]) -> list[SampleResult]:
        assert [request.adapter for request in requests] == ["mine"] * 3
        results = []
        for number, request in enumerate(requests):
            tokens = [request.prompt[-1] + offset for offset in range(1, request.params.max_tokens + 1)]
            if number == 2:
                tokens[1:] = request.params.stop[:1]
            reason = "stop" if number == 2 else "length"
            results.append(SampleResult((SampledSequence(tuple(tokens), (0.0,) * len(tokens), reason),)))
        return results


def test_answers_exclude_the_stop_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "Sampler", Counting)
    answering = prepare(tmp_path, prompts=["ab", "xy", "cd"], chat=False, max_tokens=3)
    answers = answering.answer("the backend", "mine")
    assert [(answer.text, answer.tokens, answer.finish_reason) for answer in answers] == [
        ("cde", 3, "length"),
        ("z{|", 3, "length"),
        ("e", 2, "stop"),
    ]
    assert [answering.due(step, last=7) for step in (1, 7, 100)] == [False, True, True]


def test_sampler_error_raises_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = SimpleNamespace(generate=lambda requests: [SampleResult(error="too long")])
    monkeypatch.setattr(generation, "Sampler", lambda backend: refusing)
    with pytest.raises(ConfigError, match="'ab': too long"):
        prepare(tmp_path, prompts=["ab"]).answer("the backend", None)
