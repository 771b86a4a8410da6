"""What frozen experts make of their tokens, with something added to each of their products: grouped, for all experts at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megascend.engines.fsdp.grouped_experts import Moved, Spread, permutation
from megascend.lora.grouped import GroupedLinear, Segments


@dataclass(frozen=True)
class ExpertRows:
    """The rows that experts compute, those of the first expert first. A token has one for each of its experts.

    Attributes:
        token: int64 [rows], of the tokens that came in.
        expert: int64 [rows].
        segments: of each expert.
    """

    token: Tensor
    expert: Tensor
    segments: Segments


Addition = Callable[[str, ExpertRows, Tensor, Tensor], Tensor]
"""(parameter's name, rows, input [rows, in], product [rows, out]) -> the product with what is added to it."""


def frozen_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor, add: Addition) -> Tensor:
    """See ``transformers.integrations.moe``: the sum over each token's experts of weight times gated MLP.

    The experts' parameters get no gradient. Waits for no device where there is a kernel for grouped products.

    Args:
        module: fused experts with a gate, [experts, out, in] or transposed.
        hidden: [n, h].
        index, weights: [n, k], each token's experts and their weights.
    """
    count = index.shape[1]
    order, place, ends = permutation(index, module.num_experts)
    rows = ExpertRows(order // count, index.flatten()[order], Segments(ends))
    states: Any = Spread.apply(hidden, order, place, count)
    up = add("gate_up_proj", rows, states, _product(module, "gate_up_proj", rows, states))
    states = module._apply_gate(up)
    down = add("down_proj", rows, states, _product(module, "down_proj", rows, states))
    if getattr(module, "has_post_expert_norm", False):
        down = module.post_expert_norm(down)
    weight_of_row: Any = Moved.apply(weights.flatten(), order, place)
    made: Any = Moved.apply(down * weight_of_row[:, None], place, order)
    return made.unflatten(0, (-1, count)).sum(1).to(hidden.dtype)


def _product(module: Any, parameter: str, rows: ExpertRows, states: Tensor) -> Tensor:
    weight: Tensor = getattr(module, parameter)
    if not getattr(module, "is_transposed", False):
        weight = weight.mT
    bias = None
    if getattr(module, "has_bias", False):
        bias = getattr(module, f"{parameter}_bias")[rows.expert]
    return GroupedLinear.apply(states, weight, None, rows.segments, bias)
