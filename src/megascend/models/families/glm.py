"""GLM-4 to GLM-4.7: partial rotary embeddings, norms after the blocks (GLM-4), experts with a router bias (GLM-4.5 and later)."""

from __future__ import annotations

from megascend.models.base import Architecture
from megascend.models.families.deepseek import EXPERTS, LATENT, DeepSeekV3

FAMILIES = (
    Architecture(
        ("glm4",),
        proven=True,
        model_class="Glm4ForCausalLM",
        biases="qkv",
        tiny={"attention_bias": False, "partial_rotary_factor": 0.5},
    ),
    DeepSeekV3(
        ("glm4_moe",),
        proven=True,
        model_class="Glm4MoeForCausalLM",
        router="sigmoid",
        prediction_head=True,
        biases="qkv",
        tiny=EXPERTS
        | {
            "n_routed_experts": 4,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": False,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
        },
    ),
    DeepSeekV3(
        ("glm4_moe_lite",),
        proven=True,
        model_class="Glm4MoeLiteForCausalLM",
        router="sigmoid",
        prediction_head=True,
        # This family lists its dense layers (mlp_layer_types): two spellings of them could contradict each other.
        tiny={name: value for name, value in (LATENT | EXPERTS).items() if name != "first_k_dense_replace"}
        | {
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": False,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
)
