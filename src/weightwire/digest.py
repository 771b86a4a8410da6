"""Digests by which sender and receivers compare buckets. The manifest names the algorithm.

``multilinear64`` is computed on the device of the bytes: 32-bit words times odd 64-bit keys, one for each position in a tile,
summed modulo 2^64; the sums of all tiles are hashed again, until one is left (the multilinear family of Carter and Wegman;
D. Lemire and O. Kaser, "Strongly universal string hashing is fast", 2014). It always detects a changed word, and swapped words
but for a chance of about 2^-32. It detects accidents, not attacks; against these there is ``sha256``, on the CPU. The sums are
plain torch, and on CUDA with Triton one kernel that reads the bytes once; the integers are the same everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from weightwire.errors import ManifestError

Pending = Callable[[], str]
"""Returns the digest, in hexadecimal; waits for the device if its computation is still running there."""

TILE = 2**13
"""Words of a tile, each with its own key."""
_CPU_CHUNK, _DEVICE_CHUNK = 2**16, 2**24
"""Words per step: on the CPU their products, 8 bytes each, stay in the cache."""
_LENGTH_KEY = 0x9E3779B97F4A7C15


def begin(name: str, data: Tensor) -> Pending:
    """Start to compute the digest of bytes; work queued later on the same stream may overwrite them.

    Args:
        name: name of the algorithm.
        data: uint8 [n], contiguous, on any device.
    """
    return _algorithm(name)(data)


def digest(name: str, data: Tensor) -> str:
    """Return the digest of bytes (uint8 [n], contiguous, on any device), in hexadecimal."""
    return begin(name, data)()


def require(name: str) -> None:
    """Raise ManifestError if the algorithm is unknown."""
    _algorithm(name)


def _algorithm(name: str) -> Callable[[Tensor], Pending]:
    if name not in ALGORITHMS:
        raise ManifestError(f"unknown digest {name!r:.80}; known: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def _multilinear64(data: Tensor) -> Pending:
    length = data.numel()
    sums = _tile_sums(data)
    while len(sums) > 1:
        # Hashed again, not added up: a plain sum would not notice tiles that have changed places.
        sums = _tile_sums(sums.view(torch.uint8))
    value = _start_copy_to_host(sums.sum())
    # The length: zeros at the end, with which the last tile is padded, would not change the sum.
    return lambda: f"{(value() + length * _LENGTH_KEY) % 2**64:016x}"


def _tile_sums(data: Tensor) -> Tensor:
    """Return int64 [tiles]: each tile's sum of words times keys, modulo 2^64; the last tile is padded with zeros."""
    keys = _keys(data.device)
    tiles, rest = divmod(data.numel(), 4 * TILE)
    sums = torch.zeros(tiles + (rest > 0), dtype=torch.int64, device=data.device)
    if tiles:
        _sum_full_tiles(_words(data[: tiles * 4 * TILE]).view(tiles, TILE), keys, sums)
    if rest:
        padded = torch.zeros(-(-rest // 4) * 4, dtype=torch.uint8, device=data.device)
        padded[:rest].copy_(data[tiles * 4 * TILE :])
        sums[tiles] = (padded.view(torch.int32) * keys[: len(padded) // 4]).sum()
    return sums


def _words(data: Tensor) -> Tensor:
    """View bytes, a multiple of four, as int32; copy them if they are not aligned."""
    aligned = data.storage_offset() % 4 == 0 and data.data_ptr() % 4 == 0
    return (data if aligned else data.clone()).view(torch.int32)


def _sum_full_tiles(words: Tensor, keys: Tensor, sums: Tensor) -> None:
    """Write ``sums[t] = sum(words[t] * keys)``; the product of int32 and int64 is int64, which wraps."""
    kind = words.device.type
    if kind == "cuda" and has_triton():
        from weightwire.digest_triton import tile_sums

        tile_sums(words, keys, sums[: len(words)])
        return
    step = (_CPU_CHUNK if kind == "cpu" else _DEVICE_CHUNK) // TILE
    for first in range(0, len(words), step):
        rows = words[first : first + step]
        if kind == "cpu":
            torch.mv(rows.to(torch.int64), keys, out=sums[first : first + len(rows)])
        else:  # no integer matrix products on devices
            torch.sum(rows * keys, 1, out=sums[first : first + len(rows)])


def _start_copy_to_host(value: Tensor) -> Callable[[], int]:
    """Start to copy a number to the host; the result returns it, on any thread and any stream."""
    if value.device.type == "cpu":
        return lambda: int(value)
    module, device = torch.get_device_module(value.device), value.device
    if device.type == "cuda":
        # A copy to pageable memory would wait for the device.
        page_locked = torch.empty((), dtype=torch.int64, pin_memory=True)
        value = page_locked.copy_(value, non_blocking=True)
    copied = module.Event()
    # An event instead of a wait: digests of all buckets are read at the end.
    copied.record(module.current_stream(device))

    def read() -> int:
        copied.synchronize()
        return int(value)

    return read


@cache
def has_triton() -> bool:
    """Check whether Triton can be imported."""
    spec = find_spec("triton")
    # A folder named triton is an importable namespace package: it has no origin.
    return spec is not None and spec.origin is not None


@cache
def _keys(device: torch.device) -> Tensor:
    random = hashlib.shake_128(b"weightwire multilinear64").digest(8 * TILE)
    keys = [int.from_bytes(random[start : start + 8], "little", signed=True) | 1 for start in range(0, len(random), 8)]
    return torch.tensor(keys, dtype=torch.int64, device=device)


def _sha256(data: Tensor) -> Pending:
    value = hashlib.sha256(data.cpu().numpy().data).hexdigest()
    return lambda: value


ALGORITHMS: dict[str, Callable[[Tensor], Pending]] = {"multilinear64": _multilinear64, "sha256": _sha256}
"""Algorithms by name."""
