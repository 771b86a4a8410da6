"""apply_rotary_pos_emb: the rotary embedding that ``apply_rope_fusion`` calls in Transformer Engine, in plain PyTorch."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from megascend.errors import ConfigError
from megascend.reference.te.unsupported import refuse

FORMATS = ("sbhd", "bshd", "thd")


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotate the first ``freqs.shape[-1]`` features of every head by its position's angles; cosine and sine in fp32.

    Args:
        t: ``[s, b, h, d]``, ``[b, s, h, d]`` or ``[t, h, d]``, according to ``tensor_format``.
        freqs: ``[positions, 1, 1, d']``, angles of each position, ``d' <= d``.
        interleaved: features 2i and 2i + 1 are a pair; else i and i + d'/2.
        fused: ignored.
        cu_seqlens: ``[sequences + 1]``, for thd: starts of the packed sequences, before the split over context parallel ranks.
        cp_size, cp_rank: for thd, context parallel position: ``t`` has chunks ``cp_rank`` and ``2 * cp_size - 1 - cp_rank``.
    """
    if start_positions is not None:
        refuse("apply_rotary_pos_emb(start_positions=...)", "cut freqs instead")
    if tensor_format not in FORMATS:
        raise ConfigError(f"apply_rotary_pos_emb: tensor_format={tensor_format!r} must be one of {', '.join(FORMATS)}")
    angles = freqs.reshape(freqs.shape[0], freqs.shape[-1]).float()
    if tensor_format == "thd":
        if cu_seqlens is None:
            raise ConfigError("apply_rotary_pos_emb: tensor_format='thd' needs cu_seqlens")
        # Positions restart with each packed sequence, and a rank holds two chunks of each.
        rows = _packed_positions(cu_seqlens.tolist(), cp_size, cp_rank)
        if len(rows) != t.shape[0]:
            raise ConfigError(
                f"apply_rotary_pos_emb: cu_seqlens has {len(rows)} tokens for this rank, and t has {t.shape[0]}"
            )
    else:
        if cp_size > 1:
            raise ConfigError(
                f"apply_rotary_pos_emb: cp_size={cp_size} is for tensor_format='thd'; else freqs is cut already"
            )
        rows = list(range(t.shape[tensor_format.index("s")]))
    if rows and max(rows) >= len(angles):
        raise ConfigError(f"apply_rotary_pos_emb: position {max(rows)}, and freqs has {len(angles)} positions")
    shape = [-1 if axis in "st" else 1 for axis in tensor_format[:-1]]
    angles = angles[torch.tensor(rows, dtype=torch.long, device=angles.device)].view(*shape, angles.shape[-1])
    # Partial rotary embeddings: the features behind the angles' width pass unchanged.
    rotary, rest = t[..., : angles.shape[-1]], t[..., angles.shape[-1] :]
    rotated = rotary.float() * angles.cos() + _quarter_turn(rotary.float(), interleaved) * angles.sin()
    return torch.cat([rotated.to(t.dtype), rest], dim=-1)


def _packed_positions(bounds: list[int], cp_size: int, cp_rank: int) -> list[int]:
    """Return the position of every token of the rank in its sequence."""
    positions: list[int] = []
    for first, end in itertools.pairwise(bounds):
        length = end - first
        if cp_size == 1:
            positions += range(length)
            continue
        chunk, rest = divmod(length, 2 * cp_size)
        if rest:
            raise ConfigError(
                f"apply_rotary_pos_emb: a sequence of {length} tokens is no multiple of 2 x cp_size = {2 * cp_size}"
            )
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            positions += range(index * chunk, (index + 1) * chunk)
    return positions


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """Map each pair (a, b) to (-b, a)."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
