"""Ulysses sequence parallelism: ranks hold parts of every sample, and for attention all of it, of some of the heads.

Jacobs et al. 2023 (DeepSpeed-Ulysses). Queries, keys, values and the result are exchanged in each layer's attention; nothing else
of the model knows. Recomputation repeats the exchanges alike on all ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascend.errors import TopologyError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_heads(heads: int, kv_heads: int, size: int) -> None:
    """Raise TopologyError unless ``size`` ranks can divide a model's heads; fewer key and value heads are repeated."""
    if heads % size or heads % math.lcm(kv_heads, size):
        raise TopologyError(
            f"parallel.context={size} does not divide the model's {heads} attention heads ({kv_heads} of keys and values, "
            "repeated where there are fewer than ranks); choose a size that does"
        )


class HeadExchange:
    """Between parts of samples with all heads and whole samples with a part of the heads."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._size = group, dist.get_world_size(group)

    def to_heads(self, states: Tensor) -> Tensor:
        """[batch, heads, tokens of a rank, d] to [batch, heads of a rank, tokens of all ranks in their order, d]."""
        heads = math.lcm(states.shape[1], self._size)
        states = states.repeat_interleave(heads // states.shape[1], dim=1)
        batch, _, tokens, size = states.shape
        sent = states.reshape(batch, self._size, -1, tokens, size).movedim(1, 0)
        return _exchanged(sent, self._group).movedim(0, 2).reshape(batch, -1, self._size * tokens, size)

    def to_tokens(self, states: Tensor) -> Tensor:
        """The way back."""
        batch, heads, tokens, size = states.shape
        sent = states.reshape(batch, heads, self._size, tokens // self._size, size).movedim(2, 0)
        return _exchanged(sent, self._group).movedim(0, 1).reshape(batch, -1, tokens // self._size, size)

    def order(self, lengths: tuple[int, ...]) -> Tensor:
        """int64 [tokens]: where the tokens of packed samples lie after :meth:`to_heads`, one sample after the other."""
        parts = torch.tensor([length // self._size for length in lengths])
        of_rank = int(parts.sum())
        starts = (parts.cumsum(0) - parts).tolist()
        pieces = [
            torch.arange(rank * of_rank + start, rank * of_rank + start + part)
            for start, part in zip(starts, parts.tolist(), strict=True)
            for rank in range(self._size)
        ]
        return torch.cat(pieces)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(values)
        dist.all_to_all_single(received, values, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        received = torch.empty_like(grad)
        dist.all_to_all_single(received, grad, group=ctx.group)
        return received, None


def _exchanged(values: Tensor, group: ProcessGroup) -> Tensor:
    """``values`` [ranks, ...]: part r goes to rank r, and what came from rank r is part r of the result."""
    return _AllToAll.apply(values.contiguous(), group)
