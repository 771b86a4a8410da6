"""All experts of a layer as one tensor, and products of them in one launch: forward, input gradient and weight gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megascend.changes import changed, patch
from megascend.errors import ConfigError, PlatformError
from megascend.lora.grouped import Segments, accumulate, product


@dataclass(frozen=True)
class ExpertSegments(Segments):
    """Which rows are which expert's, for Megatron's ``TEGroupedMLP``, which asks for a list and only passes it on."""

    def tolist(self) -> ExpertSegments:
        """Itself: a list would have to wait for the device."""
        return self


class ExpertWeights:
    """The weights ``weight0``, ``weight1``... of one grouped layer, which stay the parameters that Megatron knows.

    Megatron's buffers hold parameters and gradients in the reverse order of the modules' parameters. So these are put into the
    layer in descending order, and lie there in ascending order, one after the other.

    Attributes:
        parameters: of each expert, [out, in].
        stacked: [experts, out, in], a view of all of them.
        grads: float32, of the same shape, a view of Megatron's gradient buffer; None for frozen weights.
        ready: tells Megatron's DDP that a parameter's gradient is complete, where that starts its reduction.
    """

    def __init__(self, layer: Any) -> None:
        names = [f"weight{index}" for index in range(layer.num_gemms)]
        self.parameters: list[Any] = [getattr(layer, name) for name in names]
        for name in reversed(names):
            layer._parameters[name] = layer._parameters.pop(name)
        changed(f"order of the parameters of {type(layer).__name__}", "last expert first, so that buffers are in order")
        self.stacked = self.parameters[0].data
        self.grads: Tensor | None = None
        self.ready: Callable[[Any], None] | None = None
        self._root = torch.empty(0, requires_grad=True)
        patch(layer, "forward", self._forward, "products of all experts in one launch")

    def settle(self, ready: Callable[[Any], None] | None) -> None:
        """Find parameters and gradients where Megatron's DDP has put them, or put frozen ones together.

        Raises:
            ConfigError: they do not lie evenly, which buckets of overlapped reductions may bring about.
        """
        values = [parameter.data for parameter in self.parameters]
        found = one_view(values)
        if found is None:
            found = torch.stack(values)
            for parameter, part in zip(self.parameters, found, strict=True):
                parameter.data = part
        self.stacked, self.ready = found, ready
        if not self.parameters[0].requires_grad:
            return
        self.grads = one_view([parameter.main_grad for parameter in self.parameters])
        if self.grads is None:
            raise ConfigError(
                "moe.experts: grouped: gradients of a layer's experts do not lie evenly in Megatron's buffers; "
                "set optimizer.overlap_grad_reduce: false, or moe.experts: upstream"
            )

    def check(self) -> None:
        """Raise PlatformError if somebody has moved the parameters since :meth:`settle`."""
        last = self.parameters[-1]
        if self.parameters[0].data_ptr() != self.stacked.data_ptr() or last.data_ptr() != self.stacked[-1].data_ptr():
            raise PlatformError(
                "parameters of experts were moved after the model had been built; set moe.experts: upstream"
            )

    def _forward(self, rows: Tensor, segments: ExpertSegments) -> tuple[Tensor, None]:
        self.check()
        out: Any = _Product.apply(rows, self._root if self.grads is not None else None, self, segments)
        return out, None


class _Product(torch.autograd.Function):
    """Rows [n, in] to [n, out]. Weights are no autograd inputs: their gradients go into Megatron's buffer."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, root: Tensor | None, weights: ExpertWeights, segments: Segments) -> Tensor:
        ctx.save_for_backward(None if root is None else rows)
        ctx.weights, ctx.segments = weights, segments
        return product(rows, weights.stacked.mT, segments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        grad, weights, segments = grads[0].contiguous(), ctx.weights, ctx.segments
        below = product(grad, weights.stacked, segments) if ctx.needs_input_grad[0] else None
        (rows,) = ctx.saved_tensors
        if rows is not None:
            accumulate(weights.grads, grad, rows, segments)
            if weights.ready is not None:
                for parameter in weights.parameters:
                    weights.ready(parameter)
        return below, None, None, None


def one_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """[len(tensors), ...] of tensors of one shape that lie one after the other in one storage, evenly; else None."""
    first, size = tensors[0], tensors[0].element_size()
    distances = {(b.data_ptr() - a.data_ptr()) for a, b in pairwise(tensors)}
    distance = distances.pop() // size if distances else first.numel()
    same_storage = len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    whole = all(tensor.is_contiguous() and tensor.shape == first.shape for tensor in tensors)
    if distances or distance < first.numel() or not same_storage or not whole:
        return None
    return first.as_strided((len(tensors), *first.shape), (distance, *first.stride()))
