"""DeepSeek-V3.2 and GLM-5 for mcore-bridge: indexers that are not trained, and scores in blocks. Import after Megatron."""

from __future__ import annotations

from typing import Any

import torch
from mcore_bridge.model.gpts.glm_moe_dsa import GlmMoeDsaLoader
from mcore_bridge.model.modules import DSAIndexer
from mcore_bridge.model.register import ModelMeta, register_model
from megatron.core.transformer.experimental_attention_variant import dsa
from torch import Tensor

from megascend.changes import patch

BLOCK_BYTES = 2**28
"""Bytes of the indexer's fp32 scores that exist at a time, by head."""


def index_scores(q: Tensor, weights: Tensor, k: Tensor, use_relu: bool = True) -> Tensor:
    """Score keys for queries: the sum over heads of ``weights * relu(q k)``, in blocks of queries.

    Megatron-Core keeps the products of all heads at once: 64 heads of 8,192 tokens are 17 GB.

    Args:
        q: [queries, batch, heads, width].
        weights: [queries, batch, heads].
        k: [keys, batch, width].

    Returns:
        fp32 [batch, queries, keys].
    """
    queries, batch, heads, _ = q.shape
    keys = k.float().permute(1, 2, 0)[:, None]  # [batch, 1, width, keys]
    rows = max(1, BLOCK_BYTES // (4 * batch * heads * max(len(k), 1)))
    blocks = []
    for start in range(0, queries, rows):
        block = slice(start, start + rows)
        products = torch.matmul(q[block].float().permute(1, 2, 0, 3), keys)  # [batch, heads, rows, keys]
        if use_relu:
            products = products.relu_()
        blocks.append(torch.einsum("bhqk,qbh->bqk", products, weights[block].float()))
    return torch.cat(blocks, dim=1)


class SparseAttentionLoader(GlmMoeDsaLoader):
    """Models whose indexers have no gradients: transformers computes the choice of keys without, and so does Megatron-Core.

    A parameter without a gradient would still decay.
    """

    def build_model(self, *args: Any, **kwargs: Any) -> Any:
        model = super().build_model(*args, **kwargs)
        for module in model.modules():
            if isinstance(module, DSAIndexer):
                module.requires_grad_(False)
        return model


patch(
    dsa,
    "rotate_activation",
    lambda x: x,
    "an orthogonal rotation of the indexer's queries and keys, made for fp8, changes none of their products",
)
patch(dsa, "_compute_index_scores", index_scores, "the indexer's scores are computed in blocks of queries")
register_model(
    ModelMeta("megascend_sparse_attention", ["deepseek_v32", "glm_moe_dsa"], loader=SparseAttentionLoader)
)
