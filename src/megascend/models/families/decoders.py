"""Plain decoders: Llama, Qwen, Mistral, OLMo and others whose layers and names are Llama's, with or without experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megascend.models.base import Architecture, Config

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.0,
}
"""Expert settings of tiny Qwen mixtures."""


MIXTRAL_NAMES = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
)
"""Parts of names in checkpoints of Mixtral and of MiniMax-M2, which took them over."""


@dataclass(frozen=True)
class WindowedDecoder(Architecture):
    """A decoder whose layers of kind ``sliding_attention``, or all of them, attend within ``sliding_window`` tokens."""

    megatron: str | None = "megascend.models.families.decoders_megatron"

    def megatron_settings(self, config: Config) -> dict[str, Any]:
        # Without a key for biases, mcore-bridge's default is to have them.
        return super().megatron_settings(config) | {"add_qkv_bias": False} | window_settings(config)


def window_settings(config: Config) -> dict[str, Any]:
    """Return Megatron-Core's window, which counts the tokens before a token and not itself, and the layers that have it."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if window is None or (kinds and "sliding_attention" not in kinds):
        return {}
    settings: dict[str, Any] = {"window_size": f"{window - 1},0"}
    if kinds and "full_attention" in kinds:
        pattern = ",".join(str(int(kind == "sliding_attention")) for kind in kinds)
        settings["window_attn_skip_freq"] = f"[{pattern}]"
    return settings


FAMILIES = (
    Architecture(
        ("llama",),
        model_class="LlamaForCausalLM",
        tiny={"attention_bias": False, "mlp_bias": False},
        proven=True,
    ),
    Architecture(("qwen2",), model_class="Qwen2ForCausalLM", biases="qkv", proven=True),
    Architecture(("qwen3",), model_class="Qwen3ForCausalLM", tiny={"attention_bias": False}, proven=True),
    Architecture(
        ("qwen3_moe",), model_class="Qwen3MoeForCausalLM", tiny={"attention_bias": False} | EXPERTS, proven=True
    ),
    Architecture(
        ("qwen2_moe",),
        proven=True,
        model_class="Qwen2MoeForCausalLM",
        biases="qkv",
        tiny={"shared_expert_intermediate_size": 64} | EXPERTS,
    ),
    Architecture(
        ("olmoe",),
        proven=True,
        model_class="OlmoeForCausalLM",
        fixed={"clip_qkv": None},
        tiny={"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "intermediate_size": 64},
    ),
    Architecture(("internlm3",), proven=True, model_class="LlamaForCausalLM", tiny={"qkv_bias": False, "bias": False}),
    WindowedDecoder(("mistral",), proven=True, model_class="MistralForCausalLM", tiny={"sliding_window": 16}),
    WindowedDecoder(
        ("mixtral",),
        proven=True,
        renamed=MIXTRAL_NAMES,
        model_class="MixtralForCausalLM",
        fixed={"router_jitter_noise": 0.0, "norm_topk_prob": True},
        tiny={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    Architecture(
        ("seed_oss",),
        megatron="megascend.models.families.decoders_megatron",
        proven=True,
        model_class="SeedOssForCausalLM",
        biases="qkv",
        fixed={"attention_out_bias": False},
        passed={"hidden_dropout": "residual_dropout"},
        tiny={
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
            "residual_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    # Not built by mcore-bridge; trained on engines fsdp and single.
    Architecture(
        ("olmo3",),
        model_class="Olmo3ForCausalLM",
        tiny={"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    Architecture(
        ("smollm3",),
        model_class="SmolLM3ForCausalLM",
        tiny={"no_rope_layers": [1, 0, 1, 1], "use_sliding_window": False, "layer_types": ["full_attention"] * 4},
    ),
)
