"""Refused and supported configurations, with the defaults that transformers fills in."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from megascend.models import architecture_of, expert_layers, text_config


def unsupported_settings(config: dict[str, Any]) -> list[str]:
    return architecture_of(config).unsupported(text_config(config))


def full(arch: str, **settings: Any) -> dict[str, Any]:
    return AutoConfig.for_model(arch, **settings).to_dict()


ARCHITECTURES = (
    "qwen2", "qwen3", "llama", "qwen2_moe", "qwen3_moe", "glm4", "glm4_moe", "dots1", "deepseek_v2", "deepseek_v3",
    "ernie4_5", "ernie4_5_moe", "olmoe", "gpt_oss", "minimax_m2",
)  # fmt: skip


HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *HYBRIDS])
def test_default_configurations_are_supported(arch):
    settings = {"norm_topk_prob": True} if arch == "dots1" else {}  # as published; transformers' default is refused
    assert unsupported_settings(full(arch, **settings)) == []


REFUSED = [
    (
        "attention_bias",
        {"attention_bias": True, "norm_topk_prob": True},
        ("llama", "qwen3", "qwen3_moe", "dots1", "olmoe", "deepseek_v3"),
    ),
    ("use_bias", {"use_bias": True}, ("ernie4_5", "ernie4_5_moe")),
    ("mlp_bias", {"mlp_bias": True}, ("llama",)),
    (
        "num_experts_per_tok: 1 with norm_topk_prob: true",
        {"num_experts_per_tok": 1, "norm_topk_prob": True, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
        ("qwen2_moe", "qwen3_moe", "glm4_moe", "dots1", "deepseek_v3", "olmoe"),
    ),
    ("decoder_sparse_step: 99", {"decoder_sparse_step": 99}, ("qwen2_moe", "qwen3_moe")),
    ("norm_topk_prob: false", {"norm_topk_prob": False}, ("deepseek_v3", "glm4_moe", "dots1")),
    ("norm_topk_prob: True is ignored", {"norm_topk_prob": True}, ("deepseek_v2",)),
    ("topk_method: group_limited_greedy", {"topk_method": "group_limited_greedy", "topk_group": 3}, ("deepseek_v2",)),
    ("topk_method: noaux_tc", {"topk_method": "noaux_tc"}, ("deepseek_v2",)),
    ("scoring_func: softmax is ignored", {"scoring_func": "softmax"}, ("deepseek_v3", "glm4_moe")),
    (
        "n_group: 4 ranks groups",
        {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 8},
        ("deepseek_v3", "nemotron_h"),
    ),
    ("n_group: 3", {"n_group": 3, "n_routed_experts": 16}, ("deepseek_v3", "glm4_moe")),
    ("v_head_dim: 512", {"v_head_dim": 512}, ("deepseek_v2", "deepseek_v3")),
    ("clip_qkv: 8.0", {"clip_qkv": 8.0}, ("olmoe",)),
    ("router_jitter_noise: 0.1", {"router_jitter_noise": 0.1}, ("mixtral", "minimax_m2")),
    ("rope_interleave: False", {"rope_interleave": False}, ("deepseek_v3", "glm4_moe_lite")),
    ("moe_layer_freq: 2", {"moe_layer_freq": 2}, ("deepseek_v3",)),
    ("attention_out_bias: True", {"attention_out_bias": True}, ("seed_oss",)),
    ("use_qk_norm: False", {"use_qk_norm": False}, ("minimax_m2",)),
    ("hidden_act: gelu is also", {"hidden_act": "gelu"}, HYBRIDS),
    ("routed_scaling_factor: 2.5 is ignored", {"routed_scaling_factor": 2.5}, ("qwen3_next", "qwen3_5_moe_text")),
    ("norm_topk_prob: False is ignored", {"norm_topk_prob": False}, ("qwen3_5_moe_text",)),
    ("linear_num_value_heads: 5", {"linear_num_key_heads": 2, "linear_num_value_heads": 5}, HYBRIDS),
    ("decoder_sparse_step: 2 is ignored", {"decoder_sparse_step": 2}, ("qwen3_5_moe_text",)),
    ("mlp_only_layers: [1] is ignored", {"mlp_only_layers": [1]}, ("qwen3_5_moe_text",)),
    (
        "num_experts_per_tok: 1 with norm_topk_prob: true",
        {"num_experts_per_tok": 1},
        ("qwen3_5_moe_text", "mixtral", "hy_v3", "gpt_oss"),
    ),
]
HONOURED = [
    ({"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}, ("deepseek_v2",)),
    ({"attention_bias": True}, ("qwen2", "qwen2_moe", "glm4", "glm4_moe", "gpt_oss")),
    (
        {"num_experts_per_tok": 1, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        ("qwen3_moe", "glm4_moe", "dots1", "deepseek_v3", "olmoe"),
    ),
    ({"num_experts_per_tok": 1, "norm_topk_prob": True}, ("qwen3", "llama")),  # a leftover: there are no experts
    ({"decoder_sparse_step": 2, "mlp_only_layers": [1, 3]}, ("qwen2_moe", "qwen3_moe", "qwen3_next")),
    ({"norm_topk_prob": False}, ("qwen3_next",)),
    ({"hidden_act": "silu", "decoder_sparse_step": 1, "norm_topk_prob": True}, ("qwen3_5_moe_text",)),
    ({"layer_types": ["full_attention", "sliding_attention"] * 2, "num_hidden_layers": 4}, ("qwen3", "gpt_oss")),
]


@pytest.mark.parametrize(
    ("starts", "settings", "arch"), [(starts, settings, arch) for starts, settings, archs in REFUSED for arch in archs]
)
def test_refusal_names_the_setting_and_the_remedy(starts, settings, arch):
    [reason] = unsupported_settings(full(arch, **settings))
    assert starts in reason
    assert any(remedy in reason for remedy in ("use engine fsdp", "correct config.json"))
    assert unsupported_settings({"text_config": full(arch, **settings)}) == [reason]


@pytest.mark.parametrize(("settings", "arch"), [(settings, arch) for settings, archs in HONOURED for arch in archs])
def test_supported_settings_are_not_refused(settings, arch):
    assert unsupported_settings(full(arch, **settings)) == []


def test_all_reasons_are_reported():
    assert len(unsupported_settings(full("llama", attention_bias=True, mlp_bias=True))) == 2


@pytest.mark.parametrize(
    "settings",
    [{}, {"decoder_sparse_step": 2}, {"decoder_sparse_step": 3, "mlp_only_layers": [5]}, {"mlp_only_layers": [0]}],
)
@pytest.mark.parametrize("arch", ["qwen2_moe", "qwen3_moe"])
def test_expert_layers_match_transformers(settings, arch):
    """Compare with the layers of the Hugging Face model."""
    import torch
    from transformers import AutoModelForCausalLM

    sizes = {"num_hidden_layers": 6, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16}
    sizes |= {"num_experts": 2, "num_experts_per_tok": 1, "vocab_size": 16, "num_attention_heads": 2}
    config = AutoConfig.for_model(arch, num_key_value_heads=2, shared_expert_intermediate_size=16, **sizes, **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert expert_layers(config.to_dict()) == [hasattr(layer.mlp, "experts") for layer in model.model.layers]
