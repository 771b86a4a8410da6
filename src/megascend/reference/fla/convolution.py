"""Causal depthwise convolutions of a few taps, as linear attention applies them to queries, keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from megascend.errors import ConfigError


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Convolve each channel over the current and previous tokens; values before a sequence are zero.

    Args:
        x: [batch, tokens, channels].
        weight: [channels, taps]; the last tap is a token's own.
        bias: [channels].
        residual: refused.
        initial_state: refused.
        output_final_state: refused.
        activation: ``silu``, ``swish`` or None.
        cu_seqlens: starts of packed sequences and the end of the last, int [sequences + 1]; the batch is 1 then.

    Returns:
        outputs, as ``x``, and None in place of a final state.

    Raises:
        ConfigError: an argument is refused or unknown.
    """
    if residual is not None or initial_state is not None or output_final_state:
        raise ConfigError(
            "causal_conv1d: the reference on the CPU has neither residual, initial_state nor output_final_state"
        )
    positions = torch.arange(x.shape[1], device=x.device)
    if cu_seqlens is not None:
        starts = cu_seqlens.to(positions.dtype)
        positions = positions - starts[torch.searchsorted(starts, positions, right=True) - 1]
    return _activated(_uncompiled(x, weight, bias, positions), activation), None


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Convolve as :func:`causal_conv1d`, with channels before tokens.

    Args:
        x: [batch, channels, tokens].
        weight: [channels, taps].
        bias: [channels].
        seq_idx: number of each token's packed sequence, int [batch, tokens]; tokens of one are consecutive.
        activation: ``silu``, ``swish`` or None.
    """
    positions = torch.arange(x.shape[2], device=x.device)
    if seq_idx is not None:
        # The start of a token's sequence is the last position up to it at which the number changes.
        first = torch.ones_like(seq_idx, dtype=torch.bool)
        first[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
        positions = positions - torch.where(first, positions, 0).cummax(dim=1).values
    return _activated(_uncompiled(x.transpose(1, 2), weight, bias, positions), activation).transpose(1, 2)


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Convolve new tokens of a sequence whose last inputs are ``conv_state``, which is updated in place.

    Args:
        x: [batch, channels, new tokens].
        conv_state: [batch, channels, at least taps - 1].
        weight: [channels, taps].
        bias: [channels].
        activation: ``silu``, ``swish`` or None.
    """
    inputs = torch.cat([conv_state.to(x.dtype), x], dim=2)
    conv_state.copy_(inputs[:, :, -conv_state.shape[2] :])
    positions = torch.arange(inputs.shape[2], device=x.device)
    outputs = _convolve(inputs.transpose(1, 2), weight, bias, positions)[:, -x.shape[2] :]
    return _activated(outputs, activation).transpose(1, 2)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor) -> Tensor:
    """Sum the taps within a token's sequence; ``positions``: of tokens in their sequences, [tokens] or [batch, tokens]."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    taps, x, dtype = weight.shape[1], x.to(wide), x.dtype
    # Tap by tap, where conv1d would read the tokens of the sequence before: each tap has its own mask.
    result = x * weight[:, -1].to(wide)
    for distance in range(1, min(taps, x.shape[1])):
        shifted = torch.nn.functional.pad(x[:, :-distance], (0, 0, distance, 0))
        in_sequence = (positions >= distance).unsqueeze(-1)
        # where() rather than a product: an infinite value of another sequence must not become NaN here.
        result = result + torch.where(in_sequence, shifted, 0) * weight[:, taps - 1 - distance].to(wide)
    if bias is not None:
        result = result + bias.to(wide)
    return result.to(dtype)


# Not torch.compiler.disable, which imports the compiler: every bootstrap would, and it sets variables of the environment.
_uncompiled: Any = _disable_dynamo(_convolve)


def _activated(x: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return x
    if activation not in ("silu", "swish"):
        raise ConfigError(f"causal_conv1d: activation {activation!r} is not known; known: silu, swish")
    return torch.nn.functional.silu(x)
