"""Weights in fp8 blocks, as checkpoints of DeepSeek-V3 and vLLM have them: e4m3 values, and a scale for each block of a matrix.

``weight = values * scale`` within a block; the scales of ``NAME`` are the tensor ``NAME_scale_inv`` in float32. An engine that
stores weights so reports them (:meth:`weightwire.engine.InferenceEngine.quantised`), and a trainer sends them quantised: half the
bytes of bf16. The numbers are those of vLLM's ``per_block_cast_to_fp8`` (``vllm/utils/deep_gemm.py``): a scale is the largest
absolute value of its block, at least 1e-4, divided by 448, and values are rounded to the nearest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weightwire.errors import ManifestError
from weightwire.manifest import MAX_TENSORS, TensorSpec, check_size, is_count
from weightwire.slices import Box

SCALES = "_scale_inv"
"""Suffix of the scales' name."""
VALUES_DTYPE, SCALES_DTYPE = "float8_e4m3fn", "float32"
LARGEST = 448.0
SMALLEST_AMAX = 1e-4
MAX_BLOCK = 2**16
PART_ELEMENTS = 2**26
"""Numbers of a stack of matrices that are quantised together, unless a matrix has more."""


@dataclass(frozen=True)
class BlockFormat:
    """Blocks of a weight.

    Attributes:
        rows, columns: size of a block in the last two dimensions; blocks at the end may be smaller.
        power_of_two: scales are rounded up to powers of two (``scale_fmt: ue8m0``).
    """

    rows: int
    columns: int
    power_of_two: bool = False

    def specs(self, weight: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
        if len(weight.shape) < 2:
            raise ManifestError(f"{weight.name} has shape {list(weight.shape)}, and blocks are of matrices")
        return (
            TensorSpec(weight.name, VALUES_DTYPE, weight.shape),
            TensorSpec(weight.name + SCALES, SCALES_DTYPE, self.blocks(weight.shape)),
        )

    def blocks(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight."""
        return (*shape[:-2], -(-shape[-2] // self.rows), -(-shape[-1] // self.columns))

    def box(self, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> Box | None:
        """Return the slice of the scales for a slice of a weight; None if it cuts a block.

        Args:
            shape: of the weight.
        """
        matrix = list(zip(offsets[-2:], sizes[-2:], shape[-2:], (self.rows, self.columns), strict=True))
        if any(
            start % block or ((start + size) % block and start + size != length)
            for start, size, length, block in matrix
        ):
            return None
        starts = (*offsets[:-2], *(start // block for start, _, _, block in matrix))
        return starts, self.blocks(sizes)


def formats_to_json(formats: Mapping[str, BlockFormat]) -> list[Any]:
    """Return plain data: ``[rows, columns, power_of_two, names]`` of each format.

    By format: a mixture of experts has tens of thousands of weights in one, and every push asks for them.
    """
    names: dict[BlockFormat, list[str]] = {}
    for name, blocks in formats.items():
        names.setdefault(blocks, []).append(name)
    return [[blocks.rows, blocks.columns, blocks.power_of_two, weights] for blocks, weights in names.items()]


def formats_from_json(data: Any) -> dict[str, BlockFormat]:
    """Parse an engine's untrusted description of its quantised weights, from :func:`formats_to_json`."""
    check_size(data, list, MAX_TENSORS, "quantised: formats")
    formats: dict[str, BlockFormat] = {}
    for row in data:
        if (
            not isinstance(row, list)
            or len(row) != 4
            or not all(is_count(size, MAX_BLOCK) and size > 0 for size in row[:2])
            or type(row[2]) is not bool
        ):
            raise ManifestError(f"quantised: {row!r:.80} is not [rows, columns, power_of_two, names]")
        check_size(row[3], list, MAX_TENSORS - len(formats), "quantised: names")
        if not all(isinstance(name, str) for name in row[3]):
            raise ManifestError("quantised: a name is not a text")
        count = len(formats) + len(row[3])
        formats |= dict.fromkeys(row[3], BlockFormat(*row[:3]))
        if len(formats) < count:
            raise ManifestError("quantised: a weight has two formats")
    return formats


def stored_specs(specs: Iterable[TensorSpec], formats: Mapping[str, BlockFormat]) -> tuple[TensorSpec, ...]:
    """Return the specs of a model's tensors as an engine stores them: values and scales in place of quantised weights.

    Args:
        formats: may have weights that are not sent, such as those of prediction heads that the trainer keeps.
    """
    stored: list[TensorSpec] = []
    for spec in specs:
        stored += formats[spec.name].specs(spec) if spec.name in formats else (spec,)
    return tuple(stored)


def stored_tensors(
    tensors: Iterable[tuple[str, Tensor]], formats: Mapping[str, BlockFormat]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors as an engine stores them, in the order of :func:`stored_specs`.

    Raises:
        ManifestError: at the end: a quantised weight was not finite.
    """
    finite: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        if name in formats:
            values, scales = quantise(tensor, formats[name])
            finite.append((name, scales.isfinite().all()))
            yield name, values
            yield name + SCALES, scales
        else:
            yield name, tensor
    require_finite(finite)


def require_finite(finite: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ManifestError unless all quantised weights were finite: an engine computes NaN with the blocks of others.

    Args:
        finite: (weight, bool tensor: its scales are finite). All are read at once, since reading one waits for the device.
    """
    if not finite:
        return
    device = finite[0][1].device  # a mapping of tensors may have several
    flags = torch.stack([flag.to(device) for _, flag in finite]).tolist()
    names = dict.fromkeys(name for (name, _), flag in zip(finite, flags, strict=True) if not flag)
    if names:
        raise ManifestError(
            f"{next(iter(names))} has numbers that are NaN or infinite ({len(names)} weights), which blocks of fp8 cannot hold"
        )


@torch.no_grad()
def quantise(weight: Tensor, blocks: BlockFormat) -> tuple[Tensor, Tensor]:
    """Return a weight's values (float8_e4m3fn, its shape) and the scales of its blocks (float32).

    The scale of a block with a number that is not finite is not finite either.
    """
    rows, columns = weight.shape[-2:]
    grid = blocks.blocks(weight.shape)
    if not weight.numel():
        empty = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
        return empty, torch.empty(grid, dtype=torch.float32, device=weight.device)
    matrices = weight.detach().reshape(-1, rows, columns)
    # In parts: float32 copies of all experts of a layer may take more memory than is free.
    parts = [_quantised_matrices(part, blocks) for part in matrices.split(max(1, PART_ELEMENTS // (rows * columns)))]
    values, scales = (side[0] if len(side) == 1 else torch.cat(side) for side in zip(*parts, strict=True))
    return values.view(weight.shape), scales.view(grid)


def _quantised_matrices(matrices: Tensor, blocks: BlockFormat) -> tuple[Tensor, Tensor]:
    """Return values and scales of matrices [n, rows, columns]."""
    _, rows, columns = matrices.shape
    grid = blocks.blocks(matrices.shape)
    down, across = grid[-2] * blocks.rows, grid[-1] * blocks.columns
    matrices = matrices.float()
    if (down, across) != (rows, columns):
        # Zeros do not change a block's largest absolute value.
        matrices = torch.nn.functional.pad(matrices, (0, across - columns, 0, down - rows))
    tiles = matrices.view(-1, grid[-2], blocks.rows, grid[-1], blocks.columns)
    scales = tiles.abs().amax(dim=(2, 4), keepdim=True).clamp(min=SMALLEST_AMAX) / LARGEST
    if blocks.power_of_two:
        fraction, exponent = torch.frexp(scales)
        # scale = fraction * 2^exponent with a fraction from 0.5 on, and 0.5 * 2^exponent is a power of two already.
        rounded = torch.ldexp(torch.ones_like(scales), exponent - (fraction == 0.5).int())
        scales = torch.where(scales.isfinite(), rounded, scales)
    values = (tiles * (1.0 / scales)).to(torch.float8_e4m3fn).view(-1, down, across)[:, :rows, :columns]
    return values.contiguous(), scales.reshape(grid)


def merged_formats(formats: Mapping[str, Mapping[str, BlockFormat]]) -> Mapping[str, BlockFormat]:
    """Return the quantised weights of all engines, which all of them are sent.

    Args:
        formats: of each engine, by its name.
    """
    (first, expected), *remaining = formats.items()
    for name, other in remaining:
        if other != expected:
            differing = sorted({*expected} ^ {*other} or {key for key in expected if expected[key] != other[key]})
            raise ManifestError(
                f"{first} and {name} store {differing[0]} in different ways ({len(differing)} weights): update them by separate "
                "pushes"
            )
    return expected
