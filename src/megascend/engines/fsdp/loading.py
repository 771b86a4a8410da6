"""Each rank reads its own rows of a checkpoint's tensors. Nothing is broadcast, and no tensor of several ranks is read whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megascend.engines.fsdp.shards import LocalShard
from megascend.engines.fsdp.sources import Piece
from megascend.errors import CheckpointError
from megascend.huggingface.files import TensorHeader
from megascend.kernels.reductions import names_with_nan, out_of_range


@torch.no_grad()
def load(
    shards: Sequence[LocalShard],
    sources: Mapping[str, Sequence[Piece]],
    headers: Mapping[str, TensorHeader],
    fresh: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Fill this rank's shards.

    Args:
        fresh: by their names in a checkpoint, whole tensors that are in no file.
        dtype: that the model computes in.

    Returns:
        Bytes read from the files.

    Raises:
        CheckpointError: a file cannot be read, something was left unread, or a number is beyond fp16's range.
    """
    files: dict[Path, Any] = {}
    read = 0
    for shard in shards:
        if shard.local.is_floating_point():
            shard.local.fill_(torch.nan)
        for piece in sources[shard.name]:
            read += _read(shard, piece, headers[piece.source], files, fresh or {}, dtype)
    holes = names_with_nan({shard.name: shard.local for shard in shards})
    if holes:
        raise CheckpointError(f"model: {holes[0]} is not a number in places, or was not read whole")
    return read


def _read(
    shard: LocalShard,
    piece: Piece,
    header: TensorHeader,
    files: dict[Path, Any],
    fresh: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> int:
    """Copy what ``piece`` and ``shard`` have in common."""
    starts = [max(a, b) for a, b in zip(shard.offsets, piece.offsets, strict=True)]
    stops = [
        min(a + n, b + m)
        for a, n, b, m in zip(shard.offsets, shard.local.shape, piece.offsets, piece.sizes, strict=True)
    ]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return 0
    in_piece = [slice(a - o, b - o) for a, b, o in zip(starts, stops, piece.offsets, strict=True)]
    in_source = in_piece[len(in_piece) - len(header.shape) :]  # one expert has no dimension of experts
    in_shard = tuple(slice(a - o, b - o) for a, b, o in zip(starts, stops, shard.offsets, strict=True))
    target = shard.local[in_shard]
    if piece.source in fresh:
        target.copy_(fresh[piece.source][tuple(in_source)])
        return 0
    assert header.file is not None
    try:
        if header.file not in files:
            files[header.file] = safe_open(header.file, framework="pt")
        file = files[header.file]
        values: Tensor = file.get_slice(piece.source)[tuple(in_source)] if in_source else file.get_tensor(piece.source)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"model: {header.file}: {piece.source} cannot be read: {error}") from error
    if problem := out_of_range(piece.source, values, dtype):
        raise CheckpointError(f"model: {header.file}: {problem}")
    target.copy_(values.reshape(target.shape))
    return values.numel() * values.element_size()
