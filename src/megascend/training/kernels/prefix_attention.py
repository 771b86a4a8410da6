"""Attention of samples whose common prefixes are computed once.

A sample's own tokens attend to its whole sequence: keys and values of the prefix are rows of earlier samples, which are gathered
in front of its own. One call of a kernel for packed sequences with fewer queries than keys, causal from the bottom right, then
computes all samples. Merging the attention to each part of a sequence by log-sum-exp would save the copies of keys and values,
but round differently, need every kernel's backward pass in parts, and not know windows and sinks; here a kernel sees a plain
sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks

from megascend.training.kernels.host_copy import to_device


@dataclass(frozen=True)
class PrefixLayout:
    """Rows and sequences of a micro batch. A sequence is a sample with tokens of its own, one after the other in the rows.

    Attributes:
        queries: tokens of its own of each sequence.
        keys: tokens of each sequence, with those of its prefix.
        rows: int64 [sum of keys], row of each key.
        owned: int64 [rows], key of the sequence that a row belongs to.
        runs: (first row, first key, length) of consecutive keys that belong to an earlier sequence.
        query_starts, key_starts: int32 [sequences + 1], starts among rows and keys, and the end.
        longest: int64 [2] on the host: most queries and most keys of a sequence.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    rows: Tensor
    owned: Tensor
    runs: tuple[tuple[int, int, int], ...]
    query_starts: Tensor
    key_starts: Tensor
    longest: Tensor

    @classmethod
    def of(cls, sequence_rows: Sequence[Tensor], own: Sequence[int], device: torch.device) -> PrefixLayout:
        """Build the layout of sequences; those without tokens of their own have no queries, and are left out.

        Args:
            sequence_rows: int64 [length] on the host, the row of each token of a sequence.
            own: number of last tokens of each that no sequence before it has.
        """
        present = [(rows, count) for rows, count in zip(sequence_rows, own, strict=True) if count]
        owned, runs, key = [], [], 0
        for rows, count in present:
            prefix = len(rows) - count
            owned.append(torch.arange(key + prefix, key + len(rows)))
            ends = (
                [*((rows[1:prefix] != rows[: prefix - 1] + 1).nonzero()[:, 0] + 1).tolist(), prefix] if prefix else []
            )
            runs += [(int(rows[start]), key + start, end - start) for start, end in zip([0, *ends], ends, strict=False)]
            key += len(rows)
        queries, keys = tuple(count for _, count in present), tuple(len(rows) for rows, _ in present)
        query_starts, key_starts = (
            to_device(torch.tensor([0, *accumulate(counts)], dtype=torch.int32), device) for counts in (queries, keys)
        )
        return cls(
            queries,
            keys,
            to_device(torch.cat([rows for rows, _ in present]), device),
            to_device(torch.cat(owned), device),
            tuple(runs),
            query_starts,
            key_starts,
            torch.tensor([max(queries), max(keys)]),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, compute: Callable[..., Tensor], dim: int = 0) -> Tensor:
        """Return ``compute(query, keys, values)``, with a sequence's keys and values one after the other.

        Args:
            query: one row of tokens along ``dim``; ``key`` and ``value``: of the same tokens.
            compute: attention of packed sequences of ``queries`` and ``keys`` tokens, causal from the bottom right.
        """
        keys, values = (_Gather.apply(states, self, dim) for states in (key, value))
        with _saved_as_rows(self, dim, ((keys, key), (values, value))):
            return compute(query, keys, values)


class _Gather(torch.autograd.Function):
    """Select the rows of the keys; a row's gradient is the sum of its keys', in fp32 and always in the same order."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, layout: PrefixLayout, dim: int) -> Tensor:
        ctx.layout, ctx.dim = layout, dim
        return states.index_select(dim, layout.rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,), layout, dim = grads, ctx.layout, ctx.dim
        total = grad.index_select(dim, layout.owned).float()
        for row, key, length in layout.runs:
            total.narrow(dim, row, length).add_(grad.narrow(dim, key, length))
        return total.to(grad.dtype), None, None


@contextlib.contextmanager
def _saved_as_rows(layout: PrefixLayout, dim: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Save rows for the backward pass in place of gathered keys and values, which may be many times as large."""
    sources = {keys.untyped_storage().data_ptr(): states.detach() for keys, states in pairs}

    def pack(saved: Tensor) -> Any:
        states = sources.get(saved.untyped_storage().data_ptr())
        return saved if states is None else (states, saved.size(), saved.stride(), saved.storage_offset())

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        states, *view = saved
        return states.index_select(dim, layout.rows).as_strided(*view)

    # Recomputation has hooks of its own, which keep nothing; it would not see what these keep.
    recomputed = _top_saved_tensors_default_hooks(False) is not None
    with contextlib.nullcontext() if recomputed else torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
