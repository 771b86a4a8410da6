"""Fusion of QKV split, QK-norm and rotary embedding into one kernel, forward and backward, in Megatron's self-attention.

Megatron splits the projection, applies QK-norm, and later the rotary embedding; each step reads and writes all of q, k and v, and
autograd concatenates the gradients of the parts. Here attention is called without the rotary angles, and the method that
computes q, k and v applies them together with the rest (:mod:`megascend.training.kernels.qkv_rope`).

:func:`unsupported_reason` decides once per module whether the kernel fits, :meth:`FusedQkv._rotation` again for each call. In all
cases that are not known to be equivalent, Megatron's own code runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from mcore_bridge.model import GPTModel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megascend.changes import patch
from megascend.errors import PlatformError
from megascend.training.kernels.head_sizes import rotary_fits, width_fits
from megascend.training.kernels.qkv_rope_plain import QkvRope

REASON = "QK-norm, rotary embedding and the split of q, k and v in one kernel"
UNKNOWN_ARGUMENTS = (
    "key_value_states",
    "inference_context",
    "inference_params",
    "rotary_pos_cos",
    "rotary_pos_sin",
    "rotary_pos_cos_sin",
)
"""Arguments of attention with which Megatron computes q, k and v differently."""


class Rotation(NamedTuple):
    """Angles [positions, 1, 1, rotary width], and the starts of packed sequences, or None."""

    angles: Tensor
    starts: Tensor | None


def install(chunks: Sequence[Any], compute: QkvRope, device_type: str = "cuda") -> int:
    """Use ``compute`` in every self-attention of ``chunks`` that it fits, and return how many. Parameters are not moved.

    Args:
        chunks: mcore-bridge's models of this rank.
        device_type: type of device that ``compute`` supports.
    """
    layers = list(_fitting(chunks, device_type))
    for attention in layers:
        fused = FusedQkv(attention, compute)
        patch(attention, "forward", fused.forward, REASON)
        patch(attention, "get_query_key_value_tensors", fused.get_query_key_value_tensors, REASON)
    return len(layers)


def _fitting(chunks: Sequence[Any], device_type: str) -> Iterator[Any]:
    for chunk in chunks:
        rotary = getattr(chunk, "rotary_pos_emb", None)
        # The kernel assumes that the second half of a row of angles repeats the first, which holds for these classes only.
        if type(rotary) is not RotaryEmbedding or rotary.rotary_interleaved:
            continue
        if getattr(type(chunk), "_get_rotary_pos_emb", None) is not GPTModel._get_rotary_pos_emb:
            continue
        for layer in chunk.decoder.layers:
            attention = getattr(layer, "self_attention", None)
            if attention is not None and unsupported_reason(attention, device_type) is None:
                yield attention


def unsupported_reason(attention: Any, device_type: str) -> str | None:
    """Return the reason why a layer's q, k and v are left to Megatron, or None."""
    kind = type(attention)
    if (
        # Identity of the methods: a subclass that overrides one may do something between them.
        not isinstance(attention, SelfAttention)
        or kind.forward is not Attention.forward
        or kind.get_query_key_value_tensors is not SelfAttention.get_query_key_value_tensors
    ):
        return f"{kind.__name__} overrides Megatron's self-attention"
    config: Any = attention.config
    width = attention.hidden_size_per_attention_head
    obstacles = {
        "its methods are patched already": bool({"forward", "get_query_key_value_tensors"} & vars(attention).keys()),
        f"not on {device_type}": next(attention.parameters()).device.type != device_type,
        "a rotary embedding that is not Transformer Engine's of rotated halves": (
            not config.apply_rope_fusion or config.position_embedding_type != "rope" or config.rotary_interleaved
        ),
        "latent attention, or an output gate": (
            config.multi_latent_attention or getattr(config, "attention_output_gate", False)
        ),
        "a rotary embedding that scales": (
            _yarn_get_concentration_factor_from_config(config) != 1.0 or config.attention_scaling != 1.0
        ),
        "a layer without rotary embedding": (config.no_rope_freq and config.no_rope_freq[attention.layer_number - 1]),
        "context parallelism": config.context_parallel_size > 1,
        "more tensor parallel ranks than heads of keys": config.num_query_groups < config.tensor_model_parallel_size,
        "a setting that changes how q, k and v are made": (
            config.fused_single_qkv_rope or config.flash_decode or config.test_mode
        ),
        "products in 8 bits or less": config.fp8 or getattr(config, "fp4", None),
        "activations that are moved to the host": getattr(config, "fine_grained_activation_offloading", False),
        f"heads of {width}": not width_fits(width),
        "a QK-norm that is no plain RMSNorm over a head": not _norms_fit(attention, width),
    }
    return next((reason for reason, present in obstacles.items() if present), None)


def _norms_fit(attention: Any, width: int) -> bool:
    """Check that q and k have no norm, or plain RMSNorms over a head with the same epsilon."""
    norms: tuple[Any, Any] = (attention.q_layernorm, attention.k_layernorm)
    if all(_is_none(norm) for norm in norms):
        return True
    return all(_fits(norm, width) for norm in norms) and norms[0].eps == norms[1].eps


class FusedQkv:
    """Replacement of two methods of one self-attention module."""

    def __init__(self, attention: Any, compute: QkvRope) -> None:
        self._attention, self._compute = attention, compute
        self._forward, self._split = attention.forward, attention.get_query_key_value_tensors
        self._norms = () if _is_none(attention.q_layernorm) else (attention.q_layernorm, attention.k_layernorm)
        self._pending: Rotation | None = None  # passed from forward() to get_query_key_value_tensors()

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run attention, in supported calls without rotary angles, since q, k and v are already rotated."""
        rotation = self._rotation(hidden_states, args, kwargs)
        if rotation is None:
            return self._forward(hidden_states, *args, **kwargs)
        self._pending = rotation
        try:
            output = self._forward(hidden_states, *args, **(kwargs | {"rotary_pos_emb": None}))
            if self._pending is not None:
                raise PlatformError(
                    f"{type(self._attention).__name__} of layer {self._attention.layer_number} has not called "
                    "get_query_key_value_tensors, so its rotary embedding is missing; this megatron-core is not supported"
                )
            return output
        finally:
            self._pending = None

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return q, k and v [tokens, batch, heads, width]; rotated within :meth:`forward`."""
        rotation, attention = self._pending, self._attention
        if rotation is None or kwargs.get("output_gate") or not kwargs.get("split_qkv", True):
            return self._split(hidden_states, *args, **kwargs)
        # Marks it as used, which forward() checks.
        self._pending = None
        mixed, _ = attention.linear_qkv(hidden_states)
        norms = None
        if self._norms:
            for norm in self._norms:  # Megatron's DDP waits in these hooks for overlapped parameter gathers
                for hook in norm._forward_pre_hooks.values():
                    hook(norm, ())
            query, key = self._norms
            norms = query.weight, key.weight, query.eps
        return self._compute(
            mixed,
            *rotation,
            norms,
            attention.num_query_groups_per_partition,
            attention.hidden_size_per_attention_head,
        )

    def _rotation(self, hidden_states: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Rotation | None:
        """Return the rotation of this call, or None to leave it to Megatron. Does not wait for the device."""
        config, packed = self._attention.config, kwargs.get("packed_seq_params")
        angles = kwargs.get("rotary_pos_emb")
        # Megatron passes a table for q and one for k; the kernel has one for both.
        if isinstance(angles, tuple) and len(angles) == 2 and angles[0] is angles[1]:
            angles = angles[0]
        supported = (
            len(args) <= 1  # the mask
            and all(kwargs.get(name) is None for name in UNKNOWN_ARGUMENTS)
            and config.apply_rope_fusion
            and not any(_has_other_hooks(norm) for norm in self._norms)
        )
        if not (supported and isinstance(angles, Tensor) and self._fits(angles)):
            return None
        # In sbhd, the format of rows with shared prefixes, each row has its own angles, as without packing.
        if packed is not None and packed.qkv_format != "sbhd":
            return _packed_rotation(angles, packed)
        # Under sequence parallelism attention gets a slice of the tokens, and the angles of all.
        tokens = hidden_states.shape[0] * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
        return Rotation(angles, None) if len(angles) == tokens else None

    def _fits(self, angles: Tensor) -> bool:
        """Check whether the kernel reads such a table of angles."""
        width, rotary = self._attention.hidden_size_per_attention_head, angles.shape[-1]
        return (
            angles.dim() == 4
            and angles.shape[1] == angles.shape[2] == 1
            and angles.dtype == torch.float32
            and angles.is_contiguous()
            and not angles.requires_grad
            and rotary_fits(width, rotary)
        )


def _packed_rotation(angles: Tensor, packed: Any) -> Rotation | None:
    """Return the rotation of packed sequences; None if they are split over ranks or in an unknown format."""
    starts, longest = _starts(packed, "q"), packed.max_seqlen_q
    plain = (
        packed.qkv_format == "thd"
        # The same tensor: equal lengths without a comparison on the device.
        and starts is _starts(packed, "kv")
        and isinstance(longest, int)
        and getattr(packed, "local_cp_size", None) is None
    )
    if not plain or not isinstance(starts, Tensor) or starts.device != angles.device or starts.dtype != torch.int32:
        return None
    return Rotation(angles, starts.contiguous()) if longest <= len(angles) else None


def _starts(packed: Any, states: str) -> Any:
    """Return the starts of sequences by Megatron's rule for the rotary embedding: padded ones if there are any."""
    padded = getattr(packed, f"cu_seqlens_{states}_padded", None)
    return getattr(packed, f"cu_seqlens_{states}") if padded is None else padded


def _is_none(norm: Any) -> bool:
    return norm is None or isinstance(norm, IdentityOp)


def _fits(norm: Any, width: int) -> bool:
    """Check that a norm is a plain RMSNorm over a head."""
    weight = getattr(norm, "weight", None)
    return (
        type(norm).__name__ == "RMSNorm"
        and weight is not None
        and weight.shape == (width,)
        and weight.is_contiguous()
        and hasattr(norm, "eps")
        and getattr(norm, "bias", None) is None
        and not getattr(norm, "zero_centered_gamma", False)
    )


def _has_other_hooks(norm: Any) -> bool:
    """Check for hooks other than forward pre-hooks, which only wait for the norm's parameters."""
    return bool(
        norm._forward_hooks or norm._backward_hooks or norm._backward_pre_hooks or norm._forward_pre_hooks_with_kwargs
    )
