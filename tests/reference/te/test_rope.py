"""apply_rotary_pos_emb against transformers' rotation and against multiplication by a complex number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as transformers_rotation

from megascend.errors import ConfigError, PlatformError
from megascend.reference.te.rope import apply_rotary_pos_emb

HEADS, DIM = 2, 8


def angles(positions: int, interleaved: bool = False) -> Tensor:
    """Return angles ``[positions, 1, 1, DIM]`` in the layout of Megatron-Core's RotaryEmbedding."""
    frequencies = torch.outer(torch.arange(positions).float(), 10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM))
    table = frequencies.repeat_interleave(2, dim=-1) if interleaved else torch.cat([frequencies, frequencies], dim=-1)
    return table[:, None, None, :]


def by_transformers(t: Tensor) -> Tensor:
    """Rotate ``[s, b, h, d]`` with transformers."""
    freqs = angles(t.shape[0])[:, 0, 0][None]
    heads_first = t.permute(1, 2, 0, 3)
    rotated, _ = transformers_rotation(heads_first, heads_first, freqs.cos(), freqs.sin())
    return rotated.permute(2, 0, 1, 3)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randn(12, 3, HEADS, DIM, generator=torch.Generator().manual_seed(0))


def test_interleaved_pairs_are_complex_numbers(tokens: Tensor) -> None:
    turn = torch.polar(torch.ones(12, DIM // 2), angles(12)[:, 0, 0, : DIM // 2])[:, None, None]
    expected = torch.view_as_real(torch.view_as_complex(tokens.unflatten(-1, (-1, 2))) * turn).flatten(-2)
    torch.testing.assert_close(apply_rotary_pos_emb(tokens, angles(12, True), interleaved=True), expected)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_packed_sequences_start_at_position_0(tokens: Tensor, cp_size: int) -> None:
    sequences = [tokens[:8, 0], tokens[:4, 1]]
    rotated_sequences = [by_transformers(sequence[:, None])[:, 0] for sequence in sequences]
    bounds = torch.tensor([0, 8, 12], dtype=torch.int32)
    for rank in range(cp_size):

        def share(parts: list[Tensor], rank: int = rank) -> Tensor:
            """Return a rank's zigzag chunks of every sequence."""
            if cp_size == 1:
                return torch.cat(parts)
            chunks = [part.chunk(2 * cp_size) for part in parts]
            return torch.cat(
                [piece for sequence_chunks in chunks for piece in (sequence_chunks[rank], sequence_chunks[-1 - rank])]
            )

        result = apply_rotary_pos_emb(
            share(sequences), angles(8), tensor_format="thd", cu_seqlens=bounds, cp_size=cp_size, cp_rank=rank
        )
        torch.testing.assert_close(result, share(rotated_sequences))


def test_inconsistent_arguments_are_refused(tokens: Tensor) -> None:
    bounds = torch.tensor([0, 6, 12], dtype=torch.int32)
    packed = tokens[:, 0]
    for arguments, message in (
        ({"t": tokens, "freqs": angles(11)}, "position 11, and freqs has 11"),
        ({"t": tokens, "freqs": angles(12), "tensor_format": "shbd"}, "must be one of sbhd, bshd, thd"),
        ({"t": tokens, "freqs": angles(12), "cp_size": 2}, "cp_size=2"),
        ({"t": packed, "freqs": angles(12), "tensor_format": "thd"}, "needs cu_seqlens"),
        ({"t": packed[:9], "freqs": angles(12), "tensor_format": "thd", "cu_seqlens": bounds}, "12 tokens .* t has 9"),
        (
            {"t": packed, "freqs": angles(12), "tensor_format": "thd", "cu_seqlens": bounds, "cp_size": 2},
            "a sequence of 6 tokens",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            apply_rotary_pos_emb(**arguments)  # type: ignore[arg-type]
    with pytest.raises(PlatformError, match="start_positions"):
        apply_rotary_pos_emb(tokens, angles(12), start_positions=torch.zeros(3))
