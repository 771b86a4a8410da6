"""Adapters of embedding and output layer: what looking up an embedding needs, and which tokens their adapters act on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascend.lora.segments import TokenSegments
from megascend.lora.stacked_adapters import StackedAdapters
from megascend.lora.target_modules import TargetModule, matches


def adapted_segments(
    stacked: StackedAdapters, segments: TokenSegments, target: TargetModule
) -> tuple[tuple[int, slice], ...]:
    """(index of the adapter in the stacked factors, its tokens) for every adapter of a micro batch that acts on ``target``.

    The tokens are all of a tensor parallel group, so that its ranks agree on what they exchange.
    """
    name = target.slices[0].name
    acts = [adapter is not None and matches(name, adapter.lora.targets) for adapter in stacked.adapters]
    if segments.single is not None:
        return ((0, slice(0, len(segments.adapter_index))),) if acts[segments.single] else ()
    assert segments.whole is not None
    found, start = [], 0
    for index, count in enumerate(segments.whole.sizes()):
        if count and acts[index]:
            found.append((index, slice(start, start + count)))
        start += count
    return tuple(found)


class LookUp(torch.autograd.Function):
    """This rank's part of ``A x`` for one-hot x: each token's row of its adapter's table, zero if another rank has it.

    As in :class:`megascend.lora.grouped.GroupedLinear` the gradient goes straight into a float32 buffer.
    """

    @staticmethod
    def forward(
        ctx: Any, root: Tensor, ids: Tensor, adapter_index: Tensor | None, start: int, tables: Tensor, grads: Tensor
    ) -> Tensor:
        """Look up; waits for no device.

        Args:
            root: anything that requires a gradient, since token ids cannot.
            ids: int64 [...], token ids of the whole vocabulary.
            adapter_index: int64 [n], every token's table; None if there is one.
            start: first token id of this rank.
            tables, grads: [tables, tokens of this rank, r], contiguous; ``grads`` in float32.

        Returns:
            [..., r], in the precision of ``tables``.
        """
        count, size, rank = tables.shape
        local = ids.flatten() - start
        mine = ((local >= 0) & (local < size))[:, None]
        rows = torch.where(mine[:, 0], local, 0)
        if adapter_index is not None:
            rows = rows + adapter_index * size
        ctx.save_for_backward(rows, mine)
        ctx.grads = grads.view(count * size, rank)
        if not size:  # all of this rank's vocabulary is padding
            return tables.new_zeros(*ids.shape, rank)
        # where, not a product: a row that is not meant may be anything.
        return torch.where(mine, tables.view(count * size, rank)[rows], 0).view(*ids.shape, rank)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[None, ...]:
        (grad,) = outputs
        rows, mine = ctx.saved_tensors
        if len(ctx.grads):
            values = torch.where(mine, grad.reshape(len(rows), -1), 0).float()
            ctx.grads.index_put_((rows,), values, accumulate=True)
        return None, None, None, None, None, None
