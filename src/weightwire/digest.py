"""What sender and receivers compare buckets by. The manifest names the algorithm; all are here wherever weightwire is.

``multilinear64`` is computed where the bytes are: 32-bit words times odd 64-bit keys, one for each place in a tile, summed
modulo 2^64; the sums of all tiles are words again, until one is left (the multilinear family of Carter and Wegman; D. Lemire
and O. Kaser, "Strongly universal string hashing is fast", 2014). A changed word always shows, two that have changed places but
for a chance of about 2^-32. It tells accidents, not attacks: for these there is ``sha256``, on the CPU. The sums are plain
torch, and on CUDA, where there is Triton, one kernel that reads the bytes once; integers are the same everywhere.
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
    sums = _tile_sums(data)
    while len(sums) > 1:
        sums = _tile_sums(sums.view(torch.uint8))
    value = _on_its_way(sums.sum())
    return lambda: f"{(value() + length * _LENGTH_KEY) % 2**64:016x}"


def _tile_sums(data: Tensor) -> Tensor:
    """int64 [tiles]: of each tile of the bytes (uint8, zeros added to the last ones) the sum of words times keys, modulo 2^64."""
    keys = _keys(data.device)
    tiles, rest = divmod(data.numel(), 4 * TILE)
    sums = torch.zeros(tiles + (rest > 0), dtype=torch.int64, device=data.device)
    if tiles:
        _whole_tiles(_words(data[: tiles * 4 * TILE]).view(tiles, TILE), keys, sums)
    if rest:
        padded = torch.zeros(-(-rest // 4) * 4, dtype=torch.uint8, device=data.device)
        padded[:rest].copy_(data[tiles * 4 * TILE :])
        sums[tiles] = (padded.view(torch.int32) * keys[: len(padded) // 4]).sum()
    return sums


def _words(data: Tensor) -> Tensor:
    """The bytes, whole words of them, as int32."""
    aligned = data.storage_offset() % 4 == 0 and data.data_ptr() % 4 == 0
    return (data if aligned else data.clone()).view(torch.int32)


def _whole_tiles(words: Tensor, keys: Tensor, sums: Tensor) -> None:
    """``sums[t] = sum(words[t] * keys)``; the product of int32 and int64 is int64, which wraps."""
    kind = words.device.type
    if kind == "cuda" and _has_triton():
        from weightwire.digest_triton import tile_sums

        tile_sums(words, keys, sums[: len(words)])
        return
    step = (_CPU_CHUNK if kind == "cpu" else _DEVICE_CHUNK) // TILE
    for first in range(0, len(words), step):
        rows = words[first : first + step]
        if kind == "cpu":
            torch.mv(rows.to(torch.int64), keys, out=sums[first : first + len(rows)])
        else:  # devices have no products of integer matrices
            torch.sum(rows * keys, 1, out=sums[first : first + len(rows)])


def _on_its_way(value: Tensor) -> Callable[[], int]:
    """Bring a number to the host without waiting for it now; it may be asked for from any thread, on any stream."""
    if value.device.type == "cpu":
        return lambda: int(value)
    module, device = torch.get_device_module(value.device), value.device
    if device.type == "cuda":
        page_locked = torch.empty((), dtype=torch.int64, pin_memory=True)
        value = page_locked.copy_(value, non_blocking=True)
    done = module.Event()
    done.record(module.current_stream(device))

    def read() -> int:
        done.synchronize()
        return int(value)

    return read


@cache
def _has_triton() -> bool:
    spec = find_spec("triton")
    return (
        spec is not None and spec.origin is not None
    )  # a folder of that name is an importable package without content


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
