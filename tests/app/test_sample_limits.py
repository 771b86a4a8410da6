"""What a sample may be is known before the model is built: the smallest limit, and the setting that it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megascend.app.run import load_tokenizer
from megascend.app.sample_limits import sample_limits
from megascend.batch.packing import plan_micro_batches, round_up
from megascend.cli.random_checkpoint import byte_tokenizer
from megascend.config import RunConfig
from megascend.errors import CheckpointError, DataError
from megascend.testing import write_tiny_checkpoint

CASES: dict[str, tuple[dict[str, Any], int, int, str]] = {
    "the model": ({}, 1, 128, "max_position_embeddings: 128"),
    "a setting": ({"batching": {"max_length": 100}}, 1, 100, "batching.max_length: 100"),
    "a micro batch": ({"batching": {"micro_batch_tokens": 91}}, 1, 91, "batching.micro_batch_tokens: 91"),
    "CP 2": ({"batching": {"micro_batch_tokens": 91}, "parallel": {"context": 2}}, 2, 88, "micro_batch_tokens: 91"),
    "CP 2 of fsdp": (
        {"batching": {"micro_batch_tokens": 91}, "parallel": {"context": 2}, "engine": "fsdp"},
        2,
        90,
        "micro_batch_tokens: 91",
    ),
    "TP 2 with SP, padded": (
        {"batching": {"micro_batch_tokens": 91, "packing": False}, "parallel": {"tensor": 2, "sequence": True}},
        2,
        90,
        "micro_batch_tokens: 91",
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", max_position_embeddings=128)


@pytest.mark.parametrize("name", CASES)
def test_the_smallest_limit_and_where_it_comes_from(name: str, model: Path) -> None:
    settings, world_size, length, setting = CASES[name]
    config = RunConfig.model_validate({"model": model, "output": "o", "data": {"path": "d"}} | settings)
    limits = sample_limits(config, world_size)
    assert limits.length == length
    assert setting in limits.setting
    # The longest sample fits into a micro batch, and with a budget as the limit one token more does not.
    budget, multiple = config.batching.micro_batch_tokens, limits.multiple
    assert plan_micro_batches([round_up(length, multiple)], [None], budget, limits.packing) == [[0]]
    if "micro_batch_tokens" in setting:
        with pytest.raises(DataError, match=r"over batching\.micro_batch_tokens"):
            plan_micro_batches([round_up(length + 1, multiple)], [None], budget, limits.packing)


def test_a_tokenizer_without_tokens_is_refused(tmp_path: Path) -> None:
    """What transformers makes of a directory whose tokenizer.json is missing."""
    byte_tokenizer(256).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert load_tokenizer(tmp_path)("ab")["input_ids"] == [97, 98]
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer"):
        load_tokenizer(tmp_path)
    empty = Tokenizer(models.BPE(vocab={"<unk>": 0}, merges=[], unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=empty, unk_token="<unk>").save_pretrained(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(CheckpointError, match=r"empty: the tokenizer knows 1 token, .*tokenizer.json"):
        load_tokenizer(tmp_path / "empty")
