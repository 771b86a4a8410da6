"""Two formulas for a router's load-balancing loss (Fedus et al. 2021, arXiv:2101.03961, eq. 4-6), as gradients. Pure.

With T tokens, E experts, k of them for each token, n_le the tokens that layer l sends to expert e, and P_le the sum of that
layer's probabilities of e:

``megatron``      sum over l of  E / (k T^2) * sum over e of n_le P_le
``transformers``  E / (L T)^2 * sum over e of (sum over l of n_le) (sum over l of P_le), with L layers of experts

``megatron`` is ``switch_load_balancing_loss_func`` of Megatron-Core, one term for each layer. ``transformers`` is
``load_balancing_loss_func`` of its mixture-of-experts models: all layers pooled, and no k. The counts n have no gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Formula = Literal["megatron", "transformers"]


def gradients(formula: Formula, counts: Tensor, tokens: int, top_k: int) -> Tensor:
    """Return the gradient of the loss with respect to one token's probabilities, the same for all tokens of a layer.

    Args:
        counts: [layers, experts], tokens of the micro batch on all ranks that each layer sends to each expert. For
            ``transformers`` all layers of the model.
        tokens: tokens in the micro batch on all ranks; with none, the loss is 0.
        top_k: experts of each token.

    Returns:
        [layers, experts].
    """
    layers, experts = counts.shape
    if tokens == 0:
        return torch.zeros_like(counts)
    if formula == "megatron":
        return counts * (experts / (top_k * tokens**2))
    return (counts.sum(0) * (experts / (layers * tokens) ** 2)).expand(layers, -1)


def counts(probabilities: Tensor, top_k: int, real: Tensor) -> Tensor:
    """Count the tokens that have each expert among their ``top_k`` by probability, fp32 [experts].

    Args:
        real: [n, 1], tokens that each row stands for.
    """
    best = probabilities.topk(top_k, dim=-1).indices
    return (torch.zeros_like(probabilities).scatter(1, best, 1.0) * real).sum(0)


def scores(logits: Tensor, function: str) -> Tensor:
    """Compute fp32 probabilities of the experts, [n, experts], from the router's logits, as both losses do.

    Args:
        function: ``softmax``, or ``sigmoid``, whose values are divided by their sum.
    """
    values = logits.float()
    if function == "softmax":
        return values.softmax(-1)
    values = values.sigmoid()
    # Megatron's epsilon (moe_utils.py).
    return values / (values.sum(-1, keepdim=True) + 1e-20)
