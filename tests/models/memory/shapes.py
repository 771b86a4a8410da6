"""Checkpoints' headers by a model's sizes, without files."""

from __future__ import annotations

import math
from typing import Any

from megascend.models.checkpoint_files.files import TensorHeader
from megascend.models.checkpoint_files.info import ModelInfo, shape_of

QWEN3_1_7B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
QWEN3_4B = QWEN3_1_7B | {
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "intermediate_size": 9728,
}
SIX_LAYERS_OF_30B_A3B = QWEN3_1_7B | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def info_of(config: dict[str, Any]) -> ModelInfo:
    """Build the result of ``inspect_checkpoint`` for a Qwen3 or Qwen3-MoE checkpoint."""
    hidden, head, experts = config["hidden_size"], config["head_dim"], config.get("num_experts", 0)
    query, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (query, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, query),
            prefix + "self_attn.q_norm.weight": (head,),
            prefix + "self_attn.k_norm.weight": (head,),
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
        if experts:
            shapes[prefix + "mlp.gate.weight"] = (experts, hidden)
        width = config["moe_intermediate_size"] if experts else config["intermediate_size"]
        for mlp in [f"{prefix}mlp.experts.{expert}." for expert in range(experts)] or [prefix + "mlp."]:
            shapes |= {
                mlp + "gate_proj.weight": (width, hidden),
                mlp + "up_proj.weight": (width, hidden),
                mlp + "down_proj.weight": (hidden, width),
            }
    return ModelInfo(
        shape=shape_of(config),
        tensors={name: TensorHeader("BF16", shape) for name, shape in shapes.items()},
        parameter_count=sum(math.prod(shape) for shape in shapes.values()),
        active_matmul_parameters=0,
        attention_width=query,
    )
