"""Slices of models: reduced sizes, unchanged settings."""

from __future__ import annotations

import copy
import json

import pytest

from megascend.models.selfcheck.slicing import CannotSliceError, slice_model
from megascend.testing import tiny_config

FACTORS = [1.0 + 0.1 * i for i in range(64)]
LLAMA_8B = tiny_config(
    "llama",
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=131072,
    rope_scaling={"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
)


def sliced(config, longest=10**6, window=False):
    return slice_model(config, config, longest, window)


def test_sizes_shrink_and_settings_stay() -> None:
    part = sliced(LLAMA_8B | {"hidden_act": "gelu", "rms_norm_eps": 1e-5})
    assert part.config["num_hidden_layers"] == 2
    assert (part.config["num_attention_heads"], part.config["num_key_value_heads"]) == (4, 2)
    assert (part.config["hidden_size"], part.config["head_dim"]) == (512, 128)
    assert (part.config["intermediate_size"], part.config["vocab_size"]) == (96, 128)
    assert (part.config["hidden_act"], part.config["rms_norm_eps"]) == ("gelu", 1e-5)
    assert part.config["pad_token_id"] is None
    assert not part.not_shown


@pytest.mark.parametrize(
    ("heads", "groups", "expected"), [(32, 32, (4, 4)), (71, 1, (4, 1)), (40, 8, (4, 2)), (2, 1, (2, 1))]
)
def test_slice_keeps_ratio_of_query_groups(heads, groups, expected) -> None:
    config = tiny_config("qwen3", num_attention_heads=heads, num_key_value_heads=groups, head_dim=16)
    config_of_slice = sliced(config).config
    assert (config_of_slice["num_attention_heads"], config_of_slice["num_key_value_heads"]) == expected


def test_explicit_head_size_does_not_set_the_hidden_size() -> None:
    explicit = tiny_config("qwen3", hidden_size=1024, num_attention_heads=16, head_dim=128)
    assert sliced(explicit).config["hidden_size"] == 64
    derived = {**tiny_config("qwen2", hidden_size=1024, num_attention_heads=16), "head_dim": None}
    assert sliced(derived).config["hidden_size"] == 4 * 64


def test_lengths_lie_on_both_sides_of_the_rope_switch() -> None:
    """Scale lengths to the slice: long samples have 40 and 48 tokens, RoPE changes at 24 of 24 * 131072 / 8192 positions."""
    part = sliced(LLAMA_8B)
    assert part.config["rope_scaling"]["original_max_position_embeddings"] == 24
    assert part.config["max_position_embeddings"] == 24 * 16
    assert part.lengths == (3, 8, 13, 40, 48)
    # Angles that do not depend on the length are the same for short samples: windows and limits need long ones.
    assert sliced(LLAMA_8B, longest=8192).lengths == (3, 8, 13, 40, 48)


@pytest.mark.parametrize("section", ["top", "rope_scaling", "rope_parameters"])
def test_original_positions_are_rescaled_in_each_section(section) -> None:
    rope = {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS}
    config = {name: value for name, value in LLAMA_8B.items() if name != "rope_scaling"}
    if section == "top":
        config |= {"original_max_position_embeddings": 4096, "rope_scaling": rope}
    else:
        config[section] = rope | {"original_max_position_embeddings": 4096}
    cut = sliced(config).config
    assert set(cut) == {name for name in config if name != "torch_dtype"} | {"dtype"}
    holder = cut if section == "top" else cut[section]
    assert holder["original_max_position_embeddings"] == 24
    assert cut["max_position_embeddings"] == 24 * 32
    # A run that allows no longer sample is checked without one.
    assert sliced(config, longest=4096).lengths == (3, 8, 13)


def test_slice_has_every_kind_of_layer() -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    part = sliced(tiny_config("qwen3", num_hidden_layers=48, layer_types=kinds * 12))
    assert part.config["num_hidden_layers"] == 4
    assert part.config["layer_types"] == kinds
    moe = sliced(tiny_config("qwen3_moe", num_hidden_layers=24, first_k_dense_replace=3))
    assert moe.config["num_hidden_layers"] == 4
    spaced = sliced(tiny_config("qwen3_moe", num_hidden_layers=24, decoder_sparse_step=2, mlp_only_layers=[4, 20]))
    assert (spaced.config["num_hidden_layers"], spaced.config["mlp_only_layers"]) == (2, [])
    deep = sliced(tiny_config("qwen3", num_hidden_layers=24, layer_types=["full_attention"] * 20 + ["other"] * 4))
    assert deep.config["num_hidden_layers"] == 8
    assert "layers from 8 on" in deep.not_shown


def test_samples_exceed_the_window_only_if_it_is_active() -> None:
    config = tiny_config("qwen3", sliding_window=4096)
    assert sliced(config, window=True).config["sliding_window"] == 16
    assert sliced(config).config["sliding_window"] == 4096
    assert max(sliced(tiny_config("qwen3", sliding_window=32), longest=32).lengths) <= 32


def test_slice_of_a_model_with_a_vision_tower_has_a_small_one() -> None:
    from transformers import AutoConfig

    from megascend.models.selfcheck.in_process import slice_transformers_model

    raw = tiny_config("qwen3_vl", num_hidden_layers=36, vocab_size=150000)
    raw["vision_config"] |= {"depth": 27, "num_heads": 16, "hidden_size": 1152, "deepstack_visual_indexes": [8, 16, 24]}
    config = AutoConfig.for_model(**copy.deepcopy(raw))
    full = json.loads(config.to_json_string(use_diff=False))
    part = slice_model(raw, full, 64, False)
    assert slice_transformers_model(raw, config, 64) == part
    assert (part.layers, part.text_config["vocab_size"], part.text_config["hidden_size"]) == (2, 128, 64)
    tower = part.config["vision_config"]
    sizes = [tower[name] for name in ("depth", "num_heads", "hidden_size", "out_hidden_size")]
    assert sizes == [2, 2, 144, 64]
    assert tower["deepstack_visual_indexes"] == [0, 1]
    tokens = {part.config[name] for name in full if name.endswith("_token_id") and isinstance(full[name], int)}
    assert tokens == set(range(128 - len(tokens), 128))


def test_vision_tower_of_an_undeclared_family_is_not_sliced() -> None:
    raw = tiny_config("qwen3_vl") | {"model_type": "qwen2_5_vl"}
    with pytest.raises(CannotSliceError, match="a vision tower that megascend does not declare"):
        slice_model(raw, raw, 64, False)


def test_unsliceable_configuration_raises_with_reason() -> None:
    with pytest.raises(CannotSliceError, match="num_hidden_layers"):
        sliced({"model_type": "gpt2", "hidden_size": 64})
    with pytest.raises(CannotSliceError, match="text_config"):
        sliced(LLAMA_8B | {"text_config": {}})
