"""The digest matches its formula, detects changes and permutations, and does not depend on alignment."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightwire.digest import ALGORITHMS, TILE, begin, digest


def by_hand(content: bytes) -> str:
    """Compute multilinear64 from its definition with Python integers."""
    key_bytes = hashlib.shake_128(b"weightwire multilinear64").digest(8 * TILE)
    keys = [int.from_bytes(key_bytes[8 * k : 8 * k + 8], "little", signed=True) | 1 for k in range(TILE)]

    def level(data: bytes) -> list[int]:
        data += bytes(-len(data) % 4)
        words = [int.from_bytes(data[k : k + 4], "little", signed=True) for k in range(0, len(data), 4)]
        return [
            sum(word * key for word, key in zip(words[k : k + TILE], keys, strict=False)) % 2**64
            for k in range(0, len(words), TILE)
        ]

    sums = level(content)
    while len(sums) > 1:
        sums = level(b"".join(value.to_bytes(8, "little") for value in sums))
    return f"{(sums[0] + len(content) * 0x9E3779B97F4A7C15) % 2**64:016x}"


def random_bytes(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 3, 4, 5, 4 * TILE - 1, 4 * TILE, 4 * TILE + 9, 40 * TILE + 2])
def test_multilinear64_matches_its_definition(size):
    data = random_bytes(size)
    assert digest("multilinear64", data) == by_hand(data.numpy().tobytes())


def test_digests_of_fixed_bytes():
    assert digest("sha256", torch.zeros(3, dtype=torch.uint8)) == hashlib.sha256(bytes(3)).hexdigest()
    assert digest("multilinear64", torch.arange(251, dtype=torch.uint8)) == by_hand(bytes(range(251)))


@given(st.integers(0, 9999), st.integers(0, 9999), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_swapped_pair_changes_the_digest_even_if_only_the_sign_differs(first, second, dtype):
    values = torch.ones(10_000, dtype=dtype)
    values[first], values[second] = -1, 1
    swapped = values.clone()
    swapped[first], swapped[second] = 1, -1
    same = torch.equal(values, swapped)
    assert (
        digest("multilinear64", values.view(torch.uint8)) == digest("multilinear64", swapped.view(torch.uint8))
    ) == same


@pytest.mark.parametrize("name", ALGORITHMS)
def test_digest_does_not_depend_on_alignment(name):
    data = random_bytes(1000)
    for shift in range(9):
        shifted = torch.empty(1009, dtype=torch.uint8)[shift : shift + 1000]
        shifted.copy_(data)
        assert begin(name, shifted)() == digest(name, data)
