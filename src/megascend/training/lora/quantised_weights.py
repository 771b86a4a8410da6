"""Frozen weights in fp8 or 4 bits, dequantised while their layer runs.

A layer's weight has a value for its shape only. Its memory exists while the layer runs; the backward pass, which needs it once
more for the gradient of the input, dequantises it again. The layers themselves are unchanged, whichever package they are from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascend.config import BaseWeights
from megascend.errors import PlatformError

BLOCKS = {"fp8": 128, "nf4": 64}
"""Consecutive values of a row, along the inputs, that share an fp32 scale. Rows are never joined: a layer that fuses or divides
rows has the same codes as the checkpoint's weights."""
LARGEST_FP8 = 448.0
"""Of e4m3."""
# The 4-bit NormalFloat (Dettmers et al. 2023, arXiv:2305.14314, appendix E): quantiles of the normal distribution.
# fmt: off
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
CHUNK = 2**24
"""Values that are quantised or dequantised at a time, in temporaries of fp32."""


class QuantisedWeights:
    """Weights of equal shape as codes with a scale for each block.

    Args:
        weights: [count, out, in], in the dtype in which they will be returned.
    """

    def __init__(self, weights: Sequence[Tensor], method: BaseWeights) -> None:
        first = weights[0]
        self.shape, self.dtype, self._method, self._block = first.shape, first.dtype, method, BLOCKS[method]
        blocks = -(-first.shape[1] // self._block)
        width = self._block // 2 if method == "nf4" else self._block  # two codes of 4 bits a byte
        options: dict[str, Any] = {"device": first.device}
        self._codes = torch.empty((len(weights), first.shape[0], blocks * width), dtype=torch.uint8, **options)
        self._scales = torch.empty((len(weights), first.shape[0], blocks), dtype=torch.float32, **options)
        values = torch.tensor(NF4)
        self._borders = ((values[1:] + values[:-1]) / 2).to(first.device)
        self._table = values.to(first.device)
        # Pairs of values by byte, the first in its high half.
        self._pairs = torch.cartesian_prod(values, values).to(first.device)
        for index, weight in enumerate(weights):
            for rows in self._row_chunks():
                self._quantise(weight[rows].float(), self._codes[index, rows], self._scales[index, rows])

    @property
    def bytes(self) -> int:
        """Memory of codes and scales."""
        return self._codes.numel() + 4 * self._scales.numel()

    def dequantised(self, index: int | None = None) -> Tensor:
        """Return all weights [count, out, in], or one [out, in]."""
        chosen = range(len(self._codes)) if index is None else range(index, index + 1)
        weights = torch.empty((len(chosen), *self.shape), dtype=self.dtype, device=self._codes.device)
        if self._codes.device.type == "cuda":
            # The loop below starts hundreds of kernels for the experts of a layer.
            from megascend.training.kernels.dequantise_triton import dequantise

            numbers = slice(chosen.start, chosen.stop)
            fp8 = self._method == "fp8"
            codes = self._codes[numbers].view(torch.float8_e4m3fn) if fp8 else self._codes[numbers]
            dequantise(codes, self._scales[numbers], None if fp8 else self._table, weights)
            return weights if index is None else weights[0]
        for target, number in zip(weights, chosen, strict=True):
            for rows in self._row_chunks():
                target[rows] = self._values(self._codes[number, rows], self._scales[number, rows])
        return weights if index is None else weights[0]

    def _row_chunks(self) -> Iterator[slice]:
        rows = max(1, CHUNK // self.shape[1])
        return (slice(start, min(start + rows, self.shape[0])) for start in range(0, self.shape[0], rows))

    def _quantise(self, rows: Tensor, codes: Tensor, scales: Tensor) -> None:
        blocks = torch.nn.functional.pad(rows, (0, -rows.shape[1] % self._block)).unflatten(1, (-1, self._block))
        largest = blocks.abs().amax(-1)
        if self._method == "fp8":
            # By a tensor: CUDA would multiply by the reciprocal of a number, which rounds otherwise, and ties to other codes.
            scales.copy_(largest / largest.new_full((1,), LARGEST_FP8))
            scaled = blocks / torch.where(scales == 0, 1.0, scales)[..., None]
            codes.copy_(scaled.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1))
            return
        scales.copy_(largest)
        scaled = blocks / torch.where(scales == 0, 1.0, scales)[..., None]
        nearest = torch.searchsorted(self._borders, scaled.flatten(1), out_int32=True).to(torch.uint8)
        codes.copy_(nearest[:, ::2] * 16 + nearest[:, 1::2])

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        if self._method == "fp8":
            values = codes.view(torch.float8_e4m3fn).float()
        else:
            values = self._pairs[codes.int()].flatten(1)
        return values.unflatten(1, (-1, self._block)).mul_(scales[..., None]).flatten(1)[:, : self.shape[1]]


class _Part(NamedTuple):
    """A weight that the backward pass needs, in place of its values.

    Attributes:
        index: of the layer's weights; None: a view of all of them.
        size, stride, offset: of the view of the dequantised values.
    """

    layer: QuantisedLayer
    index: int | None
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class QuantisedLayer:
    """A linear layer, or the layers of several experts, with quantised weights."""

    def __init__(self, module: Any) -> None:
        names = ["weight"] if hasattr(module, "weight") else [f"weight{number}" for number in range(module.num_gemms)]
        self._module, self._parameters = module, [getattr(module, name) for name in names]
        self.shape = self._parameters[0].shape
        self._weights: QuantisedWeights | None = None
        self._dense: Tensor | None = None  # while the layer runs
        self._hooks: Any = None
        self.release()

    def release(self) -> None:
        """Replace the values by one NaN, in the same shape: reading them outside the layer's forward pass shows."""
        for parameter in self._parameters:
            parameter.data = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device).expand(
                self.shape
            )

    def allocate(self) -> None:
        """Allocate values to load, NaN until then."""
        for parameter in self._parameters:
            parameter.data = torch.full(self.shape, torch.nan, dtype=parameter.dtype, device=parameter.device)

    def quantise(self, method: BaseWeights) -> None:
        """Quantise the loaded values; leave them unchanged if there is a NaN, which the loader reports."""
        if bool(torch.stack([parameter.data.amax().isnan() for parameter in self._parameters]).any()):
            return
        self._weights = QuantisedWeights([parameter.data for parameter in self._parameters], method)
        self.release()
        # always_call: also after an error in the layer.
        self._module.register_forward_pre_hook(self._enter)
        self._module.register_forward_hook(self._leave, always_call=True)

    @property
    def parameters(self) -> list[Any]:
        """The layer's parameters."""
        return self._parameters

    @property
    def bytes(self) -> int:
        """Memory of codes and scales."""
        return 0 if self._weights is None else self._weights.bytes

    def _enter(self, module: Any, inputs: Any) -> None:
        assert self._weights is not None
        self._dense = self._weights.dequantised()
        for parameter, values in zip(self._parameters, self._dense, strict=True):
            parameter.data = values
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def _leave(self, module: Any, inputs: Any, output: Any) -> None:
        if self._dense is None:  # _enter has failed
            return
        self._hooks.__exit__(None, None, None)
        self._dense = self._hooks = None
        self.release()

    def _pack(self, tensor: Tensor) -> Tensor | _Part:
        """Replace the dequantised weights that autograd saves; save other tensors unchanged."""
        dense = self._dense
        if dense is None or tensor.untyped_storage().data_ptr() != dense.untyped_storage().data_ptr():
            return tensor
        if tensor.dtype != dense.dtype:
            raise PlatformError(f"a layer saves its weights as {tensor.dtype}, not as {dense.dtype}")
        offset, count = int(tensor.storage_offset()), self.shape.numel()
        if tensor.numel() <= count:  # so that the backward pass of an expert dequantises its own weight only
            return _Part(self, offset // count, tensor.shape, tensor.stride(), offset % count)
        return _Part(self, None, tensor.shape, tensor.stride(), offset)

    def unpacked(self, part: _Part) -> Tensor:
        """Return a part with its values."""
        assert self._weights is not None
        return self._weights.dequantised(part.index).as_strided(part.size, part.stride, part.offset)


def _unpack(saved: Tensor | _Part) -> Tensor:
    return saved.layer.unpacked(saved) if isinstance(saved, _Part) else saved
