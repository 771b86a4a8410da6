"""Tensor and context parallel layers on real gloo ranks, against plain calculations on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascend.errors import DistributedTestError, PlatformError
from megascend.reference.te.attention import DotProductAttention
from megascend.testing import run_distributed

TIMEOUT_S = 30.0


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


HEADS, GROUPS, DIM = 4, 2, 8


def qkv(*lead: int) -> list[Tensor]:
    return [draw(*lead, heads, DIM, seed=index) for index, heads in enumerate((HEADS, GROUPS, GROUPS))]


def attention(**kwargs: Any) -> DotProductAttention:
    return DotProductAttention(HEADS, DIM, num_gqa_groups=GROUPS, **kwargs)


def over_context() -> dict[str, Any]:
    ranks = list(range(dist.get_world_size()))
    return {"cp_group": dist.group.WORLD, "cp_global_ranks": ranks, "cp_stream": None, "cp_comm_type": "p2p"}


def masked_rank() -> None:
    masked = torch.zeros(2, 1, 1, 8, dtype=torch.bool)
    attention(**over_context())(*qkv(8, 2), attention_mask=masked, attn_mask_type="padding_causal")


def test_padding_mask_with_context_parallelism_is_refused() -> None:
    with pytest.raises(DistributedTestError, match="together with context parallelism") as caught:
        run_distributed(masked_rank, 2, timeout_s=TIMEOUT_S)
    assert isinstance(caught.value.__cause__, PlatformError)
