"""The embedding's gradient, added to Megatron's fp32 buffer row by row.

torch forms the gradient of the whole table in the parameters' precision, zeros for the most part, which Megatron's DDP then adds
to its buffer: for a vocabulary of 152 thousand and 8192 tokens, 2 GB are moved and 0.6 GiB held where 0.1 GB change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megascend.changes import patch


class _LookUp(torch.autograd.Function):
    """Rows of ``weight`` [vocabulary, h], whose gradient goes to ``weight.main_grad`` and not to autograd."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        (ids,) = ctx.saved_tensors
        buffer = ctx.weight.main_grad
        rows = grads[0].flatten(0, -2).to(buffer.dtype)
        # Sorted by token, so that the sum does not depend on the order in which the device comes to them. As index_put_, which
        # would wait for the device to see whether all ids are in the table: the look-up has found them there.
        torch.ops.aten._index_put_impl_(buffer, [ids.flatten()], rows, True, True)
        return None, None


def install(chunks: Sequence[torch.nn.Module]) -> int:
    """Let embeddings of ``chunks`` add their gradients themselves.

    For models that no tensor parallel ranks share, and not for reductions that overlap with the backward pass: they wait for the
    gradient that autograd reports. Where something else has taken the place of Megatron's look-up, as the images of a multimodal
    model do, that is called.

    Returns:
        The number of tables that do so.
    """
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    tables = [
        module
        for chunk in chunks
        for module in chunk.modules()
        if type(module) is VocabParallelEmbedding and module.weight.requires_grad
    ]
    for table in tables:
        why = "the embedding's gradient goes straight into Megatron's fp32 buffer"
        patch(table, "forward", _forward(table, VocabParallelEmbedding.forward), why)
    return len(tables)


def _forward(table: Any, upstream: Any) -> Any:
    def forward(input_: Tensor) -> Any:
        current = type(table).forward
        if current is not upstream:
            return current(table, input_)
        return _LookUp.apply(input_, table.weight)

    return forward
