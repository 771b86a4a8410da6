"""The experts that each token goes to, kept from the forward pass to its recomputation.

A recomputed forward pass may route a token elsewhere (noise, kernels whose sums differ). transformers' eager experts then raise
CheckpointError; its grouped products, whose shapes do not depend on the routing, silently give the gradient of another model.
Both are avoided by saving the routing: it passes through an operator of its own, which recomputation is told not to repeat.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


@torch.library.custom_op("megascend::saved_routing", mutates_args=())
def saved_routing(values: Tensor) -> Tensor:
    """``values``, as the forward pass had them."""
    return values.clone()


@saved_routing.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad


saved_routing.register_autograd(_backward)


def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the routing alone."""
    if operator is torch.ops.megascend.saved_routing.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


recomputation_contexts = partial(create_selective_checkpoint_contexts, policy)
"""``context_fn`` of ``torch.utils.checkpoint``: everything is computed again but the routing."""
