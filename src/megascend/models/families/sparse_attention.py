"""DeepSeek-V3.2 and GLM-5: latent attention to the keys that an indexer chooses for each query (sparse attention, DSA).

DeepSeek-V4, whose attention has compressed keys as well, is refused here with the reason.

The indexer scores all earlier tokens with a few small heads. Its choice has no gradient, and transformers computes it without
one: fine-tuning leaves its weights as they are, on every engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

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

    def unsupported(self, config: Config) -> list[str]:
        problems = super().unsupported(config)
        kind, width, rotated = config.get("model_type"), config.get("index_head_dim"), config.get("qk_rope_head_dim")
        if config.get("q_lora_rank") is None:
            problems.append(
                f"q_lora_rank: null: the indexer of {kind} projects its queries from those of attention; {OTHER_ENGINE}"
            )
        if width and rotated and width < 2 * rotated:
            problems.append(
                f"index_head_dim: {width} is below twice qk_rope_head_dim: {rotated}; mcore-bridge would rotate a part of the "
                f"indexer's heads only; {OTHER_ENGINE}"
            )
        if dropout := config.get("attention_dropout"):
            problems.append(
                f"attention_dropout: {dropout} does not reach the sparse attention of Megatron-Core; {OTHER_ENGINE}"
            )
        if _sharing(config) is None:
            problems.append(
                f"indexer_types: {config['indexer_types']} has no period; Megatron-Core shares the choice of keys between layers "
                f"at equal distances only; {OTHER_ENGINE}"
            )
        return problems

    def unsupported_stages(self, config: Config, chunk_layers: Sequence[int]) -> list[str]:
        indexed, problems = IndexedAttention.from_config(config), super().unsupported_stages(config, chunk_layers)
        if indexed is None:
            return problems
        firsts = accumulate(chunk_layers[:-1], initial=0)
        cut = [first for first, size in zip(firsts, chunk_layers, strict=True) if size and not indexed.computing[first]]
        if cut:
            stages = len(chunk_layers)
            problems.append(
                f"parallel.pipeline x virtual_pipeline = {stages} stages begin with layer {cut[0]}, which uses keys chosen in "
                "the stage before it (indexer_types: shared); choose stages whose first layers have an indexer of their own"
            )
        return problems


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


@dataclass(frozen=True)
class CompressedAttention(Architecture):
    """DeepSeek-V4, which no release of Megatron-Core computes: mcore-bridge 1.6.5 builds it on a development version."""

    def unsupported(self, config: Config) -> list[str]:
        return [
            f"{config.get('model_type')}: mcore-bridge builds it on a development version of Megatron-Core; releases up to 0.19 "
            "lack its compressed attention (experimental_attention_variant: dsv4_hybrid, modules csa and "
            "deepseek_v4_hybrid_attention), its hyper-connections (module hyper_connection) and experts chosen by token ids "
            "(moe_n_hash_layers); use engine single"
        ]


REFUSED = (CompressedAttention(("deepseek_v4",)),)
"""Declarations of families that engine megatron only refuses; other engines train them as undeclared ones."""
