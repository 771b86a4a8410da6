"""Prompts of a run: how they become tokens, what ends an answer, and what is refused before training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megascend.app.generation import Answering, sample_of
from megascend.app.run_log import quoted
from megascend.cli.random_checkpoint import byte_tokenizer
from megascend.config import Data, Generation
from megascend.data.samples import Limits
from megascend.errors import ConfigError


def prepare(model: Path, limit: int = 256, **settings: object) -> Answering:
    """With the tokenizer of `megascend new-model`: a token for every byte, ChatML."""
    return Answering.prepare(Generation(**settings), Data(path=model), byte_tokenizer(256), Limits(limit), model)


def test_a_text_is_the_users_turn_or_continued_as_it_is(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(256)
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one?"}]
    found = prepare(tmp_path, prompts=["one?", system], seed=7)
    texts = [tokenizer.decode(list(tokens)) for tokens in found.prompts]
    assert texts[0].endswith("user\none?<|im_end|>\n<|im_start|>assistant\n")
    assert texts[1].startswith("<|im_start|>system\nBe brief.")
    assert found.titles == ("one?", "system: Be brief.\nuser: one?")
    assert [each.seed for each in found.sampling] == [7, 8]
    plain = prepare(tmp_path, prompts=["one?"], chat=False)
    assert tokenizer.decode(list(plain.prompts[0])) == "one?"


def test_what_ends_an_answer(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(256)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in prepare(tmp_path, prompts=["one?"]).sampling[0].stop_token_ids  # what closes a turn in ChatML
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    named = Answering.prepare(
        Generation(prompts=["one?"], chat=False), Data(path=tmp_path), tokenizer, Limits(256), tmp_path
    )
    assert {5, 6, tokenizer.eos_token_id} == set(named.sampling[0].stop_token_ids)


def test_what_cannot_work_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'one\?' has \d+ tokens and generation.max_tokens is 64: together more than 40 "
    ):
        prepare(tmp_path, 40, prompts=["one?"])
    with pytest.raises(ConfigError, match="there twice"):
        Generation(prompts=["one?", "one?"])
    with pytest.raises(ConfigError, match=r"generation\.chat: false"):
        Generation(prompts=[[{"role": "user", "content": "one?"}]], chat=False)
    with pytest.raises(ConfigError, match="prompts"):
        Generation(prompts=[])
    tokenizer = byte_tokenizer(256)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"no chat template; set generation\.chat: false"):
        Answering.prepare(Generation(prompts=["one?"]), Data(path=tmp_path), tokenizer, Limits(256), tmp_path)


class Counting:
    """Of a backend with two data parallel ranks, the first one's view: a model that counts bytes up."""

    def shard(self, samples):
        return samples[::2]

    def next_token_logits(self, samples, adapter):
        logits = torch.zeros(len(samples), 300)
        for row, sample in enumerate(samples):
            logits[row, int(sample.input_ids[-1]) + 1] = 1.0
        return list(logits)

    def gather_by_data_rank(self, mine):
        count = self.open
        other = dict.fromkeys(range(1, count, 2), (65, 0.0))
        return [mine, other]


def test_every_data_parallel_rank_samples_its_share_and_all_know_the_answers(tmp_path: Path) -> None:
    found = prepare(tmp_path, prompts=["ab", "xy", "cd"], chat=False, max_tokens=3)
    backend = Counting()
    backend.open = 3
    answers = found.answer(backend, None)
    assert [answer.text for answer in answers] == ["cde", "AAA", "efg"]
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert [found.due(step, last=7) for step in (1, 7, 100)] == [False, True, True]


def test_nothing_of_a_prompt_is_a_target() -> None:
    assert sample_of([3, 4]).weights.tolist() == [0.0, 0.0]


def test_long_answers_are_cut_in_the_terminal_alone() -> None:
    assert quoted("one?\nand?", "two") == "  > one?\n    and?\n    two"
    assert quoted("one?", "\x1b[2Jtwo") == "  > one?\n    \ufffd[2Jtwo"
    assert quoted("one?", "x" * 1000) == f"  > one?\n    {'x' * 400}..."
