"""Triton kernels that exchange rows of memory on CUDA through registers: every byte is read once and written once."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightwire.staging import ROW_BYTES

BLOCK = 4096
"""Words that a program moves in one step."""
WORDS = {4: tl.int32, 2: tl.int16, 1: tl.int8}
"""Types of words by their bytes."""


@triton.jit
def _swap_long_rows(table, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    row = table + 3 * tl.program_id(0)
    # The compiler cannot know that addresses from a table are aligned, as the caller has checked; then it moves 16 bytes at once.
    left = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int32)), 16)
    right = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.int32)), 16)
    columns = tl.arange(0, BLOCK)
    for start in range(0, WORDS, BLOCK):
        a = tl.load(left + start + columns)
        b = tl.load(right + start + columns)
        tl.store(left + start + columns, b)
        tl.store(right + start + columns, a)


@triton.jit
def _swap_rows(table, WORD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = table + 3 * tl.program_id(0)
    left = tl.load(row).to(tl.pointer_type(WORD))
    right = tl.load(row + 1).to(tl.pointer_type(WORD))
    words = tl.load(row + 2) // WIDTH
    columns = tl.arange(0, BLOCK)
    for start in range(0, words, BLOCK):
        inside = start + columns < words
        a = tl.load(left + start + columns, mask=inside)
        b = tl.load(right + start + columns, mask=inside)
        tl.store(left + start + columns, b, mask=inside)
        tl.store(right + start + columns, a, mask=inside)


def swap_rows(table: Tensor, width: int) -> None:
    """Exchange rows of memory, on the current stream of the table's device. No two rows may overlap.

    Args:
        table: int64 [rows, 3], contiguous: two addresses and a number of bytes.
        width: bytes that divide all of the table's numbers: 1, 2 or 4; 16 if also every row has :data:`ROW_BYTES`.
    """
    with (
        torch.cuda.device(table.device) if table.is_cuda else contextlib.nullcontext()
    ):  # the latter in Triton's interpreter
        grid = (len(table),)
        if width == 16:
            _swap_long_rows[grid](table, WORDS=ROW_BYTES // 4, BLOCK=BLOCK, num_warps=8)  # type: ignore[reportIndexIssue]
        else:
            _swap_rows[grid](table, WORD=WORDS[width], WIDTH=width, BLOCK=BLOCK)  # type: ignore[reportIndexIssue]


def check_kernels(device: torch.device) -> None:
    """Compile the kernels for a device, so that the first exchange does not wait for it, and exchange a row with each."""
    rows = torch.arange(2 * ROW_BYTES // 4, dtype=torch.int32, device=device).view(2, -1).view(torch.uint8)
    for width in (16, *WORDS):
        size = ROW_BYTES if width == 16 else ROW_BYTES - 4  # nothing after the row may change
        expected = rows.clone()
        expected[:, :size] = rows.flip(0)[:, :size]
        table = torch.tensor([[rows[0].data_ptr(), rows[1].data_ptr(), size]]).to(device)
        swap_rows(table, width)
        if not torch.equal(rows, expected):
            raise RuntimeError(f"the kernel for words of {width} bytes has not exchanged two rows on {device}")
