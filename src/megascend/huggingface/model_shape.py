"""The sizes of a model that decide which parallel layouts fit it, read from a Hugging Face config. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megascend.errors import ConfigError


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer.

    Attributes:
        num_query_groups: key/value heads; equal to ``num_heads`` without grouped-query attention (and with MLA).
        ffn_hidden_size: width of the dense MLPs, or None if every layer is a mixture of experts.
        num_experts: routed experts of an MoE layer, or None for a dense model.
        moe_ffn_hidden_size: width of one routed expert, or None for a dense model.
        shared_expert_ffn_hidden_size: width of all shared experts together, or None if there are none.
        max_position: longest sequence the model was made for, or None if the config does not say.
        tied: True if the output layer is the embedding.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_query_groups: int
    vocab_size: int
    ffn_hidden_size: int | None
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    shared_expert_ffn_hidden_size: int | None = None
    max_position: int | None = None
    tied: bool = False

    @property
    def is_moe(self) -> bool:
        return self.num_experts is not None

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a ``config.json`` (Qwen2/3, Llama, Mixtral, Qwen3-MoE, DeepSeek and GPT-2 style names).

        Of a multimodal model, the text part (``text_config``) is read.

        Raises:
            ConfigError: a size is missing or is not a positive number; the message names the keys looked for.
        """
        text = config.get("text_config")
        if text is not None and not isinstance(text, Mapping):
            raise ConfigError(f"the model config's text_config must be an object, found {text!r:.60}")
        if text is not None:
            config = {"tie_word_embeddings": config.get("tie_word_embeddings", False), **text}
        num_heads = required_size(config, "num_attention_heads", "n_head", "num_heads")
        has_latent_attention = config.get("kv_lora_rank") is not None  # MLA: K and V are made per head
        num_experts = optional_size(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        ffn = optional_size(config, "intermediate_size", "ffn_hidden_size", "n_inner")
        hidden_size = required_size(config, "hidden_size", "n_embd", "d_model")
        moe_ffn = optional_size(config, "moe_intermediate_size", "expert_intermediate_size") or ffn
        shared = optional_size(config, "shared_expert_intermediate_size")
        shared_count = optional_size(config, "n_shared_experts", "num_shared_experts")
        if shared is None and shared_count and moe_ffn:
            shared = shared_count * moe_ffn
        if num_experts is None and ffn is None:
            if "n_embd" not in config:
                raise ConfigError("the model config has no intermediate_size")
            ffn = 4 * hidden_size  # GPT-2's default
        return cls(
            hidden_size=hidden_size,
            num_layers=required_size(config, "num_hidden_layers", "n_layer", "num_layers"),
            num_heads=num_heads,
            num_query_groups=num_heads
            if has_latent_attention
            else optional_size(config, "num_key_value_heads", "num_query_groups", "multi_query_group_num") or num_heads,
            vocab_size=required_size(config, "vocab_size", "padded_vocab_size"),
            ffn_hidden_size=ffn if num_experts is None or _has_dense_layers(config) else None,
            num_experts=num_experts,
            moe_ffn_hidden_size=moe_ffn if num_experts is not None else None,
            shared_expert_ffn_hidden_size=shared if num_experts is not None else None,
            max_position=optional_size(config, "max_position_embeddings", "n_positions", "seq_length"),
            tied=bool(config.get("tie_word_embeddings", False)),
        )


def _has_dense_layers(config: Mapping[str, Any]) -> bool:
    """True if some layers of an MoE model have a dense MLP: DeepSeek's first layers, or Qwen's every other one."""
    return bool(
        config.get("first_k_dense_replace")
        or config.get("mlp_only_layers")
        or (config.get("decoder_sparse_step") or 1) > 1
        or (config.get("moe_layer_freq") or 1) not in (1, [1])
    )


def optional_size(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these keys that is set; zero counts as not set (configs write ``num_experts: 0``)."""
    for name in names:
        value = config.get(name)
        if value is None or value == 0:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"the model config's {name} must be a positive whole number, found {value!r:.60}")
        return value
    return None


def required_size(config: Mapping[str, Any], *names: str) -> int:
    """Like :func:`optional_size`, but an error where none is set."""
    value = optional_size(config, *names)
    if value is None:
        kind = config.get("model_type", "unknown type")
        raise ConfigError(f"the model config ({kind}) has none of {', '.join(names)}")
    return value
