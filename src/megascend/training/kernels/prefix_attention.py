"""Attention of samples whose common prefixes are computed once.

A sample's own tokens attend to its whole sequence: keys and values of the prefix are rows of earlier samples, which are gathered
in front of its own. One call of a kernel for packed sequences with fewer queries than keys, causal from the bottom right, then
computes all samples (:meth:`PrefixLayout.attend`): the kernel sees plain sequences, with windows and sinks.

A kernel that returns log-sum-exps and takes them in its backward pass computes the same without copies
(:meth:`PrefixLayout.merge`). The rows are nodes of a tree in depth-first order: each attends causally to itself, and all rows
below a node, which follow it, attend to it in one long sequence. The parts are merged as in ring attention (Liu et al. 2023): the
backward pass of each takes the merged output and log-sum-exp.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks

from megascend.training.kernels.host_copy import to_device


@dataclass(frozen=True)
class Packed:
    """Ranges of rows that one call of a kernel computes, each its own sequence of queries, and of keys.

    Attributes:
        queries, keys: (first row, end) of each sequence.
        query_starts, key_starts: int32 [sequences + 1], starts in the rows of all ranges, one after the other, and the end.
        longest: most queries and most keys of a sequence.
    """

    queries: tuple[tuple[int, int], ...]
    keys: tuple[tuple[int, int], ...]
    query_starts: Tensor
    key_starts: Tensor
    longest: tuple[int, int]

    @classmethod
    def of(cls, queries: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]], device: torch.device) -> Packed:
        lengths = [[end - start for start, end in ranges] for ranges in (queries, keys)]
        query_starts, key_starts = (
            to_device(torch.tensor([0, *accumulate(counts)], dtype=torch.int32), device) for counts in lengths
        )
        return cls(tuple(queries), tuple(keys), query_starts, key_starts, (max(lengths[0]), max(lengths[1])))


class PartKernel(Protocol):
    """Attention of packed sequences that returns log-sum-exps, and its backward pass from those of all parts."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, packed: Packed, causal: bool) -> tuple[Tensor, Tensor]:
        """Return the output [queries, heads, head dim] and its fp32 log-sum-exps [queries, heads]."""
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sums: Tensor, packed: Packed,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of query, key and value, given output and log-sum-exps over all keys."""
        ...


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
        nodes: the nodes of the tree, each with itself as keys.
        levels: for each depth of nodes that others are below: the rows below each, with the node as keys.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    rows: Tensor
    owned: Tensor
    runs: tuple[tuple[int, int, int], ...]
    query_starts: Tensor
    key_starts: Tensor
    longest: Tensor
    nodes: Packed
    levels: tuple[Packed, ...]

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
            *_tree(
                [(int(rows[-count]), int(rows[-count - 1]) if len(rows) > count else -1) for rows, count in present],
                sum(queries),
                device,
            ),
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

    def merge(self, query: Tensor, key: Tensor, value: Tensor, kernel: PartKernel) -> Tensor:
        """Return attention of [rows, heads, head dim] in parts, of ``nodes`` and of each of ``levels``."""
        return _Merge.apply(*(states.contiguous() for states in (query, key, value)), self, kernel)


def _tree(starts: Sequence[tuple[int, int]], rows: int, device: torch.device) -> tuple[Packed, tuple[Packed, ...]]:
    """Return nodes and levels of rows in depth-first order.

    Args:
        starts: (first row, row that it follows, or -1) of each sequence's own tokens.
    """
    parents = torch.arange(-1, rows - 1)
    parents[[start for start, _ in starts]] = torch.tensor([row for _, row in starts])
    children = torch.bincount(parents + 1, minlength=rows + 1)[parents + 1]  # of each row's parent
    # A row continues a node if it follows the row before it, and no other one does.
    begins = (parents != torch.arange(-1, rows - 1)) | (children > 1)
    bounds = sorted({0, *begins.nonzero()[:, 0].tolist(), rows})
    nodes = list(pairwise(bounds))
    at_end = {end - 1: number for number, (_, end) in enumerate(nodes)}
    depths: list[int] = []
    below, path = [rows] * len(nodes), list[int]()  # end of the rows below each node; nodes above the one at hand
    for number, (start, _) in enumerate(nodes):
        parent = int(parents[start])
        depths.append(0 if parent < 0 else depths[at_end[parent]] + 1)
        while len(path) > depths[-1]:
            below[path.pop()] = start
        path.append(number)
    levels = []
    for depth in range(max(depths)):
        inner = [number for number, other in enumerate(depths) if other == depth and below[number] > nodes[number][1]]
        queries = [(nodes[number][1], below[number]) for number in inner]
        levels.append(Packed.of(queries, [nodes[number] for number in inner], device))
    return Packed.of(nodes, nodes, device), tuple(levels)


class _Merge(torch.autograd.Function):
    """Attention in parts. A part's share of a query's softmax is exp(its log-sum-exp - that of all parts)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: PrefixLayout, kernel: PartKernel
    ) -> Tensor:
        first, log_sums = kernel.forward(query, key, value, layout.nodes, True)
        out = first.to(log_sums.dtype) if layout.levels else first
        for level in layout.levels:
            states = _select(query, level.queries), _select(key, level.keys), _select(value, level.keys)
            part, part_sums = kernel.forward(*states, level, False)
            for (start, end), add, sums in _ranges(level.queries, part, part_sums):
                total = torch.logaddexp(log_sums[start:end], sums)
                out[start:end].mul_((log_sums[start:end] - total).exp_()[..., None])
                out[start:end].addcmul_(add.to(out.dtype), (sums - total).exp_()[..., None])
                log_sums[start:end] = total
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.layout, ctx.kernel = layout, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, log_sums = ctx.saved_tensors
        layout, kernel, grad = ctx.layout, ctx.kernel, grads[0].contiguous()
        totals = kernel.backward(grad, query, key, value, out, log_sums, layout.nodes, True)
        for level in layout.levels:
            of_queries = [_select(states, level.queries) for states in (grad, query, out, log_sums)]
            keys, values = _select(key, level.keys), _select(value, level.keys)
            parts = kernel.backward(*of_queries[:2], keys, values, *of_queries[2:], level, False)
            for total, part, ranges in zip(totals, parts, (level.queries, level.keys, level.keys), strict=True):
                for (start, end), add in _ranges(ranges, part):
                    total[start:end].add_(add)
        return *totals, None, None


def _select(states: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Return the rows of the ranges, one after the other; no copy if there is one."""
    parts = [states[start:end] for start, end in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _ranges(ranges: Sequence[tuple[int, int]], *states: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield each range with its rows of ``states``."""
    lengths = [end - start for start, end in ranges]
    yield from zip(ranges, *(tensor.split(lengths) for tensor in states), strict=True)


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
