"""The slice of a model: small, and with every setting that the model has."""

from __future__ import annotations

import pytest

from megascend.selfcheck.slicing import CannotSliceError, slice_model
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
    found = sliced(LLAMA_8B | {"hidden_act": "gelu", "rms_norm_eps": 1e-5})
    assert found.config["num_hidden_layers"] == 2
    assert (found.config["num_attention_heads"], found.config["num_key_value_heads"]) == (4, 2)
    assert (found.config["hidden_size"], found.config["head_dim"]) == (512, 128)
    assert (found.config["intermediate_size"], found.config["vocab_size"]) == (96, 128)
    assert (found.config["hidden_act"], found.config["rms_norm_eps"]) == ("gelu", 1e-5)
    assert found.config["pad_token_id"] is None
    assert not found.not_shown


def test_models_that_differ_in_sizes_alone_have_one_slice() -> None:
    other = LLAMA_8B | {"num_hidden_layers": 80, "vocab_size": 32000, "intermediate_size": 28672, "use_cache": False}
    assert sliced(other) == sliced(LLAMA_8B)
    assert sliced(LLAMA_8B | {"tie_word_embeddings": True}) != sliced(LLAMA_8B)


@pytest.mark.parametrize(
    ("heads", "groups", "expected"), [(32, 32, (4, 4)), (71, 1, (4, 1)), (40, 8, (4, 2)), (2, 1, (2, 1))]
)
def test_heads_keep_their_kind_of_sharing(heads, groups, expected) -> None:
    config = tiny_config("qwen3", num_attention_heads=heads, num_key_value_heads=groups, head_dim=16)
    found = sliced(config).config
    assert (found["num_attention_heads"], found["num_key_value_heads"]) == expected


def test_a_head_size_of_its_own_stays_apart_from_the_hidden_size() -> None:
    apart = tiny_config("qwen3", hidden_size=1024, num_attention_heads=16, head_dim=128)
    assert sliced(apart).config["hidden_size"] == 64
    derived = {**tiny_config("qwen2", hidden_size=1024, num_attention_heads=16), "head_dim": None}
    assert sliced(derived).config["hidden_size"] == 4 * 64


def test_lengths_lie_on_both_sides_of_where_rope_changes() -> None:
    """On the scale of the slice: long samples have 40 and 48 tokens, RoPE changes at 24 of 24 * 131072 / 8192 positions."""
    found = sliced(LLAMA_8B)
    assert found.config["rope_scaling"]["original_max_position_embeddings"] == 24
    assert found.config["max_position_embeddings"] == 24 * 16
    assert found.lengths == (3, 8, 13, 40, 48)
    # A run that allows no sample beyond it is checked without one.
    assert sliced(LLAMA_8B, longest=8192).lengths == (3, 8, 13)


@pytest.mark.parametrize("place", ["top", "rope_scaling", "rope_parameters"])
def test_where_a_setting_stands_is_kept(place) -> None:
    rope = {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS}
    config = {name: value for name, value in LLAMA_8B.items() if name != "rope_scaling"}
    if place == "top":
        config |= {"original_max_position_embeddings": 4096, "rope_scaling": rope}
    else:
        config[place] = rope | {"original_max_position_embeddings": 4096}
    found = sliced(config).config
    assert set(found) == {name for name in config if name != "torch_dtype"} | {"dtype"}
    holder = found if place == "top" else found[place]
    assert holder["original_max_position_embeddings"] == 24
    assert found["max_position_embeddings"] == 24 * 32


def test_layers_of_every_kind_are_shown() -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    found = sliced(tiny_config("qwen3", num_hidden_layers=48, layer_types=kinds * 12))
    assert found.config["num_hidden_layers"] == 4
    assert found.config["layer_types"] == kinds
    moe = sliced(tiny_config("qwen3_moe", num_hidden_layers=24, first_k_dense_replace=3))
    assert moe.config["num_hidden_layers"] == 4
    spaced = sliced(tiny_config("qwen3_moe", num_hidden_layers=24, decoder_sparse_step=2, mlp_only_layers=[4, 20]))
    assert (spaced.config["num_hidden_layers"], spaced.config["mlp_only_layers"]) == (2, [])
    deep = sliced(tiny_config("qwen3", num_hidden_layers=24, layer_types=["full_attention"] * 20 + ["other"] * 4))
    assert deep.config["num_hidden_layers"] == 8
    assert "layers from 8 on" in deep.not_shown


def test_a_window_is_reached_where_it_is_in_force_and_not_where_it_is_left_out() -> None:
    config = tiny_config("qwen3", sliding_window=4096)
    assert sliced(config, window=True).config["sliding_window"] == 16
    assert sliced(config).config["sliding_window"] == 4096
    assert max(sliced(tiny_config("qwen3", sliding_window=32), longest=32).lengths) <= 32


def test_experts_and_their_groups_stay() -> None:
    config = tiny_config("qwen3_moe", num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, n_group=8)
    found = sliced(config).config
    assert (found["num_experts"], found["num_experts_per_tok"], found["n_group"]) == (128, 8, 8)
    assert found["moe_intermediate_size"] == 32


def test_what_cannot_be_sliced_says_why() -> None:
    with pytest.raises(CannotSliceError, match="num_hidden_layers"):
        sliced({"model_type": "gpt2", "hidden_size": 64})
    with pytest.raises(CannotSliceError, match="text_config"):
        sliced(LLAMA_8B | {"text_config": {}})
