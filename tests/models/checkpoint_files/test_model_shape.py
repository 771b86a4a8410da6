"""Model sizes read from the config.json of every family."""

from __future__ import annotations

from typing import Any

import pytest

from megascend.errors import ConfigError
from megascend.models.checkpoint_files.info import shape_of
from megascend.runtime.topology.model_shape import ModelShape
from megascend.testing import tiny_config

BASE = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 1000}


def shape(**config: Any) -> ModelShape:
    return shape_of(BASE | config)


def test_shape_of_a_dense_model() -> None:
    assert shape_of(tiny_config("qwen3", tie_word_embeddings=True)) == ModelShape(
        hidden_size=64,
        num_layers=4,
        num_heads=4,
        num_query_groups=2,
        vocab_size=320,
        ffn_hidden_size=128,
        max_position=512,
        tied=True,
    )


def test_without_grouped_queries_every_head_is_a_group() -> None:
    assert shape(intermediate_size=128).num_query_groups == 8
    assert shape(intermediate_size=128, num_key_value_heads=None).num_query_groups == 8


def test_qwen3_moe_has_no_dense_mlp() -> None:
    sizes = shape_of(tiny_config("qwen3_moe"))
    assert (sizes.num_experts, sizes.moe_ffn_hidden_size, sizes.ffn_hidden_size) == (4, 64, None)
    assert shape_of(tiny_config("qwen3_moe", mlp_only_layers=[0])).ffn_hidden_size == 128
    assert shape_of(tiny_config("qwen3_moe", decoder_sparse_step=2)).ffn_hidden_size == 128


def test_shape_of_mixtral() -> None:
    sizes = shape(intermediate_size=128, num_local_experts=8, num_key_value_heads=2)
    assert (sizes.num_experts, sizes.moe_ffn_hidden_size, sizes.ffn_hidden_size) == (8, 128, None)


def test_shape_of_deepseek() -> None:
    sizes = shape(
        intermediate_size=256,
        n_routed_experts=16,
        moe_intermediate_size=32,
        n_shared_experts=2,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        num_key_value_heads=4,
    )
    assert (sizes.num_experts, sizes.moe_ffn_hidden_size, sizes.ffn_hidden_size) == (16, 32, 256)
    assert sizes.shared_expert_ffn_hidden_size == 64
    assert sizes.num_query_groups == 8


def test_qwen2_moe_shared_expert() -> None:
    sizes = shape(num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=96, intermediate_size=128)
    assert sizes.shared_expert_ffn_hidden_size == 96


def test_text_part_of_a_multimodal_model() -> None:
    sizes = shape_of({"text_config": BASE | {"intermediate_size": 128}, "tie_word_embeddings": True})
    assert (sizes.hidden_size, sizes.tied) == (64, True)


def test_shape_of_gpt2() -> None:
    sizes = shape_of({"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 50, "n_positions": 64})
    assert (sizes.hidden_size, sizes.num_layers, sizes.ffn_hidden_size, sizes.max_position) == (32, 3, 128, 64)


def test_zero_experts_is_a_dense_model() -> None:
    assert not shape(intermediate_size=128, num_experts=0).is_moe


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "has none of num_attention_heads, n_head"),
        (BASE, "no intermediate_size"),
        (BASE | {"intermediate_size": "128"}, "intermediate_size must be a positive whole number, found '128'"),
        (BASE | {"intermediate_size": 128, "vocab_size": -1}, "vocab_size must be a positive whole number, found -1"),
    ],
)
def test_unusable_configs_raise_config_error(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_of(config)
