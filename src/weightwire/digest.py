"""What sender and receivers compare buckets by. The manifest names the algorithm; all are here wherever weightwire is.

``multilinear64`` is computed where the bytes are, in plain torch: 32-bit words times odd 64-bit keys, one for each place in a
tile, summed modulo 2^64; the sums of all tiles are words again, until one is left (the multilinear family of Carter and Wegman;
D. Lemire and O. Kaser, "Strongly universal string hashing is fast", 2014). A changed word always shows, two that have changed
places but for a chance of about 2^-32. It tells accidents, not attacks: for these there is ``sha256``, on the CPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from weightwire.errors import ManifestError

Pending = Callable[[], str]
"""The digest, in hexadecimal, when it is asked for: until then its computation may go on on the device."""

TILE = 2**13
"""Words that have keys of their own."""
_CPU_CHUNK, _DEVICE_CHUNK = 2**16, 2**24
"""Words at a time: their products, of 8 bytes each, stay in the processor's cache."""
_LENGTH_KEY = 0x9E3779B97F4A7C15


def begin(name: str, data: Tensor) -> Pending:
    """Start to compute the digest of bytes; they may be overwritten by what is queued on the same stream afterwards.

    Args:
        name: of the algorithm.
        data: uint8 [n], contiguous, on any device.

    Raises:
        ManifestError: there is no such algorithm.
    """
    return _algorithm(name)(data)


def digest(name: str, data: Tensor) -> str:
    """The digest of bytes (uint8 [n], contiguous, on any device), in hexadecimal.

    Raises:
        ManifestError: there is no such algorithm.
    """
    return begin(name, data)()


def require(name: str) -> None:
    """Raises ManifestError if there is no such algorithm."""
    _algorithm(name)


def _algorithm(name: str) -> Callable[[Tensor], Pending]:
    if name not in ALGORITHMS:
        raise ManifestError(f"there is no digest {name!r:.80}; known: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def _multilinear64(data: Tensor) -> Pending:
    length = data.numel()
    sums = _tile_sums(_words(data))
    while len(sums) > 1:
        sums = _tile_sums(sums.view(torch.int32))
    return lambda: f"{(int(sums.sum()) + length * _LENGTH_KEY) % 2**64:016x}"


def _words(data: Tensor) -> Tensor:
    """The bytes as int32, zeros added to the last ones."""
    missing = -data.numel() % 4
    if missing:
        data = torch.cat([data, data.new_zeros(missing)])
    elif data.data_ptr() % 4 or data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32)


def _tile_sums(words: Tensor) -> Tensor:
    """int64 [tiles]: of each tile the sum of words times keys, modulo 2^64."""
    keys = _keys(words.device)
    tiles, rest = divmod(words.numel(), TILE)
    sums = words.new_zeros(tiles + (rest > 0), dtype=torch.int64)
    step = (_CPU_CHUNK if words.device.type == "cpu" else _DEVICE_CHUNK) // TILE
    products = words.new_empty(min(step, tiles), TILE, dtype=torch.int64)
    for first in range(0, tiles, step):
        rows = words[first * TILE : min(first + step, tiles) * TILE].view(-1, TILE)
        product = torch.mul(rows, keys, out=products[: len(rows)])  # int32 times int64 is int64, which wraps
        torch.sum(product, 1, out=sums[first : first + len(rows)])
    if rest:
        sums[tiles] = (words[tiles * TILE :] * keys[:rest]).sum()
    return sums


@cache
def _keys(device: torch.device) -> Tensor:
    drawn = hashlib.shake_128(b"weightwire multilinear64").digest(8 * TILE)
    keys = [int.from_bytes(drawn[place : place + 8], "little", signed=True) | 1 for place in range(0, len(drawn), 8)]
    return torch.tensor(keys, dtype=torch.int64, device=device)


def _sha256(data: Tensor) -> Pending:
    found = hashlib.sha256(data.cpu().numpy().data).hexdigest()
    return lambda: found


ALGORITHMS: dict[str, Callable[[Tensor], Pending]] = {"multilinear64": _multilinear64, "sha256": _sha256}
"""By name."""
