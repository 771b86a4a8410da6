"""Choosing experts: ``npu_moe_gating_top_k`` and ``npu_moe_gating_top_k_softmax``, for inference.

Formulas and limits are those of torch_npu's documentation; among equal scores the expert with the smaller number comes
first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simnpu.errors import NotSimulatedError
from simnpu.operators.dispatch import on_host, operator
from simnpu.operators.refusal import Refusal

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
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
    """The ``k`` largest of softmax(x), their experts (int32), and row numbers that run along the columns (int32).

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
        experts [tokens, k], int32; with ``out_flag`` all scores [tokens, experts] in float32, else an empty tensor.
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
        of_group = groups.topk(2 if group_select_mode == BY_TWO_LARGEST else 1, dim=-1).values.sum(-1)
        allowed = torch.zeros_like(of_group, dtype=torch.bool).scatter_(-1, largest(of_group, k_group), True)
        experts = largest(groups.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2), k)
        weights = scores.gather(-1, experts)
        if norm_type == SIGMOID:
            weights = weights / (weights.sum(-1, keepdim=True) + eps)
        kept = scores if out_flag else scores.new_empty(0)
        return (weights * routed_scaling_factor).to(x.dtype), experts.int(), kept

    return on_host(choose)(x, bias)


def check_gating(x: Tensor, k: int, bias: Tensor | None, k_group: int, group_count: int, refuse: Refusal) -> None:
    """What the documentation asks of the scores, the bias and the groups."""
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
    if not 1 <= k <= (most := experts // group_count * k_group):
        refuse.kernel(f"k must be in [1, {most}], the experts of {k_group} groups, but got {k}")
