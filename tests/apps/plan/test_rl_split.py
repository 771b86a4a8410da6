"""Devices of inference engines and of the trainer: capacity and speed of engines by hand, and the balance of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megascend.apps.plan.hardware import load
from megascend.apps.plan.rl import CACHE_SHARE, DECODE_SHARE, cache_bytes, engines_on, splits, touched_share
from megascend.apps.plan.search import PlannedModel, PlanRequest
from megascend.config import TrainerConfig
from megascend.models.checkpoint_files.files import read_config
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.models.checkpoint_files.sparse_checkpoint import write_sparse_checkpoint
from megascend.models.memory.parameters import elements

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PlannedModel:
    checkpoint = write_sparse_checkpoint(tmp_path_factory.mktemp("models") / "qwen3", CONFIG)
    return PlannedModel.from_checkpoint(inspect_checkpoint(checkpoint), read_config(checkpoint))


def test_cache_holds_keys_and_values_of_every_layer(model: PlannedModel) -> None:
    assert cache_bytes(model.sizes) == 2 * 4 * 2 * (2 * 64)


def test_engines_read_weights_and_cache_for_each_token(model: PlannedModel) -> None:
    device = load("h100")
    engines = engines_on(model.info, model.sizes, 4, 2048, 64, device)
    assert engines is not None
    assert (engines.tensor, engines.sequences) == (1, 16)
    weights = 2 * elements(model.info.tensors)
    read = weights + 16 * cache_bytes(model.sizes) * 1024
    assert engines.tokens_per_second == pytest.approx(4 * 16 * device.bytes_per_s * DECODE_SHARE / read)


def test_engine_spans_devices_until_the_weights_fit(model: PlannedModel) -> None:
    weights = 2 * elements(model.info.tensors)
    small = replace(load("h100"), memory=int(weights / CACHE_SHARE))
    engines = engines_on(model.info, model.sizes, 4, 2048, 64, small)
    assert engines is not None
    assert engines.tensor == 2
    assert engines.sequences == (2 * CACHE_SHARE * small.memory - weights) // (cache_bytes(model.sizes) * 2048)
    assert engines_on(model.info, model.sizes, 1, 2048, 64, small) is None


def test_few_sequences_touch_few_experts(model: PlannedModel) -> None:
    sizes = replace(model.sizes, experts=128, topk=8)
    assert touched_share(sizes, 1) == pytest.approx(8 / 128)
    assert touched_share(sizes, 1000) == pytest.approx(1.0)


def test_best_split_balances_sampling_and_training(model: PlannedModel) -> None:
    request = PlanRequest(8, 2048, 64, TrainerConfig(model=Path("model"), output=Path("run")))
    divisions = splits(model, request, load("h100"))
    assert [split.engines.devices + split.trainer.topology.world_size for split in divisions] == [8] * len(divisions)
    assert [split.seconds for split in divisions] == sorted(split.seconds for split in divisions)
    by_devices = sorted(divisions, key=lambda split: split.engines.devices)
    sampling = [split.generation_s for split in by_devices]
    assert sampling == sorted(sampling, reverse=True)
    assert divisions[0].seconds == max(divisions[0].generation_s, divisions[0].trainer.time.seconds)
