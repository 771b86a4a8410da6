"""What tensors each operator takes on a 910B: types, numbers of dimensions, contiguous or not, empty or not.

From op-plugin's and CANN's documentation (Ascend/op-plugin 517f2e7d, August 2026; Atlas A2). Checks of values and of shapes
against each other are the operators' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from simnpu.operators.refusal import Refusal

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
KINDS = {"floats": FLOATS, "halves": FLOATS[:2]}
TABLE = """
fast_gelu aclnnFastGelu: input floats 0-8
npu_fast_gelu aclnnFastGelu: input floats 0-8
npu_gelu aclnnGeluV2: input floats 0-8
npu_silu aclnnSilu: input floats 0-8
npu_swiglu aclnnSwiGlu: input floats 1-8 contiguous filled
npu_geglu aclnnGeGluV3: input floats 1-8
npu_scaled_masked_softmax aclnnScaledMaskedSoftmax: x floats 4-4; mask bool 0-4
npu_rms_norm aclnnRmsNorm: input floats 2-8; gamma floats 1-8
npu_add_rms_norm aclnnAddRmsNorm: x1 floats 1-8 filled; x2 floats 1-8 filled; gamma floats 1-8 filled
npu_gemma_rms_norm aclnnGemmaRmsNorm: input floats 1-8; gamma floats 1-8
npu_rotary_mul aclnnRotaryPositionEmbedding: input floats 3-4; r1 floats 3-4; r2 floats 3-4
npu_rotary_position_embedding aclnnRotaryPositionEmbedding: x floats 3-4; cos floats 3-4; sin floats 3-4
npu_apply_rotary_pos_emb aclnnApplyRotaryPosEmbV2: query floats 3-4; key floats 3-4; cos floats 3-4; sin floats 3-4
npu_fusion_attention aclnnFlashAttentionScore: query floats 0-8; key floats 0-8; value floats 0-8; pse floats 2-4
npu_fusion_attention_v2 aclnnFlashAttentionScoreV2: query floats 0-8; key floats 0-8; value floats 0-8; pse floats 1-4
npu_fusion_attention_grad aclnnFlashAttentionScoreGrad: query floats 0-8; key floats 0-8; value floats 0-8; dy floats 0-8; \
softmax_max float32 3-4; softmax_sum float32 3-4; attention_in floats 3-4
npu_fusion_attention_grad_v2 aclnnFlashAttentionScoreGradV2: query floats 0-8; key floats 0-8; value floats 0-8; dy floats 0-8; \
softmax_max float32 3-4; softmax_sum float32 3-4; attention_in floats 3-4
npu_ring_attention_update aclnnRingAttentionUpdate: prev_attn_out floats 3-3; cur_attn_out floats 3-3; \
prev_softmax_max float32 3-4; prev_softmax_sum float32 3-4; cur_softmax_max float32 3-4; cur_softmax_sum float32 3-4
npu_grouped_matmul aclnnGroupedMatmulV4: x floats 2-6; weight floats 2-3; bias float16,float32 1-2; group_list int64 1-2
npu_bmmV2 aclnnBatchMatMul: input floats,int32 2-8; mat2 floats,int32 2-8
npu_confusion_transpose aclnnConfusionTranspose: input floats,int8,int16,int32,int64,uint8 1-8
npu_linear aclnnMatmul: input floats,int32,int8 2-2; weight floats,int32,int8 2-2; bias floats,int32 1-1
npu_moe_token_permute aclnnMoeTokenPermute: tokens floats 2-2; indices int32,int64 1-2
npu_moe_token_unpermute aclnnMoeTokenUnpermute: permuted_tokens floats 2-2; sorted_indices int32 1-1; probs floats 2-2
npu_moe_init_routing aclnnMoeInitRouting: x floats 2-2; row_idx int32 2-2; expert_idx int32 2-2
npu_moe_init_routing_v2 aclnnMoeInitRoutingV3: x floats,int8 2-2; expert_idx int32 2-2; scale float32 1-2; offset float32 1-2
npu_moe_token_permute_with_routing_map aclnnMoeTokenPermuteWithRoutingMap: \
tokens floats 2-2; routing_map bool,int8,uint8 2-2; probs floats 2-2
npu_moe_token_unpermute_with_routing_map aclnnMoeTokenUnpermuteWithRoutingMap: \
permuted_tokens floats 2-2; sorted_indices int32 1-1; routing_map bool,int8,uint8 2-2; probs floats 2-2
_npu_moe_token_unpermute_with_routing_map aclnnMoeTokenUnpermuteWithRoutingMap: \
permuted_tokens floats 2-2; sorted_indices int32 1-1; routing_map bool,int8,uint8 2-2; probs floats 2-2
npu_cross_entropy_loss aclnnCrossEntropyLoss: input floats 2-2 filled; target int64 1-1; weight float32 1-1
npu_quantize aclnnAscendQuantV3: input floats 1-8; scales floats 1-8
npu_dynamic_quant aclnnDynamicQuantV2: input halves 2-8; smooth_scales halves 1-2; group_index int32 1-1
npu_dynamic_block_quant aclnnDynamicBlockQuant: x halves 2-3
npu_dynamic_mx_quant aclnnDynamicMxQuant: input halves 1-7
npu_trans_quant_param aclnnTransQuantParamV2: scale float32 1-2 contiguous filled; offset float32 1-2 contiguous filled
npu_apply_adam_w aclnnApplyAdamWV2: grad floats 0-8; out floats 0-8
npu_matmul_add_fp32 LinearOperation: x floats 2-8; weight floats 2-8; C float32 1-8
npu_groupmatmul_add_fp32 GroupedMatmulInplaceAddOperation: x floats 2-2; weight floats 2-2; group_list int64 1-1; grad float32 1-8
"""


@dataclass(frozen=True)
class Limits:
    """What one argument, a tensor or a list of tensors, may be."""

    dtypes: tuple[torch.dtype, ...]
    dimensions: range
    contiguous: bool
    filled: bool

    @classmethod
    def from_text(cls, dtypes: str, dimensions: str, *flags: str) -> Limits:
        low, _, high = dimensions.partition("-")
        kinds = [KINDS.get(name) or (getattr(torch, name),) for name in dtypes.split(",")]
        return cls(sum(kinds, ()), range(int(low), int(high) + 1), "contiguous" in flags, "filled" in flags)

    def check(self, name: str, tensor: torch.Tensor, refuse: Refusal) -> None:
        """Refuse a tensor as the kernel does."""
        if tensor.dtype not in self.dtypes:
            *most, last = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
            refuse.kernel(f"{name} must be {', '.join(most)}{' or ' if most else ''}{last}, but got {tensor.dtype}")
        if tensor.dim() not in self.dimensions:
            low, high = self.dimensions.start, self.dimensions.stop - 1
            span = f"{low}" if low == high else f"{low} to {high}"
            refuse.kernel(f"{name} must have {span} dimensions, but got {tensor.dim()}")
        if self.contiguous and not tensor.is_contiguous():
            refuse.kernel(f"{name} must be contiguous, but has strides {list(tensor.stride())} of {list(tensor.shape)}")
        if self.filled and not tensor.numel():
            refuse.kernel(f"{name} must not be empty, but is {list(tensor.shape)}")


def parsed(table: str) -> dict[str, tuple[str, dict[str, Limits]]]:
    """Return kernel and limits by operator."""
    lines = [line.partition(": ") for line in table.split("\n") if line]
    limits = {}
    for head, _, rest in lines:
        operator, kernel = head.split()
        arguments = [argument.split() for argument in rest.split("; ")]
        limits[operator] = (kernel, {name: Limits.from_text(*words) for name, *words in arguments})
    return limits


LIMITS = parsed(TABLE)


def check(operator: str, arguments: Mapping[str, Any]) -> None:
    """Refuse the first tensor of a call that is outside the operator's limits."""
    kernel, limits = LIMITS.get(operator, ("", {}))
    for name, limit in limits.items():
        value = arguments.get(name)
        if isinstance(value, torch.Tensor):
            limit.check(name, value, Refusal(operator, kernel))
        elif isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    limit.check(f"{name}[{number}]", item, Refusal(operator, kernel))
