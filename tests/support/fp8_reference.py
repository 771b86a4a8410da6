"""Weights in fp8 blocks by their definition, block by block and without broadcasting."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch


def quantise_by_blocks(
    weight: torch.Tensor, rows: int, columns: int, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values in fp8 and the scales of a matrix, as DeepSeek-V3 and vLLM define them."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    grid = (math.ceil(weight.shape[0] / rows), math.ceil(weight.shape[1] / columns))
    scales = torch.empty(grid)
    for down in range(grid[0]):
        for across in range(grid[1]):
            block = (slice(down * rows, (down + 1) * rows), slice(across * columns, (across + 1) * columns))
            part = weight[block].to(torch.float32)
            scale = torch.maximum(part.abs().max(), torch.tensor(1e-4)) / torch.tensor(448.0)
            if power_of_two:
                exponent = -200
                while 2.0**exponent < scale.item():
                    exponent += 1
                scale = torch.tensor(2.0**exponent)
            scales[down, across] = scale
            values[block] = (part * (torch.tensor(1.0) / scale)).to(torch.float8_e4m3fn)
    return values, scales


def dequantised(tensors: Mapping[str, torch.Tensor], rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Return the weights in float32 that tensors of a checkpoint in fp8 blocks stand for."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        scales = tensors.get(f"{name}_scale_inv")
        result[name] = tensor.float()
        if scales is not None:
            for down, across in ((i, j) for i in range(scales.shape[0]) for j in range(scales.shape[1])):
                result[name][down * rows : (down + 1) * rows, across * columns : (across + 1) * columns] *= scales[
                    down, across
                ]
    return result
