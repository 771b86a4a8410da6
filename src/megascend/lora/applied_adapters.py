"""``W x`` becomes ``W x + scaling * B A x``, every token with its own adapter: what hooks in a model's layers call.

What ranks exchange in between, where they share a layer, is the subclass's business. Where one rank has the whole layer it is
nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from megascend.kernels.low_rank import LowRank
from megascend.kernels.token_rows import Moved
from megascend.lora.dropout import drop
from megascend.lora.embedding_and_head import LookUp, adapted_segments
from megascend.lora.grouped import GroupedLinear
from megascend.lora.segments import ExpertAdapterRows, TokenSegments
from megascend.lora.stacked_adapters import FactorsAndGrads, StackedAdapters
from megascend.lora.target_modules import TargetModule


class AppliedAdapters:
    """Which adapters a model's layers apply at the moment, and how.

    A layer is named by the number of its shape group, its own number in that, and the target module.

    Args:
        sequence_parallel: tensor parallel ranks hold slices of the tokens between layers.

    Attributes:
        stacked: the adapters of the present call, or None while adapters are off.
        segments: which adapter each token of the present micro batch belongs to.
    """

    def __init__(self, *, sequence_parallel: bool = False) -> None:
        self._sequence_parallel = sequence_parallel
        self.stacked: StackedAdapters | None = None
        self.segments: TokenSegments | None = None
        self._output: tuple[int, TargetModule] | None = None
        self._root = torch.empty(0, requires_grad=True)

    @contextlib.contextmanager
    def applying(self, stacked: StackedAdapters | None) -> Iterator[None]:
        """Apply ``stacked`` (None: the base model alone) until the block ends."""
        self.stacked = stacked
        try:
            yield
        finally:
            self.stacked = self.segments = None

    def enter(self, segments: TokenSegments | None) -> None:
        """Say which micro batch comes next."""
        self.segments = segments

    @property
    def mixed(self) -> TokenSegments | None:
        """Whose the tokens of the micro batch are, if several adapters are in force."""
        return self.segments if self.stacked is not None and len(self.stacked.adapters) > 1 else None

    def exchange(self, down: Tensor, target: TargetModule) -> Tensor:
        """Bring ``A x`` from where A acts to where B does."""
        return down

    def to_linear(self, shape_group: int, layer: int, target: TargetModule, x: Tensor, out: Tensor) -> Tensor:
        """``out`` with the adapters' part of a linear layer; both are [..., features]."""
        stacked, segments = self._present()
        a, a_grads, b, b_grads = stacked.factors(shape_group, layer, segments.single)
        column, apart = target.split == "column", self._sequence_parallel
        before, after = (segments.local, segments.whole) if column else (segments.whole, segments.local)
        x = drop(x, stacked, segments, target, local=apart and column)
        down = GroupedLinear.apply(x.flatten(0, -2), a, a_grads, before, None).unflatten(0, x.shape[:-1])
        down = self.exchange(down, target)
        total = GroupedLinear.apply(down.flatten(0, -2), b, b_grads, after, out.flatten(0, -2))
        return total.view(out.shape)

    def to_experts(self, shape_group: int, layer: int, rows: ExpertAdapterRows, x: Tensor, out: Tensor) -> Tensor:
        """``out`` with the adapters' part of a product of experts.

        Args:
            rows: how the rows are grouped; of one adapter by expert alone.
            x, out: [rows, features].
        """
        assert self.stacked is not None
        a, a_grads, b, b_grads = self.stacked.factors_of_experts(shape_group, layer)
        if rows.order is None:
            down = GroupedLinear.apply(x, a, a_grads, rows.segments, None)
            return GroupedLinear.apply(down, b, b_grads, rows.segments, out)
        down = GroupedLinear.apply(Moved.apply(x, rows.order, rows.place), a, a_grads, rows.segments, None)
        delta = GroupedLinear.apply(down, b, b_grads, rows.segments, None)
        return out + Moved.apply(delta, rows.place, rows.order)

    def to_embedding(self, shape_group: int, target: TargetModule, ids: Tensor, out: Tensor) -> Tensor:
        """``out`` with the adapters' part of the embedding of ``ids`` [batch, sequence].

        Args:
            out: [batch, sequence, h], or under sequence parallelism this rank's slice, [sequence, batch, h].
        """
        stacked, segments = self._present()
        if not adapted_segments(stacked, segments, target):
            return out
        a, a_grads, b, b_grads = stacked.factors(shape_group, 0, segments.single)
        adapter_index = None if segments.single is not None else segments.adapter_index
        down = LookUp.apply(self._root, ids, adapter_index, target.in_start, a, a_grads)
        if self._sequence_parallel:
            down = down.transpose(0, 1).contiguous()
        down = self.exchange(down, target)
        return GroupedLinear.apply(down.flatten(0, -2), b, b_grads, segments.local, out.flatten(0, -2)).view(out.shape)

    def down_of_output(self, x: Tensor) -> Tensor | None:
        """``A x`` [..., r] of the output layer's input; None if no adapter of the micro batch acts on that layer."""
        if self.lora_delta(self.segments) is None:
            return None
        assert self._output is not None
        stacked, segments = self._present()
        shape_group, target = self._output
        a, a_grads, _, _ = stacked.factors(shape_group, 0, segments.single)
        x = drop(x, stacked, segments, target, local=self._sequence_parallel)
        down = GroupedLinear.apply(x.flatten(0, -2), a, a_grads, segments.local, None).unflatten(0, x.shape[:-1])
        return self.exchange(down, target)

    def lora_delta(self, segments: TokenSegments | None) -> LowRank | None:
        """What the adapters of a micro batch's tokens add to their logits; None if none acts on the output layer."""
        if self.stacked is None or self._output is None:
            return None
        assert segments is not None
        shape_group, target = self._output
        adapted = adapted_segments(self.stacked, segments, target)
        if not adapted:
            return None
        factors: FactorsAndGrads = self.stacked.factors(shape_group, 0, segments.single)
        return LowRank(factors[2], factors[3], adapted)

    def _present(self) -> tuple[StackedAdapters, TokenSegments]:
        assert self.stacked is not None
        assert self.segments is not None, "a micro batch was begun without its segments"
        return self.stacked, self.segments


def start_graph(module: object, inputs: object, output: Tensor) -> Tensor:
    """With a frozen embedding nothing would need a gradient before the first adapter, and recomputation would end there."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
    return output
