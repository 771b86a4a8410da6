"""Triton kernel of the digest ``multilinear64`` on CUDA: one pass over the bytes, the same integers as plain torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _sums(words, keys, out, TILE: tl.constexpr, BLOCK: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, TILE, BLOCK):
        word = tl.load(words + tile * TILE + start + columns).to(tl.int64)
        total += word * tl.load(keys + start + columns)
    tl.store(out + tile, tl.sum(total, 0))


def tile_sums(words: Tensor, keys: Tensor, out: Tensor) -> None:
    """Write ``out[t] = sum(words[t] * keys)`` modulo 2^64.

    Args:
        words: int32 [tiles, tile], contiguous, on a CUDA device; a tile is a multiple of :data:`BLOCK`.
        keys: int64 [tile].
        out: int64 [tiles], written on the current stream.
    """
    with torch.cuda.device(words.device):
        launch = _sums[(len(words),)]  # type: ignore[reportIndexIssue]
        launch(words, keys, out, TILE=words.shape[1], BLOCK=BLOCK, num_warps=8)
