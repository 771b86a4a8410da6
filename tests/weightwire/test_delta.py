"""Differences of two versions of a message are exact, small when little has changed, and refused when damaged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.delta import HEAD_BYTES, MAX_SHARE, apply, encode
from weightwire.errors import DigestError


def as_bytes(words: torch.Tensor) -> torch.Tensor:
    return words.to(torch.int16).view(torch.uint8)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 3000),
    st.lists(st.tuples(st.integers(0, 2999), st.integers(-(2**15), 2**15 - 1)), max_size=60),
    st.integers(0, 2**32 - 1),
)
def test_current_version_is_restored_bit_for_bit(count, changes, seed):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**15), 2**15, (count,), generator=generator, dtype=torch.int16)
    new = words.clone()
    for position, value in changes:
        new[position % count] = value
    difference = encode(as_bytes(new), as_bytes(words))
    if difference is None:
        # At most four bytes a change, a skip for every 255 words, and a byte of padding.
        largest = HEAD_BYTES + 4 * int((new != words).sum()) + count // 255 + 1
        assert largest >= MAX_SHARE * 2 * count
        return
    content = as_bytes(words.clone())
    apply(difference, content)
    assert torch.equal(content.view(torch.int16), new)


def test_damaged_differences_raise_and_leave_the_content():
    old = torch.arange(1000, dtype=torch.int16)
    new = old.clone()
    new[::50] += 1
    new[3] = -30000
    difference = encode(as_bytes(new), as_bytes(old))
    assert difference is not None
    for damage in (
        lambda d: d[:-2],
        lambda d: d[:10],
        lambda d: torch.cat([d, d.new_zeros(2)]),
        lambda d: torch.cat([torch.tensor([10**9, 5]).view(torch.uint8), d[16:]]),
        lambda d: torch.cat([torch.tensor([-1, 5]).view(torch.uint8), d[16:]]),
        lambda d: torch.cat([d[:16], torch.full((int(d[:8].view(torch.int64)),), 254, dtype=torch.uint8),
                             d[16 + int(d[:8].view(torch.int64)):]]),
        lambda d: torch.cat([d[:16], d.new_full((1,), 255), d[17:]]),
    ):  # fmt: skip
        content = as_bytes(old.clone())
        with pytest.raises(DigestError):
            apply(damage(difference), content)
        assert torch.equal(content.view(torch.int16), old)
