"""Activation checkpointing: layers drop activations in the forward pass and recompute them in the backward pass.

``full`` saves a layer's input and the routing of its tokens. ``selective`` also saves results that are expensive to compute, by
torchtitan's rule: attention, and every second matrix product (operators ``mm`` and ``addmm``); norms, rotary embeddings,
activations, and the products of experts, which are large for the time they take, are recomputed.

The routing of each token is saved: a recomputed forward pass may choose other experts (noise, nondeterministic kernels).
transformers' eager experts then raise CheckpointError; its grouped products, whose shapes do not depend on the routing, silently
give wrong gradients. The routing passes through a custom operator, whose result is saved and which is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megascend.changes import patch
from megascend.training.kernels import varlen

Granularity = Literal["none", "full", "selective"]

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_ATTENTION = (
    varlen.varlen_attention._opoverload,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)


@torch.library.custom_op("megascend::saved_routing", mutates_args=())
def saved_routing(values: Tensor) -> Tensor:
    """Return the forward pass's ``values``, also in recomputation."""
    # A custom operator must not return its input.
    return values.clone()


@saved_routing.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad


saved_routing.register_autograd(_backward)


def routing_policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save only the routing."""
    if operator is torch.ops.megascend.saved_routing.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def recompute(layers: Sequence[nn.Module], granularity: Granularity) -> None:
    """Recompute each of ``layers`` separately. Hooks of a layer, including ``fully_shard``'s, are not repeated."""
    if granularity == "none":
        return
    for layer in layers:
        forward = _recomputed(layer.forward, contexts(granularity))
        patch(layer, "forward", forward, f"activations are recomputed in the backward pass ({granularity})")


def contexts(granularity: Granularity) -> Callable[[], Any]:
    """Return ``context_fn`` of ``torch.utils.checkpoint``."""

    def full() -> Any:
        return create_selective_checkpoint_contexts(routing_policy)

    def selective() -> Any:
        # New counts for each call: checkpoint calls this once for a forward pass and its recomputation.
        return create_selective_checkpoint_contexts(partial(_selective_policy, {True: 0, False: 0}))

    return full if granularity == "full" else selective


def _recomputed(forward: Callable[..., Any], context_fn: Callable[[], Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # Nothing will be recomputed, so nothing needs to be kept for it.
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Only non-reentrant checkpoints take a context_fn.
        return checkpoint(forward, *args, use_reentrant=False, context_fn=context_fn, **kwargs)

    return run


def _selective_policy(
    products: dict[bool, int], context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Save attention and every second product; ``products`` counts them in the recomputation and in the forward pass."""
    if operator in _PRODUCTS:
        products[context.is_recompute] += 1
        if products[context.is_recompute] % 2:
            return CheckpointPolicy.MUST_SAVE
    elif operator in _ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    return routing_policy(context, operator)
