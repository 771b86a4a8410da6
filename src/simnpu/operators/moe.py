"""Moving tokens to their experts and back: ``npu_moe_token_permute`` / ``unpermute``, by indices.

As in the kernel, ``sorted_indices`` is the inverse permutation: entry ``token * topk + k`` is the row of the permuted
tokens that holds the token's k-th copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from simnpu.errors import NotSimulatedError
from simnpu.operators.dispatch import differentiable, on_host, operator
from simnpu.operators.limits import FLOATS
from simnpu.operators.refusal import Refusal

MAX_TOPK = 512
MAX_INDEX = 16777215  # indices and their number, not reached: the kernel sorts them as float32


def check_counts(refuse: Refusal, name: str, copies: int, topk: int) -> None:
    """Experts a token and copies of all tokens."""
    if topk > MAX_TOPK:
        refuse.kernel(f"topK must be at most {MAX_TOPK}, but got {topk}")
    if copies >= MAX_INDEX:
        refuse.kernel(f"{name} must have less than {MAX_INDEX} elements, but got {copies}")


@operator
def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Tokens in the order of their experts.

    Args:
        tokens: [tokens, hidden].
        indices: the experts of each token, int32 or int64, [tokens, topk] or [tokens].
        num_out_tokens: rows to return; None or 0: all.

    Returns:
        permuted tokens [rows, hidden], and sorted_indices (int32, [tokens * topk]).
    """
    refuse = Refusal("npu_moe_token_permute", "aclnnMoeTokenPermute")
    if padded_mode:
        raise NotSimulatedError("npu_moe_token_permute with padded_mode is not simulated by simnpu")
    if indices.shape[0] != tokens.shape[0]:
        refuse.kernel(
            f"tokens must be [tokens, hidden] and indices [tokens, topk], but got {list(tokens.shape)} and "
            f"{list(indices.shape)}"
        )
    topk = 1 if indices.dim() == 1 else indices.shape[1]
    check_counts(refuse, "indices", indices.numel(), topk)

    def permute(tokens: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < MAX_INDEX:
            refuse.kernel(
                f"indices must be in [0, {MAX_INDEX}), but go from {int(indices.min())} to {int(indices.max())}"
            )
        order = torch.argsort(indices.flatten(), stable=True)
        rows = order[: num_out_tokens or order.numel()]
        return tokens.index_select(0, rows // topk), torch.argsort(order).int()

    return differentiable(permute)(tokens, indices)


@operator
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """Sum a token's copies, weighted by ``probs`` [tokens, topk] if given; [tokens, hidden]."""
    if padded_mode:
        raise NotSimulatedError("npu_moe_token_unpermute with padded_mode is not simulated by simnpu")
    refuse = Refusal("npu_moe_token_unpermute", "aclnnMoeTokenUnpermute")
    topk = 1 if probs is None else probs.shape[1]
    check_counts(refuse, "sorted_indices", sorted_indices.numel(), topk)
    if probs is not None and sorted_indices.numel() != probs.numel():
        refuse.kernel(f"{sorted_indices.numel()} sorted_indices do not fit probs {list(probs.shape)}")

    def unpermute(permuted: Tensor, places: Tensor, probs: Tensor | None) -> Tensor:
        if not torch.equal(places.sort().values.long(), torch.arange(places.numel())):
            refuse.kernel(f"sorted_indices must hold every row from 0 to {places.numel() - 1} once")
        return gather_copies(permuted, places, topk, probs)

    return differentiable(unpermute)(permuted_tokens, sorted_indices, probs)


def gather_copies(permuted: Tensor, places: Tensor, topk: int, probs: Tensor | None) -> Tensor:
    """Sum the ``topk`` copies of every token; copies that were not kept (rows beyond the last) count as zero."""
    places = places.long()
    inside = (places < permuted.shape[0]).unsqueeze(-1)
    copies = permuted.index_select(0, places.clamp_max(max(permuted.shape[0] - 1, 0))).float() * inside
    copies = copies.view(-1, topk, permuted.shape[-1])
    if probs is not None:
        copies = copies * probs.float().unsqueeze(-1)
    return copies.sum(1).to(permuted.dtype)


MAX_EXPERTS = 2048
MAX_K = 1024  # of npu_moe_gating_top_k_softmax
BY_MAXIMUM, BY_TWO_LARGEST = 0, 1  # group_select_mode: the score of a group of experts
SOFTMAX, SIGMOID = 0, 1  # norm_type


def largest(scores: Tensor, k: int) -> Tensor:
    """Indices of the ``k`` largest of the last dimension, largest first, ties by index."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :k]


@operator
def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ``k`` largest of softmax(x), their experts (int32), and row numbers that run along the columns (int32).

    ``x``: [..., experts] with two or three dimensions. Rows that are ``finished`` get the number of experts as expert.
    """
    refuse = Refusal("npu_moe_gating_top_k_softmax", "aclnnMoeGatingTopKSoftmax")
    if x.dtype not in FLOATS:
        refuse(f"float16、float32 or bfloat16 tensor expected but got a tensor with dtype: {x.dtype}")
    if x.dim() not in (2, 3):
        refuse(f"The x should be 2D or 3D, but got {x.dim()}D")
    if not 0 < k <= min(x.shape[-1], MAX_K):
        refuse(f"The k should be in [1, {min(x.shape[-1], MAX_K)}], but got {k}")
    if finished is not None and (finished.dtype != torch.bool or finished.shape != x.shape[:-1]):
        refuse(f"finished must be bool {list(x.shape[:-1])}, but got {finished.dtype} {list(finished.shape)}")

    def choose(x: Tensor, finished: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        scores = x.float().softmax(-1)
        experts = largest(scores, k)
        values = scores.gather(-1, experts).to(x.dtype)
        if finished is not None:
            experts = experts.masked_fill(finished.unsqueeze(-1), x.shape[-1])
        rows = torch.arange(experts.numel()).view(k, -1).t().reshape(experts.shape)
        return values, experts.int(), rows.int()

    return on_host(choose)(x, finished)


@operator
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Group-limited choice of experts, as in DeepSeek-V3 (arXiv:2412.19437): ``k`` of the best ``k_group`` groups.

    ``x``: [tokens, experts]. The bias takes part in the choice, not in the weights.

    Returns:
        weights [tokens, k] in the type of ``x`` (with sigmoid scores divided by their sum), times the scaling factor;
        experts [tokens, k], int32; with ``out_flag`` all scores [tokens, experts] in float32, else NaN: nothing written.
    """
    refuse = Refusal("npu_moe_gating_top_k", "aclnnMoeGatingTopK")
    if input_ids is not None or tid2eid is not None:
        raise NotSimulatedError("npu_moe_gating_top_k with input_ids and tid2eid is not simulated by simnpu")
    check_gating(x, k, bias, k_group, group_count, refuse)
    if renorm != 0 or norm_type not in (SOFTMAX, SIGMOID) or group_select_mode not in (BY_MAXIMUM, BY_TWO_LARGEST):
        refuse.kernel(
            f"renorm must be 0, norm_type and group_select_mode 0 or 1, but got {renorm}, {norm_type} and "
            f"{group_select_mode}"
        )

    def choose(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        wide = x.float()
        scores = wide.softmax(-1) if norm_type == SOFTMAX else wide.sigmoid()
        ranked = scores if bias is None else scores + bias.float()
        groups = ranked.unflatten(-1, (group_count, -1))
        group_scores = groups.topk(2 if group_select_mode == BY_TWO_LARGEST else 1, dim=-1).values.sum(-1)
        allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, largest(group_scores, k_group), True)
        experts = largest(groups.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2), k)
        weights = scores.gather(-1, experts)
        if norm_type == SIGMOID:
            weights = weights / (weights.sum(-1, keepdim=True) + eps)
        score_output = scores if out_flag else torch.full_like(scores, torch.nan)  # the kernel leaves it as it is
        return (weights * routed_scaling_factor).to(x.dtype), experts.int(), score_output

    return on_host(choose)(x, bias)


def check_gating(x: Tensor, k: int, bias: Tensor | None, k_group: int, group_count: int, refuse: Refusal) -> None:
    """Check the documentation's limits on the scores, the bias and the groups."""
    if x.dim() != 2:
        refuse("The x should be 2D")
    if x.dtype not in FLOATS:
        refuse(f"float16、float32 or bfloat16 tensor expected but got a tensor with dtype: {x.dtype}")
    experts = x.shape[1]
    if bias is not None:
        if bias.dtype != x.dtype:
            refuse("The dtype of x and bias should be same")
        if tuple(bias.shape) != (experts,):
            refuse("The bias first dim should be same as x second dim")
    if experts > MAX_EXPERTS:
        refuse.kernel(f"x must have at most {MAX_EXPERTS} experts, but got {experts}")
    if group_count <= 0 or experts % group_count or experts // group_count <= 2:
        refuse.kernel(f"{experts} experts must divide into group_count groups of more than 2, but got {group_count}")
    if -(-experts // group_count // 32) * 32 * group_count > MAX_EXPERTS:
        refuse.kernel(f"groups rounded up to 32 experts must make at most {MAX_EXPERTS}, but got {group_count} groups")
    if not 1 <= k_group <= group_count:
        refuse.kernel(f"k_group must be in [1, group_count {group_count}], but got {k_group}")
    if not 1 <= k <= experts // group_count * k_group:
        refuse.kernel(
            f"k must be in [1, {experts // group_count * k_group}], the experts of {k_group} groups, but got {k}"
        )
