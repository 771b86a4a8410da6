"""Activations that a layer drops in its forward pass and computes again in the backward pass.

``full`` keeps what a layer gets, and the routing of its tokens. ``selective`` keeps results that take long to compute, too, by
torchtitan's rule: attention, and every second product of matrices (its operators ``mm`` and ``addmm``); norms, rotary embeddings,
activations, and the products of experts, whose results are much larger than their work, are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megascend.changes import patch
from megascend.engines.fsdp import routing, varlen

Granularity = Literal["none", "full", "selective"]

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_ATTENTION = (
    varlen.varlen_attention._opoverload,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)


def recompute(layers: Sequence[nn.Module], granularity: Granularity) -> None:
    """Have each of ``layers`` recomputed by itself. Hooks of a layer, ``fully_shard``'s among them, are not repeated."""
    if granularity == "none":
        return
    for layer in layers:
        run = _recomputed(layer.forward, contexts(granularity))
        patch(layer, "forward", run, f"its activations are computed again in the backward pass ({granularity})")


def contexts(granularity: Granularity) -> Callable[[], Any]:
    """``context_fn`` of ``torch.utils.checkpoint``."""
    return routing.recomputation_contexts if granularity == "full" else _selective


def _recomputed(forward: Callable[..., Any], context_fn: Callable[[], Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=context_fn, **kwargs)

    return run


def _selective() -> Any:
    return create_selective_checkpoint_contexts(partial(_policy, {True: 0, False: 0}))


def _policy(products: dict[bool, int], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """``products`` so far in the recomputation, and in the forward pass."""
    if operator in _PRODUCTS:
        products[context.is_recompute] += 1
        if products[context.is_recompute] % 2:
            return CheckpointPolicy.MUST_SAVE
    elif operator in _ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    return routing.policy(context, operator)
