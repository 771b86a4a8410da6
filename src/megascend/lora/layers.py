"""Adapters inside Megatron's layers: ``W x`` becomes ``W x + scaling * B A x``, every token with its own adapter.

Communication follows the layer's. Only ``A x``, a few numbers a token, travels: where ranks share a layer's output, it is
gathered (sequence parallelism) or its gradient summed; where they share the input, it is summed. The embedding is a layer
whose ranks share the input, the output layer one whose ranks share the output, which the output head forms.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from megascend.lora.applied_adapters import AppliedAdapters, start_graph
from megascend.lora.dispatch import ExpertRows, follow
from megascend.lora.layout import ShapeGroup
from megascend.lora.target_modules import TargetModule


class AdapterLayers(AppliedAdapters):
    """Hooks on the adapted layers of this rank, and which adapters they apply at the moment."""

    def __init__(
        self, chunks: Sequence[Any], shape_groups: Sequence[ShapeGroup], *, tensor_size: int, sequence_parallel: bool
    ) -> None:
        super().__init__(sequence_parallel=sequence_parallel)
        self._tensor_size = tensor_size
        self._expert_rows: dict[int, ExpertRows] = {}
        for number, shape_group in enumerate(shape_groups):
            for layer, target in enumerate(shape_group.target_modules):
                if target.is_embedding:
                    target.module.register_forward_hook(partial(self._after_embedding, number, target))
                    continue
                if target.is_output:
                    self._output = number, target
                    target.module.register_forward_hook(self._after_output)
                    continue
                expose_normed_input(target.module)
                target.module.register_forward_hook(partial(self._after, number, layer, target))
                if target.moe is not None and id(target.moe) not in self._expert_rows:
                    self._expert_rows[id(target.moe)] = follow(target.moe, lambda: self.mixed)
        for chunk in chunks:
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(start_graph)

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
        if not target.is_expert:
            return self.to_linear(shape_group, layer, target, x, out), bias
        # With experts divided over tensor parallel ranks nothing is communicated here: outputs and gradients are parts,
        # which the token dispatcher sums together with the base layer's.
        rows = self._expert_rows[id(target.moe)]
        grouped = rows.grouped(inputs[1], len(self.stacked.adapters), target.experts, x.device)
        return self.to_experts(shape_group, layer, grouped, x, out), bias

    def _after_output(self, module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        """Append ``A x`` to the hidden states that go to the output head, which finds B by :meth:`lora_delta`."""
        down = self.down_of_output(inputs[0])
        if down is None:
            return output
        hidden, bias = output
        return torch.cat([hidden, down], dim=-1), bias

    def _after_embedding(
        self, shape_group: int, target: TargetModule, module: Any, inputs: tuple[Any, ...], out: Tensor
    ) -> Tensor:
        return out if self.stacked is None else self.to_embedding(shape_group, target, inputs[0], out)

    def exchange(self, down: Tensor, target: TargetModule) -> Tensor:
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
