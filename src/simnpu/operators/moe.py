"""Moving tokens to their experts and back: ``npu_moe_token_permute`` / ``unpermute``, by indices.

As in the kernel, ``sorted_indices`` is the inverse permutation: entry ``token * topk + k`` is the row of the permuted
tokens that holds the token's k-th copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from simnpu.errors import NotSimulatedError
from simnpu.operators.dispatch import differentiable, operator
from simnpu.operators.refusal import Refusal

MAX_TOPK = 512
MAX_INDEX = 16777215  # indices and their number, not reached: the kernel sorts them as float32
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check_tokens(refuse: Refusal, name: str, tokens: Tensor) -> None:
    """Type of the tokens."""
    if tokens.dtype not in FLOATS:
        refuse.kernel(f"{name} must be float16, bfloat16 or float32, but got {tokens.dtype}")


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
    check_tokens(refuse, "tokens", tokens)
    if tokens.dim() != 2 or indices.dim() not in (1, 2) or indices.shape[0] != tokens.shape[0]:
        refuse.kernel(
            f"tokens must be [tokens, hidden] and indices [tokens, topk], but got {list(tokens.shape)} and "
            f"{list(indices.shape)}"
        )
    if indices.dtype not in (torch.int32, torch.int64):
        refuse.kernel(f"indices must be int32 or int64, but got {indices.dtype}")
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
    """The sum of a token's copies, weighted by ``probs`` [tokens, topk] if given; [tokens, hidden]."""
    if padded_mode:
        raise NotSimulatedError("npu_moe_token_unpermute with padded_mode is not simulated by simnpu")
    refuse = Refusal("npu_moe_token_unpermute", "aclnnMoeTokenUnpermute")
    check_tokens(refuse, "permuted_tokens", permuted_tokens)
    if sorted_indices.dtype != torch.int32 or sorted_indices.dim() != 1:
        refuse.kernel(
            f"sorted_indices must be int32 and one-dimensional, but got {sorted_indices.dtype} "
            f"{list(sorted_indices.shape)}"
        )
    if probs is not None and probs.dim() != 2:
        refuse.kernel(f"probs must be [tokens, topk], but got {list(probs.shape)}")
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
    kept = (places < permuted.shape[0]).unsqueeze(-1)
    copies = permuted.index_select(0, places.clamp_max(max(permuted.shape[0] - 1, 0))).float() * kept
    copies = copies.view(-1, topk, permuted.shape[-1])
    if probs is not None:
        copies = copies * probs.float().unsqueeze(-1)
    return copies.sum(1).to(permuted.dtype)
