"""Moving tokens to their experts and back by a routing map [tokens, experts]: ``npu_moe_token_*_with_routing_map``.

Two ways, as in the kernels. Without dropping, every token has the same number of experts (topk); permuted rows are
sorted by expert, and ``sorted_indices[token * topk + k]`` is the row of the token's k-th copy, experts ascending. With
``drop_and_pad`` every expert takes the same number of rows (its capacity), and ``sorted_indices[row]`` is the token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from simnpu.operators.dispatch import differentiable, on_host, operator
from simnpu.operators.moe import gather_copies
from simnpu.operators.refusal import Refusal


def check_map(name: str, tokens: int, routing_map: Tensor) -> Refusal:
    """Type and shape of the map."""
    refuse = Refusal(name, "aclnn" + "".join(part.title() for part in name.strip("_").split("_")[1:]))
    if routing_map.shape[0] != tokens:
        refuse.kernel(f"routing_map must be [{tokens}, experts], but got {list(routing_map.shape)}")
    return refuse


def rows_by_expert(routing_map: Tensor, rows: int, drop_and_pad: bool) -> tuple[Tensor, Tensor]:
    """Token and expert of every permuted row, [rows] each."""
    by_expert = routing_map.bool().t().contiguous()
    experts = by_expert.shape[0]
    if drop_and_pad:
        capacity = rows // experts
        chosen = by_expert.int().sort(dim=-1, descending=True, stable=True).indices[:, :capacity]
        return chosen.reshape(-1), torch.arange(experts).repeat_interleave(capacity)
    expert_of, token_of = by_expert.nonzero(as_tuple=True)
    return token_of, expert_of


@operator
def npu_moe_token_permute_with_routing_map(
    tokens: Tensor,
    routing_map: Tensor,
    *,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Permuted tokens [rows, hidden], their probabilities [rows] if given, and sorted_indices (int32, [rows])."""
    refuse = check_map("npu_moe_token_permute_with_routing_map", tokens.shape[0], routing_map)
    row_count = tokens.shape[0] if num_out_tokens is None else num_out_tokens
    unit = routing_map.shape[1] if drop_and_pad else max(tokens.shape[0], 1)
    rows = row_count // unit * unit
    if not drop_and_pad and (routed := int(routing_map.bool().sum())) != rows:
        refuse.kernel(
            f"the routing map has {routed} entries, but num_out_tokens {row_count} for {tokens.shape[0]} tokens makes "
            f"{rows} rows: every token must have the same number of experts"
        )

    def permute(tokens: Tensor, routing_map: Tensor, *probs: Tensor) -> tuple[Tensor, ...]:
        token_of, expert_of = rows_by_expert(routing_map, rows, drop_and_pad)
        places = token_of if drop_and_pad else token_of.argsort(stable=True)
        permuted_probs = tuple(weights[token_of, expert_of] for weights in probs)
        return tokens.index_select(0, token_of), *permuted_probs, places.int()

    if probs is None:
        permuted, places = differentiable(permute)(tokens, routing_map)
        return permuted, None, places
    return differentiable(permute)(tokens, routing_map, probs)


@operator
def npu_moe_token_permute_with_routing_map_grad(
    permuted_token_out_grad: Tensor,
    probs_grad: Tensor | None,
    sorted_indices: Tensor,
    routing_map: Tensor,
    experts_num: torch.SymInt,
    tokens_num: torch.SymInt,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the tokens [tokens, hidden] and of the probabilities [tokens, experts]."""
    check_map("npu_moe_token_permute_with_routing_map_grad", int(tokens_num), routing_map)

    def gradients(grad: Tensor, probs_grad: Tensor | None, routing_map: Tensor) -> tuple[Tensor, Tensor | None]:
        token_of, expert_of = rows_by_expert(routing_map, grad.shape[0], drop_and_pad)
        d_tokens = torch.zeros(tokens_num, grad.shape[1]).index_add_(0, token_of, grad.float()).to(grad.dtype)
        if probs_grad is None:
            return d_tokens, None
        d_probs = torch.zeros(tokens_num, experts_num, dtype=probs_grad.dtype)
        d_probs[token_of, expert_of] = probs_grad
        return d_tokens, d_probs

    return on_host(gradients)(permuted_token_out_grad, probs_grad, routing_map)


def unpermute(
    permuted: Tensor, places: Tensor, routing_map: Tensor, probs: Tensor | None, drop_and_pad: bool, tokens: int
) -> Tensor:
    """Compute the weighted sum of every token's rows."""
    if not drop_and_pad:
        topk = permuted.shape[0] // max(tokens, 1)
        weights = None if probs is None else probs.masked_select(routing_map.bool()).view(-1, topk)
        return gather_copies(permuted, places, topk, weights)
    token_of = places.long()
    rows = permuted.float()
    if probs is not None:
        rows = rows * probs[token_of, row_experts(token_of, probs)].float().unsqueeze(-1)
    return torch.zeros(tokens, permuted.shape[1]).index_add(0, token_of, rows).to(permuted.dtype)


def row_experts(token_of: Tensor, probs: Tensor) -> Tensor:
    """Return the expert of each row when every expert has the same number of rows."""
    return torch.arange(probs.shape[1]).repeat_interleave(token_of.numel() // probs.shape[1])


@operator
def _npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Tokens [tokens, hidden]; for the gradient: the rows sorted by token, their tokens, and each row's probability.

    Without dropping, the second and third result are the sorted_indices again, which the gradient takes for both.
    """
    if routing_map is not None:
        check_map("_npu_moe_token_unpermute_with_routing_map", restore_shape[0], routing_map)

    def forward(permuted: Tensor, places: Tensor, probs: Tensor | None, routing_map: Tensor) -> Tensor:
        return unpermute(permuted, places, routing_map, probs, drop_and_pad, restore_shape[0])

    def for_gradient(places: Tensor, probs: Tensor | None, routing_map: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        tokens_sorted, rows = places.sort(stable=True) if drop_and_pad else (places, places)
        if probs is None:
            return rows.int(), tokens_sorted, None
        if drop_and_pad:
            return rows.int(), tokens_sorted, probs[places.long(), row_experts(places, probs)]
        return rows.int(), tokens_sorted, probs.masked_select(routing_map.bool())

    tokens = differentiable(forward)(permuted_tokens, sorted_indices, probs, routing_map)
    return tokens, *on_host(for_gradient)(sorted_indices, probs, routing_map)


@operator
def npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> Tensor:
    """Return the tokens alone; see :func:`_npu_moe_token_unpermute_with_routing_map`."""
    return _npu_moe_token_unpermute_with_routing_map(
        permuted_tokens, sorted_indices, restore_shape, probs=probs, routing_map=routing_map, drop_and_pad=drop_and_pad
    )[0]


@operator
def npu_moe_token_unpermute_with_routing_map_grad(
    unpermuted_tokens_grad: Tensor,
    out_index: Tensor,
    permuted_token_id: Tensor,
    routing_map: Tensor | None,
    permuted_tokens: Tensor | None,
    probs: Tensor | None,
    drop_and_pad: bool,
    restore_shape: Sequence[int],
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the permuted tokens and of the probabilities [tokens, experts].

    ``out_index`` and ``permuted_token_id`` are rows and their tokens, as the forward operator returns them with
    ``drop_and_pad``; without it both are the sorted_indices.
    """
    tokens = unpermuted_tokens_grad.shape[0]

    def gradients(
        grad: Tensor, out_index: Tensor, token_id: Tensor, routing_map: Tensor, permuted: Tensor, probs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if drop_and_pad:
            rows = out_index.long()
            if not torch.equal(rows.sort().values, torch.arange(rows.numel())):
                Refusal(
                    "npu_moe_token_unpermute_with_routing_map_grad", "aclnnMoeTokenUnpermuteWithRoutingMapGrad"
                ).kernel(f"out_index must hold every row from 0 to {rows.numel() - 1} once")
            places = torch.empty_like(rows)
            places[rows] = token_id.long()
        else:
            places = out_index
        leaf = permuted if permuted is not None else torch.zeros(out_index.numel(), grad.shape[1], dtype=grad.dtype)
        leaves = [leaf.clone().requires_grad_()]
        if probs is not None:
            leaves.append(probs.clone().requires_grad_())
        with torch.enable_grad():
            weights = leaves[1] if probs is not None else None
            result = unpermute(leaves[0], places, routing_map, weights, drop_and_pad, tokens)
        input_gradients = torch.autograd.grad(result, leaves, grad.to(result.dtype))
        return input_gradients[0], input_gradients[1].to(grad.dtype) if probs is not None else None

    return on_host(gradients)(unpermuted_tokens_grad, out_index, permuted_token_id, routing_map, permuted_tokens, probs)
