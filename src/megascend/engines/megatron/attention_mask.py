"""Checks of attention masks on NPUs: only masks that the fused attention kernel interprets correctly may reach it.

``npu_fusion_attention`` has its own rules. For causal attention MindSpeed passes it a compressed 2048 x 2048 triangle and
``sparse_mode`` 2; a dense mask in its place is rejected by the kernel, or, if the sequence happens to have 2048 tokens, read
as the compressed triangle. So a dense causal mask is never passed on: causal attention is implicit. Padding needs no mask either:
packing separates samples, and padded positions come last and have weight 0.

Rules from CANN's documentation of FlashAttentionScore: boolean or uint8, True where attention is *not* allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megascend.errors import DataError

MaskType = Literal["causal", "general"]


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention call: batch, query heads of this rank, query and key tokens."""

    batch: int
    heads: int
    queries: int
    keys: int

    def accepted(self) -> list[tuple[int, ...]]:
        """Return the shapes of a dense mask that the kernel accepts."""
        b, n, q, k = self.batch, self.heads, self.queries, self.keys
        return list(dict.fromkeys([(q, k), (1, 1, q, k), (b, 1, q, k), (b, n, q, k)]))


def kernel_mask(
    mask: Tensor | None,
    shape: AttentionShape,
    mask_type: MaskType = "causal",
    positions: Tensor | None = None,
    packed: bool = False,
) -> Tensor | None:
    """Return the mask to pass to an NPU's fused attention, or None if the kernel needs none.

    Args:
        mask: the caller's; True where attention is not allowed (Megatron's convention), or None.
        shape: shapes in the attention call.
        mask_type: ``causal`` for models with implicit causal attention, ``general`` if only the mask decides (MindSpeed's
            ``attention_mask_type``).
        positions: int64 [queries], position of each query in the full sequence, if this rank holds only a part of it
            (context parallelism); default: 0, 1, 2...
        packed: the batch holds several samples in one row (THD).
    """
    if mask is None:
        if mask_type == "general":
            raise DataError(
                "attention_mask_type 'general' without a mask is full attention in the kernel; pass the mask"
            )
        return None
    if mask.dtype not in (torch.bool, torch.uint8):
        raise DataError(
            f"attention mask of {mask.dtype}: the NPU kernel takes bool or uint8 with True where attention is not allowed; "
            "turn an additive or float mask into one"
        )
    if packed:
        raise DataError(
            "an attention mask with packed samples: the NPU kernel separates them by their lengths; pass None as the mask"
        )
    if mask_type == "causal":
        _require_causal(mask, shape, positions)
        return None
    if tuple(mask.shape) not in shape.accepted():
        raise DataError(
            # Waits for the device; general masks are rare, and an undefined row would be silent.
            f"attention mask of shape {list(mask.shape)}: the NPU kernel takes {_shape_list(shape.accepted())} here "
            "(queries x keys, with or without batch and heads); expand it to one of them"
        )
    if bool(mask.bool().all(-1).any()):
        raise DataError(
            "attention mask with a row that allows no key at all: the NPU kernel's result is undefined there"
        )
    return mask


def _require_causal(mask: Tensor, shape: AttentionShape, positions: Tensor | None) -> None:
    """Check that a mask is the causal triangle, apart from padding at the end. Waits for the device."""
    if tuple(mask.shape) not in shape.accepted():
        raise DataError(
            f"attention mask of shape {list(mask.shape)} on a causal model: pass None for causal attention, or its triangle in "
            f"one of the shapes {_shape_list(shape.accepted())}"
        )
    if positions is None:
        positions = torch.arange(shape.queries, device=mask.device)
    keys = torch.arange(shape.keys, device=mask.device)
    future = keys[None, :] > positions[:, None]
    blocked = mask.bool().reshape(-1, shape.queries, shape.keys)
    # A query that may not attend to itself is padding.
    padding = blocked.gather(2, positions[None, :, None].expand(len(blocked), -1, -1))[..., 0]
    real = ~padding
    # Padding must come last: a real query's keys up to itself are then all real, and its row is the triangle's.
    if not bool(((blocked == future) | ~real[..., None]).all()):
        raise DataError(
            "attention mask on a causal model that is not the causal triangle, which the fused NPU attention would ignore: pad "
            "on the right with weight 0, or pack"
        )


def install(chunks: Sequence[torch.nn.Module], config: Any) -> None:
    """Check every mask that is passed to these model chunks by :func:`kernel_mask`.

    Args:
        chunks: mcore-bridge's models of this rank.
        config: their ModelConfig.
    """
    heads = config.num_attention_heads // config.tensor_model_parallel_size

    def check(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # GPTModel.forward begins with input_ids, position_ids, attention_mask.
        mask = args[2] if len(args) > 2 else kwargs.get("attention_mask")
        # MindSpeed's; with other providers, decoders are causal.
        mask_type: MaskType = getattr(config, "attention_mask_type", "causal")
        if mask is None and mask_type == "causal":
            return args, kwargs
        ids = args[0] if args else kwargs["input_ids"]
        position_ids = args[1] if len(args) > 1 else kwargs["position_ids"]
        batch, queries = ids.shape
        context = config.context_parallel_size
        mask = kernel_mask(
            mask,
            AttentionShape(batch, heads, queries, queries * context),
            mask_type,
            position_ids[0] if context > 1 else None,
            packed=kwargs.get("packed_seq_params") is not None,
        )
        if len(args) > 2:
            return (*args[:2], mask, *args[3:]), kwargs
        # Also if the caller passed a mask: under causal attention the kernel must not get any.
        return args, kwargs | {"attention_mask": mask}

    for chunk in chunks:
        chunk.register_forward_pre_hook(check, with_kwargs=True)


def _shape_list(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
