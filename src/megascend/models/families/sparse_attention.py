"""DeepSeek-V3.2 and GLM-5: latent attention to the keys that an indexer chooses for each query (sparse attention, DSA).

Families whose layers no release of Megatron-Core has are refused here with the reason.

The indexer scores all earlier tokens with a few small heads. Its choice has no gradient, and transformers computes it without
one: fine-tuning leaves its weights as they are, on every engine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from megascend.config.rules import Rule
from megascend.models.base import OTHER_ENGINE, Architecture, Config, IndexedAttention
from megascend.models.families.deepseek import EXPERTS, LATENT, DeepSeekV3

INDEXED = "indexed_attention"
"""Entry of ``layer_types`` for a layer with sparse attention."""


@dataclass(frozen=True)
class SparseAttention(DeepSeekV3):
    """DeepSeek-V3's layers with sparse attention, which Megatron-Core computes with keys and values as one head's latents.

    Attributes:
        interleaved: the indexer rotates neighbouring features, as attention does; otherwise halves of the rotated part.
    """

    megatron: str | None = "megascend.models.families.sparse_attention_megatron"
    megatron_core: str | None = "0.19"
    router: Literal["softmax", "sigmoid"] | None = "sigmoid"
    layer_kinds: tuple[str, ...] = (INDEXED,)
    context_algorithms: tuple[str, ...] | None = ("all_gather",)
    without_gradient: tuple[str, ...] = (".indexer.",)
    # The projection from the latent is multiplied into queries and outputs as a matrix, without the layer that has adapters.
    without_adapters: tuple[str, ...] = ("kv_b_proj", "indexer.wq_b", "indexer.wk", "indexer.weights_proj")
    interleaved: bool = False

    def normalise(self, config: Config) -> dict[str, Any]:
        # GLM-5's authors state a period, or a letter for each layer; transformers writes a list.
        normalised = super().normalise(config)
        pattern, layers = normalised.get("index_topk_pattern"), normalised.get("num_hidden_layers")
        if normalised.get("indexer_types") is None and layers is not None:
            if pattern is not None:
                kinds = ["full" if kind in ("F", "full") else "shared" for kind in pattern]
            else:
                period, offset = normalised.get("index_topk_freq") or 1, normalised.get("index_skip_topk_offset", 2)
                kinds = ["shared" if max(layer - offset + 1, 0) % period else "full" for layer in range(layers)]
            normalised["indexer_types"] = kinds
        return normalised

    def megatron_settings(self, config: Config) -> dict[str, Any]:
        period, offset = _sharing(config) or (1, 0)
        return super().megatron_settings(config) | {
            "experimental_attention_variant": "dsa",
            "qk_layernorm": True,
            "dsa_indexer_rotary_interleaved": self.interleaved,
            "dsa_indexer_k_norm_epsilon": 1e-6,  # that of transformers, independent of the other norms
            "dsa_indexer_topk_freq": period,
            "dsa_indexer_skip_topk_offset": offset,
        }

    rules = (
        *DeepSeekV3.rules,
        Rule(
            "index_head_dim with qk_rope_head_dim={qk_rope_head_dim}: mcore-bridge would rotate a part of heads below twice "
            f"this only; {OTHER_ENGINE}",
            lambda s: (s["index_head_dim"] or sys.maxsize) < 2 * (s["qk_rope_head_dim"] or 0),
        ),
        Rule(
            f"attention_dropout with {{model_type}}: it does not reach Megatron-Core's sparse attention; {OTHER_ENGINE}",
            lambda s: bool(s["attention_dropout"]),
        ),
        Rule(
            "indexer_types with {model_type}: Megatron-Core shares the choice of keys at equal distances only; "
            f"{OTHER_ENGINE}",
            lambda s: _sharing(s.config) is None,
        ),
    )
    stage_rules = (
        Rule(
            "model_type with stages of {chunk_layers} layers: one begins with a layer that uses keys chosen before it; set a "
            "pipeline_layout whose stages begin with an indexer",
            lambda s: _begins_without_an_indexer(s.config, s.chunk_layers),
        ),
    )


def _begins_without_an_indexer(config: Config, chunk_layers: Sequence[int]) -> bool:
    indexed = IndexedAttention.from_config(config)
    firsts = accumulate(chunk_layers[:-1], initial=0)
    return indexed is not None and any(
        size > 0 and not indexed.computing[first] for first, size in zip(firsts, chunk_layers, strict=True)
    )


def _sharing(config: Config) -> tuple[int, int] | None:
    """Return the period of layers with an indexer, and Megatron-Core's number of the layer that it counts from.

    Layers before that one have an indexer, too. None if the layers have no period.
    """
    indexed = IndexedAttention.from_config(config)
    if indexed is None or all(indexed.computing):
        return 1, 0
    layers = indexed.computing
    for period in range(2, len(layers) + 1):
        for offset in range(1, len(layers) + 1):
            if layers == tuple(max(layer + 1 - offset, 0) % period == 0 for layer in range(len(layers))):
                return period, offset
    return None


INDEXER = {"index_n_heads": 12, "index_head_dim": 24, "index_topk": 8}
"""Indexer of tiny models; with fewer heads some scores would all be 0, and the choice among them that of a sort."""
TINY = {name: value for name, value in (LATENT | EXPERTS | INDEXER).items() if name != "first_k_dense_replace"} | {
    "attention_bias": False,
    # Two spellings of dense layers could contradict each other.
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
FAMILIES = (
    SparseAttention(
        ("deepseek_v32",),
        proven=True,
        model_class="DeepseekV32ForCausalLM",
        tiny=TINY | {"n_group": 2, "topk_group": 1},
    ),
    SparseAttention(
        ("glm_moe_dsa",),
        proven=True,
        model_class="GlmMoeDsaForCausalLM",
        interleaved=True,
        # GLM-5.2's indexers serve several layers.
        tiny=TINY | {"n_group": 1, "topk_group": 1, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
)


REFUSED = (
    Architecture(("deepseek_v4",), unreleased=("compressed attention and hyper-connections", "use engine single")),
    Architecture(
        ("deepseek_v41",),
        unreleased=(
            "its compressed attention and lookup tables",
            "wait for the next one, and transformers' release with it",
        ),
    ),
    Architecture(
        ("glm5_next",),
        text_type="glm5_next_text",
        unreleased=("pooled indexers and its hyper-connections", "wait for the release after it"),
    ),
)
"""Declarations of families that engine megatron only refuses: mcore-bridge 1.6.5 builds them on a development version.

DeepSeek-V4, V4.1-Flash and GLM-5.3-Flash need modules ``csa``, ``deepseek_v4_hybrid_attention`` and ``hyper_connection``, and
GLM-5.3-Flash a patch of them that mcore-bridge ships. Other engines train DeepSeek-V4 as an undeclared family.
"""
