"""Operators of mixtures of experts against their formulas: grouped products, moving tokens to their experts and back, gating."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from npu_acceptance.compare import BOUNDS, Case, Tensors, normal

SIZES = (40, 0, 17, 71)
"""Rows of each group; an expert may have none."""
TOKENS, EXPERTS, TOPK, HIDDEN = 64, 8, 2, 128
BY_ROWS, BY_INNER = 0, 2  # group_type
CUMULATIVE, COUNTS = 0, 1  # group_list_type


def cases(quick: bool) -> Iterator[Case]:
    """Yield all cases, or those that megascend calls if ``quick``."""
    yield grouped_rows("one weight [groups, k, n]", stacked=True, kind=CUMULATIVE)
    yield grouped_inner(CUMULATIVE)
    yield permute_and_back()
    if quick:
        return
    yield grouped_rows("a list of weights", stacked=False, kind=CUMULATIVE)
    yield grouped_rows("counts", stacked=True, kind=COUNTS)
    yield grouped_inner(COUNTS)
    yield permute_with_map()
    yield unpermute_with_map()
    yield gating()


def group_list(kind: int, device: torch.device) -> Tensor:
    """Return the ends of the groups or their sizes, int64."""
    sizes = torch.tensor(SIZES)
    return (sizes if kind == COUNTS else sizes.cumsum(0)).to(device)


def grouped_rows(name: str, *, stacked: bool, kind: int) -> Case:
    """Build a case of x_g @ weight_g for every group of rows."""

    def inputs(generator: torch.Generator) -> Tensors:
        return {"x": normal(generator, sum(SIZES), 64), "weight": normal(generator, len(SIZES), 64, 96)}

    def operator(npu: Any, tensors: Tensors) -> Tensor:
        weight = tensors["weight"]
        return npu.npu_grouped_matmul(
            [tensors["x"]],
            [weight] if stacked else [matrix.contiguous() for matrix in weight],
            bias=None,
            group_list=group_list(kind, weight.device),
            split_item=2,
            group_type=BY_ROWS,
            group_list_type=kind,
        )[0]

    def formula(tensors: Tensors) -> Tensor:
        pairs = zip(tensors["x"].split(SIZES), tensors["weight"], strict=True)
        return torch.cat([rows @ weight for rows, weight in pairs])

    dtypes = tuple(BOUNDS) if stacked else (torch.float16, torch.bfloat16)  # float32 has no separate weights on a 910B
    return Case(f"grouped_matmul by rows, {name}", inputs, operator, formula, dtypes=dtypes)


def grouped_inner(kind: int) -> Case:
    """Build a case of x_g^T @ dy_g for every group of rows: the weights' gradients."""

    def inputs(generator: torch.Generator) -> Tensors:
        return {"x": normal(generator, sum(SIZES), 64), "dy": normal(generator, sum(SIZES), 96)}

    def operator(npu: Any, tensors: Tensors) -> Tensor:
        return npu.npu_grouped_matmul(
            [tensors["x"].t()],
            [tensors["dy"]],
            bias=None,
            group_list=group_list(kind, tensors["x"].device),
            split_item=3,
            group_type=BY_INNER,
            group_list_type=kind,
        )[0]

    def formula(tensors: Tensors) -> Tensor:
        pairs = zip(tensors["x"].split(SIZES), tensors["dy"].split(SIZES), strict=True)
        return torch.stack([rows.t() @ dy for rows, dy in pairs])

    return Case(f"grouped_matmul by inner dimension, {'counts' if kind else 'ends'}", inputs, operator, formula)


def draw_experts(generator: torch.Generator) -> Tensor:
    """Draw the experts of each token, ascending, [tokens, topk]."""
    return torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK).indices.sort(-1).values


def routing_map(indices: Tensor) -> Tensor:
    """Return True where a token goes to an expert, [tokens, experts]."""
    return torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, indices, True)


def source_rows(indices: Tensor) -> Tensor:
    """Return the token of each row after sorting the copies by expert, then by token."""
    return indices.flatten().argsort(stable=True) // TOPK


def permute_and_back() -> Case:
    """Build a case that permutes tokens to experts by indices and back with probabilities."""

    def inputs(generator: torch.Generator) -> Tensors:
        indices = draw_experts(generator)
        probabilities = torch.rand(TOKENS, TOPK, generator=generator, dtype=torch.float64)
        return {"tokens": normal(generator, TOKENS, HIDDEN), "probs": probabilities, "indices": indices.int()}

    def operator(npu: Any, tensors: Tensors) -> Tensors:
        permuted, places = npu.npu_moe_token_permute(tensors["tokens"], tensors["indices"])
        return {"permuted": permuted, "back": npu.npu_moe_token_unpermute(permuted, places, tensors["probs"])}

    def formula(tensors: Tensors) -> Tensors:
        tokens, probabilities = tensors["tokens"], tensors["probs"]
        rows = source_rows(tensors["indices"].long())
        return {"permuted": tokens[rows], "back": tokens * probabilities.sum(-1, keepdim=True)}

    names = ("npu_moe_token_permute", "npu_moe_token_unpermute")
    return Case("moe_token_permute and unpermute", inputs, operator, formula, names, leaves=("tokens", "probs"))


def draw_with_map(generator: torch.Generator) -> Tensors:
    indices = draw_experts(generator)
    weights = torch.rand(TOKENS, EXPERTS, generator=generator, dtype=torch.float64)
    return {
        "tokens": normal(generator, TOKENS, HIDDEN),
        "probs": weights * routing_map(indices),
        "map": routing_map(indices),
        "d_permuted": normal(generator, TOKENS * TOPK, HIDDEN),
        "d_probs": normal(generator, TOKENS * TOPK),
        "d_tokens": normal(generator, TOKENS, HIDDEN),
    }


def permute_rows(tensors: Tensors, tokens: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens and probabilities of all rows, sorted by expert."""
    expert, token = tensors["map"].t().nonzero(as_tuple=True)
    return tokens[token], probabilities[token, expert]


def permute_with_map() -> Case:
    """Build a case that permutes by a routing map, with the gradient operator that MindSpeed calls."""

    def operator(npu: Any, tensors: Tensors) -> Tensors:
        permuted, probabilities, places = npu.npu_moe_token_permute_with_routing_map(
            tensors["tokens"], tensors["map"], probs=tensors["probs"], num_out_tokens=TOKENS * TOPK
        )
        d_tokens, d_probs = npu.npu_moe_token_permute_with_routing_map_grad(
            tensors["d_permuted"], tensors["d_probs"], places, tensors["map"], EXPERTS, TOKENS, False
        )
        return {
            "permuted": permuted,
            "probabilities": probabilities,
            "gradient of tokens": d_tokens,
            "gradient of probs": d_probs,
        }

    def formula(tensors: Tensors) -> Tensors:
        leaves = [tensors[name].clone().requires_grad_() for name in ("tokens", "probs")]
        permuted, probabilities = permute_rows(tensors, leaves[0], leaves[1])
        gradients = torch.autograd.grad((permuted, probabilities), leaves, (tensors["d_permuted"], tensors["d_probs"]))
        return {
            "permuted": permuted.detach(),
            "probabilities": probabilities.detach(),
            "gradient of tokens": gradients[0],
            "gradient of probs": gradients[1],
        }

    names = ("npu_moe_token_permute_with_routing_map", "npu_moe_token_permute_with_routing_map_grad")
    return Case("moe_token_permute_with_routing_map", draw_with_map, operator, formula, names)


def unpermute_with_map() -> Case:
    """Build a case that unpermutes by a routing map, weighted, with the gradient operator that MindSpeed calls."""

    def operator(npu: Any, tensors: Tensors) -> Tensors:
        common = {"routing_map": tensors["map"], "drop_and_pad": False}
        permuted, _, places = npu.npu_moe_token_permute_with_routing_map(
            tensors["tokens"], tensors["map"], num_out_tokens=TOKENS * TOPK
        )
        shape = [TOKENS, HIDDEN]
        tokens, *_ = npu._npu_moe_token_unpermute_with_routing_map(
            permuted, places, shape, probs=tensors["probs"], **common
        )
        d_permuted, d_probs = npu.npu_moe_token_unpermute_with_routing_map_grad(
            tensors["d_tokens"], places, places, permuted_tokens=permuted, probs=tensors["probs"], restore_shape=shape, **common
        )  # fmt: skip
        return {"tokens": tokens, "gradient of permuted": d_permuted, "gradient of probs": d_probs * tensors["map"]}

    def formula(tensors: Tensors) -> Tensors:
        expert, token = tensors["map"].t().nonzero(as_tuple=True)
        permuted, probs = tensors["tokens"][token].requires_grad_(), tensors["probs"].clone().requires_grad_()
        rows = permuted * probs[token, expert].unsqueeze(-1)
        tokens = torch.zeros(TOKENS, HIDDEN, dtype=rows.dtype).index_add(0, token, rows)
        gradients = torch.autograd.grad(tokens, (permuted, probs), tensors["d_tokens"])
        return {"tokens": tokens.detach(), "gradient of permuted": gradients[0], "gradient of probs": gradients[1]}

    names = (
        "npu_moe_token_permute_with_routing_map",
        "_npu_moe_token_unpermute_with_routing_map",
        "npu_moe_token_unpermute_with_routing_map_grad",
    )
    return Case("moe_token_unpermute_with_routing_map", draw_with_map, operator, formula, names)


def gating() -> Case:
    """Build a case of softmax over the experts and the top-k weights."""

    def inputs(generator: torch.Generator) -> Tensors:
        # Far enough apart that no rounding changes their order.
        order = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(-1)
        return {"logits": order.double() / 2}

    def operator(npu: Any, tensors: Tensors) -> Tensors:
        weights, experts, *_ = npu.npu_moe_gating_top_k_softmax(tensors["logits"], None, k=TOPK)
        return {"weights": weights, "experts": experts}

    def formula(tensors: Tensors) -> Tensors:
        weights, experts = tensors["logits"].softmax(-1).topk(TOPK)
        return {"weights": weights, "experts": experts}

    return Case("moe_gating_top_k_softmax", inputs, operator, formula, ("npu_moe_gating_top_k_softmax",))
