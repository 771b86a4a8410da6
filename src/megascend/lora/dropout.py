"""Dropout whose mask depends on the token, the layer and the feature, not on where or with whom they are computed.

A tenant's masks are then the same alone or in a mixed batch, in every layout, and when a layer is recomputed. Each element
draws from a hash of (token key, layer, feature).
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from megascend.lora.segments import TokenSegments
from megascend.lora.stacked_adapters import StackedAdapters
from megascend.lora.target_modules import TargetModule


def token_keys(seed: int, step: int, input_ids: Tensor, positions: Tensor) -> Tensor:
    """int64 [n]: what each token of a sample draws its masks from, in [0, 2^31).

    Args:
        seed: of the adapter.
        step: of the adapter.
        input_ids: int64, the whole sample; equal samples of one step share masks.
        positions: int64 [n], the tokens' places in the sample.
    """
    sample = zlib.crc32(input_ids.numpy().tobytes(), zlib.crc32(f"{seed}/{step}".encode()))
    return mix(positions + sample)


def mix(values: Tensor) -> Tensor:
    """A hash of int64 values, in [0, 2^31): the finaliser of MurmurHash3 (Appleby), on 31 bits."""
    bits = values & 0x7FFFFFFF
    bits = ((bits ^ (bits >> 16)) * 0x45D9F3B) & 0x7FFFFFFF
    bits = ((bits ^ (bits >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
    return bits ^ (bits >> 16)


def drop(x: Tensor, stacked: StackedAdapters, segments: TokenSegments, target: TargetModule, *, local: bool) -> Tensor:
    """``x`` [..., in] with each token's adapter's dropout applied, if the layer is in training mode.

    Args:
        local: x holds this rank's slice of the tokens.
    """
    if segments.keys is None or not target.module.training:
        return x
    which = segments.mine if local else slice(None)
    rate = stacked.dropouts[segments.adapter_index[which]][:, None]
    layer = zlib.crc32((target.drawn_as or target.slices[0].name).encode())
    columns = mix(torch.arange(target.in_start, target.in_start + x.shape[-1], device=x.device) + layer)
    drawn = mix(segments.keys[which][:, None] ^ columns)
    keep = (drawn >= rate.double() * 2.0**31).to(x.dtype) / (1 - rate).to(x.dtype)
    return x * keep.view(x.shape)
