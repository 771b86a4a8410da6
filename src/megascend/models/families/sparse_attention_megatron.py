"""DeepSeek-V3.2 and GLM-5 for mcore-bridge: indexers that are not trained, and attention in blocks. Import after Megatron."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from mcore_bridge.model.gpts.glm_moe_dsa import GlmMoeDsaLoader
from mcore_bridge.model.modules import DSAIndexer
from mcore_bridge.model.register import ModelMeta, register_model
from megatron.core.transformer.experimental_attention_variant import dsa
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megascend.changes import patch

BLOCK_BYTES = 2**28
"""Bytes of fp32 scores of all heads that exist at a time."""


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


def attention(
    query: Tensor, key: Tensor, topk_indices: Tensor, softmax_scale: float, v_channels: int, **_: Any
) -> Tensor:
    """Attend to the chosen keys, in blocks of queries that are computed again in the backward pass.

    Megatron-Core saves four matrices of queries by keys for each head. The choice is already one of earlier tokens of a query's
    own sample, so that it is the only mask.

    Args:
        query: [queries, batch, heads, width].
        key: [keys, batch, 1, width], whose first ``v_channels`` features are the values.
        topk_indices: int64 [batch, queries, k], -1 where a query has fewer keys.

    Returns:
        [queries, batch, heads, v_channels].
    """
    queries, batch, heads = query.shape[:3]
    rows = max(1, BLOCK_BYTES // (4 * batch * heads * max(len(key), 1)))
    blocks = []
    for start in range(0, queries, rows):
        end = start + rows
        attend = partial(_attend, softmax_scale=softmax_scale, v_channels=v_channels)
        blocks.append(
            checkpoint(
                attend,
                query[start:end],
                key,
                topk_indices[:, start:end],
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    return torch.cat(blocks)


def _attend(query: Tensor, key: Tensor, topk_indices: Tensor, softmax_scale: float, v_channels: int) -> Tensor:
    # One column more, for the places of absent keys.
    chosen = torch.zeros(*topk_indices.shape[:2], len(key) + 1, dtype=torch.bool, device=key.device)
    chosen = chosen.scatter(-1, topk_indices.long() % (len(key) + 1), True)[..., :-1]
    scores = torch.matmul(query.float().permute(1, 2, 0, 3), key.float().permute(1, 2, 3, 0)) * softmax_scale
    shares = scores.masked_fill(~chosen[:, None], -torch.inf).softmax(dim=-1).to(key.dtype)
    return torch.matmul(shares, key[..., :v_channels].permute(1, 2, 0, 3)).permute(2, 0, 1, 3)


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
patch(dsa, "_unfused_absorbed_dsa_fn", attention, "sparse attention is computed in blocks, which are not saved")
register_model(ModelMeta("megascend_sparse_attention", ["deepseek_v32", "glm_moe_dsa"], loader=SparseAttentionLoader))
