"""``npu_fusion_attention`` and its gradient, in both versions.

Argument names, defaults and outputs are those of torch_npu (op_plugin_functions.yaml of Ascend/op-plugin).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simnpu.errors import NotSimulatedError
from simnpu.operators.attention_call import PSE_AFTER_SCALE, AttentionOptions, Lengths, backward, draw_seed, forward
from simnpu.operators.attention_layout import STATISTICS
from simnpu.operators.dispatch import on_host, operator, to_device, to_host
from simnpu.operators.refusal import Refusal, refuse_unsimulated

UNLIMITED = 2147483647


class FusionAttention(torch.autograd.Function):
    """The autograd node of ``npu_fusion_attention``; softmax statistics and the seed are outputs without gradient."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, pse: Tensor | None, options: AttentionOptions
    ) -> tuple[Any, ...]:
        host = options.on_host()
        output, maximum, total, numels = forward(to_host(query), to_host(key), to_host(value), to_host(pse), host)
        output, maximum, total = to_device((output, maximum, total), query.device)
        ctx.options = options
        ctx.save_for_backward(query, key, value, pse, output, maximum, total)
        ctx.mark_non_differentiable(maximum, total)
        return output, maximum, total, query.new_empty(0), options.seed, options.offset, numels

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        query, key, value, pse, output, maximum, total = map(to_host, ctx.saved_tensors)
        gradient = to_host(gradients[0])
        input_gradients = backward(query, key, value, pse, gradient, output, maximum, total, ctx.options.on_host())
        return *to_device(input_gradients, gradients[0].device), None


@operator
def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED,
    next_tockens: int = UNLIMITED,
    inner_precise: int = 0,
    prefix: Lengths = None,
    actual_seq_qlen: Lengths = None,
    actual_seq_kvlen: Lengths = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """softmax(scale * query key^T + pse, masked) value.

    Returns:
        output in the layout of the query; softmax_max and softmax_sum, float32 [B, N, S, 8] or [T, N, 8]; an empty
        tensor; seed, offset and length of the dropout mask. Without dropout those are the arguments, with it drawn.
    """
    refuse_unsimulated("npu_fusion_attention", padding_mask=padding_mask, sink=sink, dropout_mask=dropout_mask)
    options = AttentionOptions(
        head_num, input_layout, atten_mask, scale, keep_prob, pre_tockens, next_tockens, prefix, actual_seq_qlen,
        actual_seq_kvlen, sparse_mode, PSE_AFTER_SCALE, softmax_layout,
        inner_precise, *draw_seed(keep_prob, seed, offset),
    )  # fmt: skip
    return FusionAttention.apply(query, key, value, pse, options)


@operator
def npu_fusion_attention_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    inner_precise: int = 0,
    prefix: Lengths = None,
    actual_seq_qlen: Lengths = None,
    actual_seq_kvlen: Lengths = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    pse_type: int = PSE_AFTER_SCALE,
    q_start_idx: Lengths = None,
    kv_start_idx: Lengths = None,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Compute :func:`npu_fusion_attention`, with a choice of where the bias is added (``pse_type`` 0: before scaling)."""
    refuse_unsimulated(
        "npu_fusion_attention", padding_mask=padding_mask, query_rope=query_rope, key_rope=key_rope, sink=sink,
        dropout_mask=dropout_mask,
    )  # fmt: skip
    options = AttentionOptions(
        head_num, input_layout, atten_mask, scale, keep_prob, pre_tokens, next_tokens, prefix, actual_seq_qlen,
        actual_seq_kvlen, sparse_mode, pse_type, softmax_layout,
        inner_precise, *draw_seed(keep_prob, seed, offset),
    )  # fmt: skip
    return FusionAttention.apply(query, key, value, pse, options)


def gradients(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, pse: Tensor | None, softmax_max: Tensor | None,
    softmax_sum: Tensor | None, attention_in: Tensor | None, options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Compute the gradient operators' common part, on tensors of any device."""
    statistics = {"softmax_max": softmax_max, "softmax_sum": softmax_sum, "attention_in": attention_in}
    if absent := [name for name, tensor in statistics.items() if tensor is None]:
        Refusal("npu_fusion_attention_grad", "aclnnFlashAttentionScoreGrad")(f"{', '.join(absent)} must be given")
    assert softmax_max is not None
    assert softmax_sum is not None
    assert attention_in is not None
    if dy.shape != attention_in.shape or softmax_max.shape[-1] != STATISTICS or softmax_sum.shape != softmax_max.shape:
        shapes = [list(tensor.shape) for tensor in (dy, attention_in, softmax_max, softmax_sum)]
        Refusal("npu_fusion_attention_grad", "aclnnFlashAttentionScoreGrad").kernel(
            f"dy and attention_in must have one shape, softmax_max and softmax_sum another that ends in 8, but got {shapes}"
        )
    tensors: Any = map(to_host, (query, key, value, pse, dy, attention_in, softmax_max, softmax_sum))
    with torch.no_grad():
        return to_device(backward(*tensors, options=options.on_host()), query.device)


@operator
def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED,
    next_tockens: int = UNLIMITED,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Lengths = None,
    actual_seq_qlen: Lengths = None,
    actual_seq_kvlen: Lengths = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of query, key, value, pse and sink (empty), for the softmax whose maximum and sum are given."""
    refuse_unsimulated("npu_fusion_attention", padding_mask=padding_mask, sink=sink)
    options = AttentionOptions(
        head_num, input_layout, atten_mask, scale_value, keep_prob, pre_tockens, next_tockens, prefix, actual_seq_qlen,
        actual_seq_kvlen, sparse_mode, PSE_AFTER_SCALE, softmax_layout, inner_precise, seed, offset,
    )  # fmt: skip
    inputs = gradients(query, key, value, dy, pse, softmax_max, softmax_sum, attention_in, options)
    return *inputs, query.new_empty(0, dtype=torch.float32)


@operator
def npu_fusion_attention_grad_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Lengths = None,
    actual_seq_qlen: Lengths = None,
    actual_seq_kvlen: Lengths = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    pse_type: int = PSE_AFTER_SCALE,
    q_start_idx: Lengths = None,
    kv_start_idx: Lengths = None,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """Compute :func:`npu_fusion_attention_grad` for :func:`npu_fusion_attention_v2`; of the ropes there is none."""
    refuse_unsimulated(
        "npu_fusion_attention", padding_mask=padding_mask, query_rope=query_rope, key_rope=key_rope, sink=sink
    )
    options = AttentionOptions(
        head_num, input_layout, atten_mask, scale_value, keep_prob, pre_tokens, next_tokens, prefix, actual_seq_qlen,
        actual_seq_kvlen, sparse_mode, pse_type, softmax_layout, inner_precise, seed, offset,
    )  # fmt: skip
    inputs = gradients(query, key, value, dy, pse, softmax_max, softmax_sum, attention_in, options)
    return *inputs, None, None, query.new_empty(0, dtype=torch.float32)


@operator
def npu_ring_attention_update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    *,
    actual_seq_qlen: Tensor | None = None,
    input_layout: str = "SBH",
    input_softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [S, B, H], softmax_max and softmax_sum [B, N, S, 8] of attention over both parts' keys.

    Formula: Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889.
    """
    if input_layout != "SBH" or input_softmax_layout:
        raise NotSimulatedError(f"npu_ring_attention_update with layouts {input_layout!r}, {input_softmax_layout!r}")

    def merge(*parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, maximum, total, new_out, new_maximum, new_total = parts
        largest = torch.maximum(maximum, new_maximum)
        weight, new_weight = total * torch.exp(maximum - largest), new_total * torch.exp(new_maximum - largest)
        merged = weight + new_weight

        def per_element(share: Tensor) -> Tensor:  # [B, N, S, 8] -> [S, B, N, 1]
            return share[..., :1].permute(2, 0, 1, 3)

        heads = maximum.shape[1]
        old = out.float().unflatten(-1, (heads, -1)) * per_element(weight / merged)
        new = new_out.float().unflatten(-1, (heads, -1)) * per_element(new_weight / merged)
        return (old + new).flatten(-2).to(out.dtype), largest, merged

    return on_host(merge)(
        prev_attn_out, prev_softmax_max, prev_softmax_sum, cur_attn_out, cur_softmax_max, cur_softmax_sum
    )
