"""Difference of two versions of a message: the 16-bit words that have changed. Exact, in plain torch, on any device.

A changed word is two bytes: the gap to the changed word before it, and the difference of the two values as integers, which for a
small step of a 16-bit float is a few units in the last place. A byte 255 in the gaps skips 255 words; a difference of -128 stands
for one that needs 16 bits, from a list at the end.

Layout: number of gap bytes and of differences (int64 each), gaps (uint8), differences (int8), padding to an even offset, long
differences (int16).
"""

from __future__ import annotations

import torch
from torch import Tensor

from weightwire.errors import DigestError

SKIP = 255
LONG = -128
HEAD_BYTES = 16
MAX_SHARE = 0.9
"""A difference larger than this share of the message is not worth its computation."""


def encode(current: Tensor, previous: Tensor) -> Tensor | None:
    """Return the difference from ``previous`` to ``current``; None if sending ``current`` itself is about as good.

    Args:
        current, previous: uint8 [n], contiguous, at an address that is a multiple of two.

    Returns:
        uint8 [m], m < :data:`MAX_SHARE` * n.
    """
    if current.numel() % 2 or not current.numel():
        return None
    changes = current.view(torch.int16) - previous.view(torch.int16)  # wraps
    indices = changes.nonzero().flatten()
    if HEAD_BYTES + 2 * len(indices) > MAX_SHARE * current.numel():
        return None
    values = changes[indices]
    is_long = (values <= LONG) | (values > -LONG - 1)
    short = torch.where(is_long, LONG, values).to(torch.int8)
    gaps = torch.diff(indices, prepend=indices.new_full((1,), -1)) - 1
    skips = gaps // SKIP
    ends = torch.cumsum(skips + 1, 0)
    count = int(ends[-1]) if len(ends) else 0
    steps = torch.full((count,), SKIP, dtype=torch.uint8, device=current.device)
    steps[ends - 1] = (gaps % SKIP).to(torch.uint8)
    head = torch.tensor([count, len(indices)], dtype=torch.int64).to(current.device)
    padding = steps.new_zeros((count + len(indices)) % 2)
    tail = values[is_long].contiguous().view(torch.uint8)
    difference = torch.cat([head.view(torch.uint8), steps, short.view(torch.uint8), padding, tail])
    return difference if difference.numel() < MAX_SHARE * current.numel() else None


def apply(difference: Tensor, content: Tensor) -> None:
    """Change ``content`` (uint8 [n]) in place from the previous version to the current one.

    Raises:
        DigestError: ``difference`` is not one of ``n`` bytes; ``content`` is unmodified.
    """
    total = difference.numel()
    count, changed = difference[:HEAD_BYTES].view(torch.int64).tolist() if total >= HEAD_BYTES else (-1, -1)
    start = HEAD_BYTES + count + changed
    # Checked before the numbers are used: the bytes come from a socket, and their digest is known only at the end.
    if count < 0 or changed < 0 or start > total or (total - start - (count + changed) % 2) % 2:
        raise DigestError(f"a difference of {total} bytes is malformed")
    steps = difference[HEAD_BYTES : HEAD_BYTES + count]
    values = difference[HEAD_BYTES + count : start].view(torch.int8).to(torch.int16)
    rest = difference[start + (count + changed) % 2 :]
    if rest.data_ptr() % 2:
        # An int16 view needs an even address, which the caller's buffer need not have.
        rest = rest.clone()
    tail = rest.view(torch.int16)
    is_value, is_long = steps != SKIP, values == LONG
    positions = torch.cumsum(steps.to(torch.int64) + is_value, 0)
    indices = positions[is_value] - 1
    words = content.view(torch.int16)
    last = int(positions[-1]) if count else 0
    if len(indices) != changed or int(is_long.sum()) != len(tail) or last > len(words):
        raise DigestError(f"a difference of {total} bytes does not fit a message of {content.numel()} bytes")
    values[is_long] = tail
    words[indices] += values
