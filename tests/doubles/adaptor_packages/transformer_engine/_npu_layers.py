"""Layers whose kernels are the NPU's."""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from torch import Tensor

from megascend.reference.te import attention, linear, norms


class RMSNorm(norms.RMSNorm):
    """RMSNorm by ``npu_rms_norm``."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)


class LayerNormLinear(linear.LayerNormLinear):
    """A norm, by ``npu_rms_norm`` if it is RMSNorm, followed by a linear layer."""

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        if self.layer_norm_bias is not None:
            return super().forward(inp, is_first_microbatch)
        normed = rms_norm(inp, self.layer_norm_weight, self.eps, self.zero_centered_gamma)
        results = [self._product(normed)]
        if self.return_bias:
            results.append(self.bias.to(inp.dtype))
        if self.return_layernorm_output:
            results.append(normed)
        return results[0] if len(results) == 1 else tuple(results)


class DotProductAttention(attention.DotProductAttention):
    """Attention by ``npu_fusion_attention`` where it is causal and on one context parallel rank."""

    def forward(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layout = kwargs.get("qkv_format") or self.qkv_format
        mask_type = kwargs.get("attn_mask_type") or self.attn_mask_type
        fused = (
            self._cp()[1] == 1
            and mask_type in ("causal", "padding_causal")
            and (layout == "thd" or (layout == "sbhd" and mask_type == "causal"))
            and kwargs.get("cu_seqlens_q_padded") is None
            and self.softmax_offset is None
            and value_layer.shape[-1] == key_layer.shape[-1]
        )
        if not fused:
            return super().forward(query_layer, key_layer, value_layer, *args, **kwargs)
        lengths: dict[str, Any] = {}
        if layout == "thd":
            # The kernel takes the ends of the samples, without the leading 0.
            lengths["actual_seq_qlen"] = kwargs["cu_seqlens_q"].tolist()[1:]
            lengths["actual_seq_kvlen"] = kwargs["cu_seqlens_kv"].tolist()[1:]
            query, key, value = query_layer, key_layer, value_layer
        else:
            query, key, value = (x.flatten(2) for x in (query_layer, key_layer, value_layer))
        out = torch_npu.npu_fusion_attention(
            query,
            key,
            value,
            query_layer.shape[-2],
            "TND" if layout == "thd" else "SBH",
            atten_mask=compressed_triangle(query.device),
            scale=self.softmax_scale,
            pre_tockens=65536,
            next_tockens=0,
            keep_prob=1 - self._dropout()[0],
            sparse_mode=2,
            **lengths,
        )[0]
        return out.flatten(1) if layout == "thd" else out


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool) -> Tensor:
    """Compute the norm with the fused operator."""
    return torch_npu.npu_rms_norm(x, weight + 1 if zero_centered_gamma else weight, epsilon=eps)[0]


def compressed_triangle(device: torch.device) -> Tensor:
    """Return the 2048 x 2048 mask that ``sparse_mode`` 2 requires."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


LAYERS = {"RMSNorm": RMSNorm, "LayerNormLinear": LayerNormLinear, "DotProductAttention": DotProductAttention}
