"""Model sizes read from the config.json of every family."""

from __future__ import annotations

from typing import Any

import pytest

from megascend.errors import ConfigError
from megascend.models.checkpoint_files.info import shape_of
from megascend.runtime.topology.model_shape import ModelShape

BASE = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 1000}


def shape(**config: Any) -> ModelShape:
    return shape_of(BASE | config)


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
