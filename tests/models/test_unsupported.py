"""Every rule of model families refuses a configuration, layout or head, and accepts those beside it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from transformers import AutoConfig

from megascend.config.rules import Rule, enforce
from megascend.errors import ConfigError
from megascend.models import Architecture, architecture_named, architecture_of, expert_layers, text_config
from megascend.models.base import LINEAR
from megascend.models.checkpoint_files.info import TRAINED_HEAD, PredictionHeads
from megascend.models.checkpoint_files.scalar_head import HeadKind
from megascend.models.registry import BUILT_IN
from megascend.testing.tiny_models import tiny_config


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


PLAIN_GEMMA = {"hidden_size_per_layer_input": 0}
PLAIN, DYNAMIC = {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "dynamic", "factor": 2.0}
REFUSED = [
    (
        "attention_bias",
        {"attention_bias": True, "norm_topk_prob": True},
        ("llama", "qwen3", "qwen3_moe", "dots1", "olmoe", "deepseek_v3"),
    ),
    ("use_bias", {"use_bias": True}, ("ernie4_5", "ernie4_5_moe")),
    ("mlp_bias", {"mlp_bias": True}, ("llama",)),
    (
        "num_experts_per_tok: 1 with norm_topk_prob=true",
        {"num_experts_per_tok": 1, "norm_topk_prob": True, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
        ("qwen2_moe", "qwen3_moe", "glm4_moe", "dots1", "deepseek_v3", "olmoe"),
    ),
    (
        "sliding_window: 0 with sliding_attention in layer_types",
        {"sliding_window": 0, "layer_types": ["sliding_attention"] * 2, "num_hidden_layers": 2},
        ("qwen2_moe",),
    ),
    ("sliding_window: null with sliding_attention in layer_types", {"sliding_window": None}, ("gpt_oss",)),
    ("attention_bias: False is ignored for gpt_oss", {"attention_bias": False}, ("gpt_oss",)),
    ("decoder_sparse_step: 99", {"decoder_sparse_step": 99}, ("qwen2_moe", "qwen3_moe")),
    ("norm_topk_prob: false", {"norm_topk_prob": False}, ("deepseek_v3", "glm4_moe", "dots1")),
    ("norm_topk_prob: True is ignored", {"norm_topk_prob": True}, ("deepseek_v2",)),
    ("topk_method: group_limited_greedy", {"topk_method": "group_limited_greedy", "topk_group": 3}, ("deepseek_v2",)),
    ("topk_method: noaux_tc", {"topk_method": "noaux_tc"}, ("deepseek_v2",)),
    ("scoring_func: softmax is ignored", {"scoring_func": "softmax"}, ("deepseek_v3", "glm4_moe")),
    (
        "n_group: 4 with num_experts_per_tok=8",
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
    ("hidden_act: gelu with", {"hidden_act": "gelu"}, HYBRIDS),
    ("routed_scaling_factor: 2.5 is ignored", {"routed_scaling_factor": 2.5}, ("qwen3_next", "qwen3_5_moe_text")),
    ("norm_topk_prob: False is ignored", {"norm_topk_prob": False}, ("qwen3_5_moe_text",)),
    ("linear_num_value_heads: 5", {"linear_num_key_heads": 2, "linear_num_value_heads": 5}, HYBRIDS),
    ("decoder_sparse_step: 2 is ignored", {"decoder_sparse_step": 2}, ("qwen3_5_moe_text",)),
    ("mlp_only_layers: [1] is ignored", {"mlp_only_layers": [1]}, ("qwen3_5_moe_text",)),
    ("num_experts_per_tok: 9 with 8 experts", {"num_experts_per_tok": 9, "num_local_experts": 8}, ("mixtral",)),
    ("n_shared_experts: 0", {"n_shared_experts": 0}, ("deepseek_v3",)),
    ("conv_kernel: 3 is ignored", {"conv_kernel": 3}, ("nemotron_h",)),
    ("use_conv_bias: False is ignored", {"use_conv_bias": False}, ("nemotron_h",)),
    ("mamba_hidden_act: gelu is ignored", {"mamba_hidden_act": "gelu"}, ("nemotron_h",)),
    ("mlp_hidden_act: silu is ignored", {"mlp_hidden_act": "silu"}, ("nemotron_h",)),
    ("residual_in_fp32: True is ignored", {"residual_in_fp32": True}, ("nemotron_h",)),
    ("sliding_window: 64 is ignored", {"sliding_window": 64}, ("nemotron_h",)),
    ("time_step_limit: 0.0, 0.1 with nemotron_h", {"time_step_limit": [0.0, 0.1]}, ("nemotron_h",)),
    ("time_step_limit: 0.001, inf with nemotron_h", {"time_step_limit": [0.001, math.inf]}, ("nemotron_h",)),
    ("mamba_num_heads: 5 with n_groups=2", {"mamba_num_heads": 5, "n_groups": 2}, ("nemotron_h",)),
    ("use_bias: true with nemotron_h", {"use_bias": True}, ("nemotron_h",)),
    ("index_head_dim: 8 with qk_rope_head_dim=64", {"index_head_dim": 8}, ("deepseek_v32",)),
    ("attention_dropout: 0.1 with glm_moe_dsa", {"attention_dropout": 0.1}, ("glm_moe_dsa",)),
    (
        "indexer_types: full, shared, full, full with glm_moe_dsa",
        {"indexer_types": ["full", "shared", "full", "full"], "num_hidden_layers": 4},
        ("glm_moe_dsa",),
    ),
    ("num_kv_shared_layers: 0 with hidden_size_per_layer_input=256", {}, ("gemma4_text",)),
    ("num_kv_shared_layers: 30 with num_hidden_layers=30", {"num_kv_shared_layers": 30}, ("gemma4_text",)),
    (
        "vocab_size_per_layer_input: 300 with vocab_size=262144",
        {"num_kv_shared_layers": 4, "vocab_size_per_layer_input": 300},
        ("gemma4_text",),
    ),
    ("use_bidirectional_attention: all", {"use_bidirectional_attention": "all"} | PLAIN_GEMMA, ("gemma4_text",)),
    ("per_layer_config with gemma4_text", {"per_layer_config": {0: {"head_dim": 64}}} | PLAIN_GEMMA, ("gemma4_text",)),
    (
        "rope_parameters with gemma4_text",
        {"rope_parameters": {"sliding_attention": PLAIN, "full_attention": PLAIN | DYNAMIC}} | PLAIN_GEMMA,
        ("gemma4_text",),
    ),
    (
        "layer_types: linear_attention with llama: no test covers linear_attention on",
        {"layer_types": [LINEAR], "num_hidden_layers": 1},
        ("llama",),
    ),
    (
        "num_experts_per_tok: 1 with norm_topk_prob=true",
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
    (
        {"layer_types": ["full_attention", "sliding_attention"] * 2, "num_hidden_layers": 4, "sliding_window": 8}
        | {"use_sliding_window": True},
        ("qwen3", "gpt_oss"),
    ),
]


@pytest.mark.parametrize(
    ("starts", "settings", "arch"), [(starts, settings, arch) for starts, settings, archs in REFUSED for arch in archs]
)
def test_refusal_names_the_setting_and_the_remedy(starts, settings, arch):
    [reason] = unsupported_settings(full(arch, **settings))
    assert reason.startswith(starts)
    assert len(reason) <= 160
    assert any(remedy in reason for remedy in ("use engine fsdp", "correct config.json"))
    assert unsupported_settings({"text_config": full(arch, **settings)}) == [reason]


@pytest.mark.parametrize(("settings", "arch"), [(settings, arch) for settings, archs in HONOURED for arch in archs])
def test_supported_settings_are_not_refused(settings, arch):
    assert unsupported_settings(full(arch, **settings)) == []


SHARED_KEYS = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "enable_moe_block": False}
LAYOUTS = [
    ("parallel.tensor: 2 with parallel.context=2 and 2 key heads", "qwen3_next", {}, (2, 2), (2, 1)),
    ("parallel.tensor: 4 with 2 key heads of full attention", "gemma4", {}, (4, 1), (2, 2)),
    ("parallel.context: 2 with num_kv_shared_layers=2", "gemma4", SHARED_KEYS, (1, 2), (2, 1)),
    ("parallel.tensor: 4 with parallel.context=1 and 2 groups", "nemotron_h", {"n_groups": 2}, (4, 1), (2, 4)),
    ("parallel.tensor: 2 with parallel.context=8 and 8 heads of state spaces", "nemotron_h", {}, (2, 8), (4, 2)),
]
STAGES = [
    ("model_type: nemotron_h with stages of (2, 4) layers", "nemotron_h", {}, (2, 4), (3, 3)),
    ("num_kv_shared_layers: 2 with stages of (2, 2) layers", "gemma4", SHARED_KEYS, (2, 2), (4,)),
    ("model_type: glm_moe_dsa with stages of (1, 1, 1, 1) layers", "glm_moe_dsa", {}, (1, 1, 1, 1), (2, 2)),
]


def tiny(arch: str, **settings: Any) -> tuple[Architecture, dict[str, Any]]:
    architecture = architecture_named(arch)
    return architecture, architecture.normalise(text_config(tiny_config(arch, **settings)))


@pytest.mark.parametrize(("message", "arch", "settings", "refused", "accepted"), LAYOUTS)
def test_layout_that_does_not_divide_the_layers_is_refused(message, arch, settings, refused, accepted):
    architecture, config = tiny(arch, **settings)
    reasons = [architecture.unsupported_layout(config, tensor=t, context=c) for t, c in (refused, accepted)]
    assert reasons[0][0].startswith(message)
    assert reasons[1] == []


@pytest.mark.parametrize(("message", "arch", "settings", "refused", "accepted"), STAGES)
def test_stages_that_do_not_fit_the_layers_are_refused(message, arch, settings, refused, accepted):
    architecture, config = tiny(arch, **settings)
    (reason,) = architecture.unsupported_stages(config, refused)
    assert reason.startswith(message)
    assert architecture.unsupported_stages(config, accepted) == []


MTP = ["mtp.layers.0.norm.weight"]
HEADS: list[tuple[str, str, dict[str, Any], list[str], HeadKind]] = [
    ("mtp: train with head=scalar", "deepseek_v3", {"num_nextn_predict_layers": 1}, ["model.layers.4.x"], "scalar"),
    ("mtp: train with deepseek_v3: its checkpoint has no head", "deepseek_v3", {}, [], "lm"),
    ("mtp: train with qwen3: its heads are not built", "qwen3", {}, MTP, "lm"),
    ("mtp: train with deepseek_v3: its checkpoint has another", "deepseek_v3", {}, ["model.layers.5.x"], "lm"),
    ("mtp: train with qwen3_next: its checkpoint has another", "qwen3_next", {}, [*MTP, "mtp.layers.1.x"], "lm"),
    ("mtp: train with qwen3_next: its head's own", "qwen3_next", {}, [*MTP, "mtp.embed_tokens.weight"], "lm"),
    ("mtp: train with qwen3_next: its head's own", "qwen3_next", {"mtp_use_dedicated_embeddings": True}, MTP, "lm"),
    ("mtp: train with qwen3_next: its head has softmax", "qwen3_next", {"layer_types": [LINEAR] * 4}, MTP, "lm"),
]


@pytest.mark.parametrize(("message", "arch", "settings", "tensors", "head"), HEADS)
def test_head_that_is_not_trained_is_refused(message, arch, settings, tensors, head):
    architecture, config = tiny(arch)
    with pytest.raises(ConfigError) as raised:
        enforce(TRAINED_HEAD, PredictionHeads(architecture, config | settings, 4, head, tuple(tensors)))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("arch", "tensors"), [("deepseek_v3", ["model.layers.4.embed_tokens.weight"]), ("qwen3_next", MTP)]
)
def test_head_that_is_trained_is_accepted(arch, tensors):
    architecture, config = tiny(arch)
    config |= {"num_nextn_predict_layers": 1}
    enforce(TRAINED_HEAD, PredictionHeads(architecture, config, 4, "lm", tuple(tensors)))


def test_every_rule_has_a_case(monkeypatch):
    refusals = []
    message = Rule.message
    monkeypatch.setattr(Rule, "message", lambda rule, subject: refusals.append(rule) or message(rule, subject))
    for _, settings, archs in REFUSED:
        for arch in archs:
            unsupported_settings(full(arch, **settings))
    unsupported_settings({"model_type": "deepseek_v4"})
    for _, arch, settings, (tensor, context), _ in LAYOUTS:
        architecture, config = tiny(arch, **settings)
        architecture.unsupported_layout(config, tensor=tensor, context=context)
    for _, arch, settings, stages, _ in STAGES:
        architecture, config = tiny(arch, **settings)
        architecture.unsupported_stages(config, stages)
    for *_, arch, settings, tensors, head in HEADS:
        architecture, config = tiny(arch)
        with pytest.raises(ConfigError):
            enforce(TRAINED_HEAD, PredictionHeads(architecture, config | settings, 4, head, tuple(tensors)))
    families = [*BUILT_IN.values(), architecture_named("deepseek_v4")]
    tables = [table for family in families for table in (family.rules, family.layout_rules, family.stage_rules)]
    assert [rule.text for table in [*tables, TRAINED_HEAD] for rule in table if rule not in refusals] == []


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
