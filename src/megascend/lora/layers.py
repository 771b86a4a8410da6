"""Adapters inside Megatron's layers: ``W x`` becomes ``W x + scaling * B A x``, every token with its own adapter.

Communication follows the layer's. Only ``A x``, a few numbers a token, travels: where ranks share a layer's output, it is
gathered (sequence parallelism) or its gradient summed; where they share the input, it is summed. The embedding is a layer
whose ranks share the input, the output layer one whose ranks share the output, which the output head forms.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megascend.changes import patch
from megascend.errors import PlatformError
from megascend.kernels.low_rank import LowRank
from megascend.lora.dispatch import ExpertRows, follow
from megascend.lora.dropout import drop
from megascend.lora.embedding_and_head import LookUp, adapted_segments
from megascend.lora.grouped import GroupedLinear
from megascend.lora.layout import ShapeGroup
from megascend.lora.segments import TokenSegments
from megascend.lora.stacked_adapters import FactorsAndGrads, StackedAdapters
from megascend.lora.target_modules import TargetModule


class AdapterLayers:
    """Hooks on the adapted layers of this rank, and which adapters they apply at the moment.

    Attributes:
        stacked: the adapters of the present call, or None while adapters are off.
        segments: which adapter each token of the present micro batch belongs to.
    """

    def __init__(
        self, chunks: Sequence[Any], shape_groups: Sequence[ShapeGroup], *, tensor_size: int, sequence_parallel: bool
    ) -> None:
        self._tensor_size, self._sequence_parallel = tensor_size, sequence_parallel
        self.stacked: StackedAdapters | None = None
        self.segments: TokenSegments | None = None
        self._expert_rows: dict[int, ExpertRows] = {}
        self._output: tuple[int, TargetModule] | None = None
        self._root = torch.empty(0, requires_grad=True)
        for number, shape_group in enumerate(shape_groups):
            for layer, target in enumerate(shape_group.target_modules):
                if target.is_embedding:
                    target.module.register_forward_hook(partial(self._after_embedding, number, target))
                    continue
                if target.is_output:
                    self._output = number, target
                    target.module.register_forward_hook(partial(self._after_output, number, target))
                    continue
                expose_normed_input(target.module)
                target.module.register_forward_hook(partial(self._after, number, layer, target))
                if target.moe is not None and id(target.moe) not in self._expert_rows:
                    self._expert_rows[id(target.moe)] = follow(target.moe, self._mixed)
        for chunk in chunks:
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(start_graph)

    def _mixed(self) -> TokenSegments | None:
        """Whose the tokens of the micro batch are, if several adapters are in force."""
        return self.segments if self.stacked is not None and len(self.stacked.adapters) > 1 else None

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

    def watch(self, output: Tensor) -> None:
        """Return to this micro batch when its backward pass begins: recomputed layers must find its segments."""
        if self.stacked is not None and output.requires_grad:
            segments = self.segments
            output.register_hook(lambda _: self.enter(segments))

    def _after(
        self, shape_group: int, layer: int, target: TargetModule, module: Any, inputs: tuple[Any, ...], output: Any
    ) -> Any:
        out, bias, x = split_output(module, inputs, output)
        if self.stacked is None:
            return out, bias
        assert self.segments is not None, "a micro batch was begun without its segments"
        if target.is_expert:
            return self._experts(target, x, inputs[1], out, self.stacked.factors(shape_group, layer, None)), bias
        return self._dense(target, x, out, self.stacked.factors(shape_group, layer, self.segments.single)), bias

    def lora_delta(self, segments: TokenSegments | None) -> LowRank | None:
        """What the adapters of a micro batch's tokens add to their logits; None if none acts on the output layer."""
        if self.stacked is None or self._output is None:
            return None
        assert segments is not None
        shape_group, target = self._output
        adapted = adapted_segments(self.stacked, segments, target)
        if not adapted:
            return None
        _, _, up, grads = self.stacked.factors(shape_group, 0, segments.single)
        return LowRank(up, grads, adapted)

    def _after_output(
        self, shape_group: int, target: TargetModule, module: Any, inputs: tuple[Any, ...], output: Any
    ) -> Any:
        """Append ``A x`` to the hidden states that go to the output head, which finds B by :meth:`lora_delta`."""
        if self.lora_delta(self.segments) is None:
            return output
        assert self.stacked is not None
        assert self.segments is not None
        hidden, bias = output
        a, a_grads, _, _ = self.stacked.factors(shape_group, 0, self.segments.single)
        x = drop(inputs[0], self.stacked, self.segments, target, local=self._sequence_parallel)
        down = GroupedLinear.apply(x.flatten(0, -2), a, a_grads, self.segments.local, None).unflatten(0, x.shape[:-1])
        return torch.cat([hidden, self._exchange(down, target)], dim=-1), bias

    def _after_embedding(
        self, shape_group: int, target: TargetModule, module: Any, inputs: tuple[Any, ...], out: Tensor
    ) -> Tensor:
        """``out`` is [batch, sequence, h], or under sequence parallelism this rank's slice, [sequence, batch, h]."""
        stacked, segments = self.stacked, self.segments
        if stacked is None:
            return out
        assert segments is not None, "a micro batch was begun without its segments"
        if not adapted_segments(stacked, segments, target):
            return out
        a, a_grads, b, b_grads = stacked.factors(shape_group, 0, segments.single)
        adapter_index = None if segments.single is not None else segments.adapter_index
        down = LookUp.apply(self._root, inputs[0], adapter_index, target.in_start, a, a_grads)
        if self._sequence_parallel:
            down = down.transpose(0, 1).contiguous()
        down = self._exchange(down, target)
        return GroupedLinear.apply(down.flatten(0, -2), b, b_grads, segments.local, out.flatten(0, -2)).view(out.shape)

    def _dense(self, target: TargetModule, x: Tensor, out: Tensor, factors: FactorsAndGrads) -> Tensor:
        """``x`` and ``out`` are [..., features]; B's output is added to ``out``."""
        segments = self.segments
        assert segments is not None
        assert self.stacked is not None
        a, a_grads, b, b_grads = factors
        column, apart = target.split == "column", self._sequence_parallel
        before, after = (segments.local, segments.whole) if column else (segments.whole, segments.local)
        x = drop(x, self.stacked, segments, target, local=apart and column)
        down = GroupedLinear.apply(x.flatten(0, -2), a, a_grads, before, None).unflatten(0, x.shape[:-1])
        down = self._exchange(down, target)
        total = GroupedLinear.apply(down.flatten(0, -2), b, b_grads, after, out.flatten(0, -2))
        return total.view(out.shape)

    def _exchange(self, down: Tensor, target: TargetModule) -> Tensor:
        """Bring ``A x`` [sequence, batch, r] from where A acts to where B does."""
        if self._tensor_size == 1:
            return down
        if target.split == "column":
            # Every rank's output rows give a part of the gradient of A x; both sum it.
            if self._sequence_parallel:
                return gather_from_sequence_parallel_region(down, tensor_parallel_output_grad=True)
            return copy_to_tensor_model_parallel_region(down)
        if self._sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(down)
        return reduce_from_tensor_model_parallel_region(down)

    def _experts(self, target: TargetModule, x: Tensor, counts: Any, out: Tensor, factors: FactorsAndGrads) -> Tensor:
        """``x`` and ``out`` are [rows, features], the rows of this rank's first expert first.

        With experts divided over tensor parallel ranks nothing is communicated here: outputs and gradients are parts, which
        the token dispatcher sums together with the base layer's.
        """
        assert self.stacked is not None
        a, a_grads, b, b_grads = factors
        rows = self._expert_rows[id(target.moe)]
        order, grouped = rows.grouped(counts, len(self.stacked.adapters), target.experts, x.device)
        picked = x if order is None else x.index_select(0, order)
        down = GroupedLinear.apply(picked, a, a_grads, grouped, None)
        if order is None:
            return GroupedLinear.apply(down, b, b_grads, grouped, out)
        delta = GroupedLinear.apply(down, b, b_grads, grouped, None)
        return out.index_add(0, order, delta)


def expose_normed_input(module: Any) -> None:
    """Let a layer with a norm inside hand out the norm's output, which is the input that adapters see."""
    if isinstance(module, te.TELayerNormColumnParallelLinear) and hasattr(module, "return_layernorm_output"):
        patch(module, "return_layernorm_output", True, "adapters see the norm's output")


def split_output(module: Any, inputs: tuple[Any, ...], output: Any) -> tuple[Tensor, Any, Tensor]:
    """(output, bias, the linear layer's own input) of a layer that has just run."""
    if not isinstance(module, te.TELayerNormColumnParallelLinear):
        out, bias = output
        return out, bias, inputs[0]
    if getattr(module, "return_layernorm_output", False):
        if len(output) == 3:
            out, bias, normed = output
        else:
            (out, normed), bias = output
        return out, bias, normed
    # MindSpeed's layer keeps its norm's output to itself.
    norm = getattr(module, "_rmsnorm" if module.config.normalization == "RMSNorm" else "_layernorm", None)
    if norm is None:
        raise PlatformError(f"{type(module).__name__} does not tell its norm's output, which adapters need")
    out, bias = output
    return out, bias, norm(inputs[0])


def start_graph(module: Any, inputs: Any, output: Tensor) -> Tensor:
    """With a frozen embedding nothing would need a gradient before the first adapter, and recomputation would end there."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
    return output
