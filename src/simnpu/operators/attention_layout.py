"""Layouts of the fused attention: between a caller's tensors and blocks of [batch, heads, sequence, head dim].

``SBH``, ``BSH``, ``BNSD`` and ``BSND`` are one block. ``TND`` packs sequences of different lengths one after the other;
each is a block of its own, and its bounds come from cumulative lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from simnpu.operators.refusal import Refusal

LAYOUTS = ("BSH", "SBH", "BNSD", "BSND", "TND")
MAX_HEADS = 256
MAX_HEAD_DIM = 768
MAX_LENGTH = 1 << 20
MAX_BATCH = 2 << 20
MAX_PACKED = 1024  # sequences of a TND call
STATISTICS = 8  # last dimension of softmax_max and softmax_sum: the kernel fills a 32-byte block with copies


@dataclass(frozen=True)
class Layout:
    """The sizes of one attention call, checked, and how to take its tensors apart and put them together."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    q_lengths: tuple[int, ...]  # one per block
    kv_lengths: tuple[int, ...]

    @property
    def packed(self) -> bool:
        return self.name == "TND"

    @property
    def max_q(self) -> int:
        return max(self.q_lengths)

    @property
    def max_kv(self) -> int:
        return max(self.kv_lengths)

    def split(self, tensor: Tensor, heads: int, lengths: tuple[int, ...]) -> list[Tensor]:
        """Blocks [batch, heads, sequence, dim] of a query-, key- or value-like tensor, in float32."""
        if self.name == "TND":
            return [part.transpose(0, 1).unsqueeze(0).float() for part in tensor.split(list(lengths))]
        if self.name == "SBH":
            blocks = tensor.view(*tensor.shape[:2], heads, -1).permute(1, 2, 0, 3)
        elif self.name == "BSH":
            blocks = tensor.view(*tensor.shape[:2], heads, -1).transpose(1, 2)
        elif self.name == "BSND":
            blocks = tensor.transpose(1, 2)
        else:
            blocks = tensor
        return [blocks.float()]

    def join(self, blocks: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Invert :meth:`split`: return one contiguous tensor in the caller's layout."""
        if self.name == "TND":
            return torch.cat([block.squeeze(0).transpose(0, 1) for block in blocks]).to(dtype)
        block = blocks[0].to(dtype)
        if self.name == "SBH":
            return block.permute(2, 0, 1, 3).flatten(2).contiguous()
        if self.name == "BSH":
            return block.transpose(1, 2).flatten(2).contiguous()
        return (block.transpose(1, 2) if self.name == "BSND" else block).contiguous()

    def join_statistics(self, blocks: list[Tensor], softmax_layout: str) -> Tensor:
        """softmax_max or softmax_sum from [batch, heads, sequence, 1] blocks: [B, N, S, 8], or [T, N, 8] for TND.

        Unless ``softmax_layout`` is ``TND``, the memory of the latter runs sequence by sequence as [N, S, 8] under the
        shape [T, N, 8]: code that indexes it has to know (public documentation of npu_fusion_attention).
        """
        if not self.packed:
            return blocks[0].expand(*blocks[0].shape[:-1], STATISTICS).contiguous()
        parts = [block[0].transpose(0, 1) if softmax_layout == "TND" else block[0] for block in blocks]
        flat = torch.cat([part.reshape(-1, 1) for part in parts])
        return flat.expand(-1, STATISTICS).reshape(-1, self.heads, STATISTICS)

    def split_statistics(self, statistics: Tensor, softmax_layout: str) -> list[Tensor]:
        """Invert :meth:`join_statistics`."""
        if not self.packed:
            return [statistics[..., :1].float()]
        rows = [length * self.heads for length in self.q_lengths]
        parts = statistics.reshape(-1, STATISTICS)[:, :1].float().split(rows)
        if softmax_layout == "TND":
            return [part.view(1, -1, self.heads, 1).transpose(1, 2) for part in parts]
        return [part.view(1, self.heads, -1, 1) for part in parts]


def lengths(cumulative: Sequence[int]) -> tuple[int, ...]:
    """Lengths from cumulative ones; trailing zeros are sequences that take no part."""
    ends = list(cumulative)
    while ends and ends[-1] == 0:
        ends.pop()
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def read_layout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    actual_seq_qlen: Sequence[int] | None,
    actual_seq_kvlen: Sequence[int] | None,
    refuse: Refusal,
) -> Layout:
    """Check the tensors' shapes as the operator does, and name their sizes."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() not in (3, 4):
            refuse(f"The shapes of the input {name} should be 3 or 4 dimensional, but got {tensor.dim()}-dimensional")
    if head_num <= 0:
        refuse(f"head_num must > 0, but got {head_num}")
    layout = input_layout.upper()
    if layout not in LAYOUTS:
        refuse(f"The input_layout should be BSH/SBH/BNSD/BSND/TND(case-insensitive), but got {input_layout}")
    if query.dim() != len(layout) or key.dim() != len(layout):
        refuse.kernel(f"Invalid layout[{layout}].")
    if layout == "TND":
        return read_packed(query, key, value, head_num, actual_seq_qlen, actual_seq_kvlen, refuse)
    batch_axis, sequence_axis = layout.index("B"), layout.index("S")
    if layout in ("SBH", "BSH"):
        if query.shape[-1] % head_num:
            refuse.kernel(f"h1 [{query.shape[-1]}] should be a multiple of n1Size [{head_num}].")
        head_dim = query.shape[-1] // head_num
        kv_heads = key.shape[-1] // head_dim
    else:
        head_axis = layout.index("N")
        if query.shape[head_axis] != head_num:
            refuse.kernel(f"head_num is [{head_num}], but got query dim{head_axis} [{query.shape[head_axis]}].")
        head_dim, kv_heads = query.shape[-1], key.shape[head_axis]
    if query.shape[batch_axis] != key.shape[batch_axis]:
        refuse.kernel(
            f"batch of query and key must be equal, but got {query.shape[batch_axis]} and {key.shape[batch_axis]}"
        )
    check_heads(head_num, kv_heads, head_dim, refuse)
    check_value(key, value, kv_heads if layout in ("SBH", "BSH") else 1, head_dim, refuse)
    check_sizes(query.shape[batch_axis], query.shape[sequence_axis], key.shape[sequence_axis], refuse)
    return Layout(
        layout,
        head_num,
        kv_heads,
        head_dim,
        query.shape[batch_axis],
        (query.shape[sequence_axis],),
        (key.shape[sequence_axis],),
    )


def read_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    actual_seq_qlen: Sequence[int] | None,
    actual_seq_kvlen: Sequence[int] | None,
    refuse: Refusal,
) -> Layout:
    """Read the sizes of a TND call."""
    if not actual_seq_qlen or not actual_seq_kvlen or len(actual_seq_qlen) != len(actual_seq_kvlen):
        refuse("the size of actual_seq_qlen and actual_seq_kvlen must be the same and cannot be empty.")
    if len(actual_seq_qlen) > MAX_PACKED:
        refuse.kernel(f"actual_seq_qlen must have at most {MAX_PACKED} entries, but got {len(actual_seq_qlen)}")
    q_lengths, kv_lengths = lengths(actual_seq_qlen), lengths(actual_seq_kvlen)
    if min(q_lengths + kv_lengths, default=-1) < 0:
        refuse.kernel(f"cumulative lengths must not fall: {list(actual_seq_qlen)}, {list(actual_seq_kvlen)}")
    if query.shape[0] != sum(q_lengths) or key.shape[0] != sum(kv_lengths):
        refuse.kernel(
            f"Query T({query.shape[0]}) and key T({key.shape[0]}) need equal to respectively sum of "
            f"seqLen({sum(q_lengths)}) and sekvLen({sum(kv_lengths)})."
        )
    for number, (q_length, kv_length) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        if q_length and not kv_length:
            refuse.kernel(f"Batch({number}) seqLen is not 0 and sekvLen is 0, this scene is not supported.")
    if query.shape[1] != head_num:
        refuse.kernel(f"head_num is [{head_num}], but got query dim1 [{query.shape[1]}].")
    check_heads(head_num, key.shape[1], query.shape[2], refuse)
    check_value(key, value, 1, query.shape[2], refuse)
    check_sizes(len(q_lengths), query.shape[0], key.shape[0], refuse)
    return Layout("TND", head_num, key.shape[1], query.shape[2], len(q_lengths), q_lengths, kv_lengths)


def check_heads(heads: int, kv_heads: int, head_dim: int, refuse: Refusal) -> None:
    """Head counts and head dimension that the kernel takes."""
    if kv_heads == 0:
        refuse.kernel("n2Size is zero.")
    if heads > MAX_HEADS:
        refuse.kernel(f"n1Size is not in range:[1, {MAX_HEADS}]: it is {heads}.")
    if not 0 < head_dim <= MAX_HEAD_DIM:
        refuse.kernel(f"dSize is not in range:(0, {MAX_HEAD_DIM}]: it is {head_dim}.")
    if heads % kv_heads:
        refuse.kernel(f"n1Size [{heads}] should be a multiple of n2Size [{kv_heads}].")


def check_value(key: Tensor, value: Tensor, joined_heads: int, head_dim: int, refuse: Refusal) -> None:
    """Check the shapes of key, of the query's head dimension, and value, whose heads may be smaller.

    ``joined_heads``: key-value heads that the last dimension holds.
    """
    key_dim, value_dim = key.shape[-1] / joined_heads, value.shape[-1] / joined_heads
    if key_dim != head_dim or value.shape[:-1] != key.shape[:-1] or not 0 < value_dim <= key_dim or value_dim % 1:
        refuse.kernel(
            f"key and value must have one shape, with the query's head dimension {head_dim} (the value's may be less), "
            f"but got {list(key.shape)} and {list(value.shape)}"
        )


def check_sizes(batch: int, q_length: int, kv_length: int, refuse: Refusal) -> None:
    """Batch size and sequence lengths (packed: of all sequences together) that the kernel takes."""
    if batch > MAX_BATCH:
        refuse.kernel(f"batch size must be at most {MAX_BATCH}, but got {batch}")
    if max(q_length, kv_length) > MAX_LENGTH:
        refuse.kernel(f"sequence length must be at most {MAX_LENGTH}, but got {max(q_length, kv_length)}")
