"""Adapters in Megatron's layers: ``W x`` becomes ``W x + scaling * B A x``, with each token's adapter.

Communication follows that of the layer, but only ``A x``, a few numbers per token, is communicated: in column parallel layers it
is gathered (sequence parallelism) or its gradient is reduced; in row parallel layers it is reduced. The embedding counts as a row
parallel layer, the output layer as a column parallel one; its product with the vocabulary is computed by the output head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel import (
    all_to_all,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megascend.changes import patch
from megascend.errors import ConfigError, PlatformError
from megascend.runtime.distributed.objects import gather_objects
from megascend.runtime.distributed.process_groups import ProcessGroups
from megascend.runtime.topology.topology import Topology
from megascend.training.lora.adapter_layers import AdapterLayers, AdapterSlot, start_graph
from megascend.training.lora.adapter_set import AdapterSet
from megascend.training.lora.grouped import Segments
from megascend.training.lora.layout import ShapeGroup
from megascend.training.lora.registry import AdapterRegistry, AdapterSettings
from megascend.training.lora.segments import ExpertAdapterRows, TokenSegments, by_expert_and_adapter
from megascend.training.lora.target_maps import find_target_modules
from megascend.training.lora.target_modules import ModelLayout, RefusedTargets, TargetModule, check_untied


def megatron_adapters(
    chunks: Sequence[Any],
    config: Any,
    topology: Topology,
    groups: ProcessGroups,
    tensor_names: Collection[str],
    settings: AdapterSettings,
    *,
    vocab_size: int,
    model_dir: Path,
    tower: tuple[list[TargetModule], RefusedTargets | None] = ([], None),
    head: Sequence[TargetModule] = (),
    merge: int | None = None,
) -> AdapterSet:
    """Freeze a Megatron model, and return the adapters that its layers apply. Collective.

    Args:
        chunks: language models of this rank.
        tower: this rank's :func:`megascend.training.lora.transformers_targets.divided_tower`.
        head: the scalar head, on the rank that has it.
        merge: side of the square of patches that makes one feature of an image.
    """
    for chunk in chunks:
        # The frozen weights get no gradient buffers, and autograd computes no weight gradients for them.
        chunk.requires_grad_(False)
    layout = ModelLayout(config, topology, groups.coordinates, tensor_names, vocab_size)
    tied = not config.untie_embeddings_and_output_weights
    check_untied(settings.limits.targets, layout.prefix, tied=tied)
    targets = find_target_modules(chunks, layout) + tower[0] + list(head)
    # A pipeline stage knows its own layers only, but every rank must check targets against the same list.
    coordinates = groups.coordinates
    # Another rank reports the names of a replica. Experts are replicated over other groups.
    replica = coordinates.tensor or coordinates.data or coordinates.context
    local_names = sorted(
        {
            fused_slice.name
            for target in targets
            if not (coordinates.expert_tensor or coordinates.expert_data if target.is_expert else replica)
            for fused_slice in target.slices
        }
    )
    parts = gather_objects((local_names, tower[1]), "world", groups, "layers")
    all_names = sorted({name for names, _ in parts for name in names})
    refused_targets = next((names for _, names in parts if names is not None), None)
    registry = AdapterRegistry.for_model(targets, all_names, settings, refused_targets)
    layers = AdapterLayers(
        exchange=partial(exchange_down, topology),
        sequence_parallel=topology.sequence_parallel and topology.tensor > 1,
        sequence_first=True,
    )
    add_hooks(layers, chunks, registry.shape_groups)
    return AdapterSet(registry, groups, model_dir, layers, merge)


def add_hooks(layers: AdapterLayers, chunks: Sequence[Any], shape_groups: Sequence[ShapeGroup]) -> None:
    """Add forward hooks to the adapted layers of this rank."""
    expert_rows: dict[int, ExpertRows] = {}
    for number, shape_group in enumerate(shape_groups):
        for layer, target in enumerate(shape_group.target_modules):
            slot: AdapterSlot = number, layer, target
            hook: Callable[..., Any]
            if target.rows != "tokens":
                hook = partial(_after_tower, layers, slot)
            elif target.is_embedding:
                hook = partial(_after_embedding, layers, number, target)
            elif target.is_head:
                layers.head, hook = (number, target), partial(_after_head, layers)
            elif target.is_output:
                # Its product with the vocabulary is computed by the output head, in chunks and fused with the loss; a hook on
                # this layer's output would see no logits.
                layers.output, hook = (number, target), partial(_after_output, layers)
            else:
                if isinstance(target.module, te.TELayerNormColumnParallelLinear) and hasattr(
                    target.module, "return_layernorm_output"
                ):
                    # Adapters act on the linear layer's input, which is inside a layer with a fused norm.
                    patch(target.module, "return_layernorm_output", True, "adapters see the norm's output")
                # Once a layer: both products of its experts work on the same permuted rows.
                if target.moe is not None and id(target.moe) not in expert_rows:
                    expert_rows[id(target.moe)] = send_adapter_indices(target.moe, lambda: layers.mixed)
                layers.linear[target.module] = slot
                hook = partial(_after, layers, slot, expert_rows.get(id(target.moe)))
            target.module.register_forward_hook(hook)
    for chunk in chunks:
        if chunk.pre_process:
            # The embedding is frozen, so its output requires no gradient, and recomputed layers would record no graph.
            chunk.embedding.register_forward_hook(start_graph)


def exchange_down(topology: Topology, down: Tensor, target: TargetModule) -> Tensor:
    """Communicate ``A x`` [sequence, batch, r] from the ranks that apply A to those that apply B."""
    if topology.tensor == 1 or target.split == "none":
        return down
    if target.split == "column":
        # Every rank's output rows give a part of the gradient of A x; both functions reduce it in backward.
        if topology.sequence_parallel:
            return gather_from_sequence_parallel_region(down, tensor_parallel_output_grad=True)
        return copy_to_tensor_model_parallel_region(down)
    if topology.sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(down)
    return reduce_from_tensor_model_parallel_region(down)


def _after(
    layers: AdapterLayers,
    slot: AdapterSlot,
    rows: ExpertRows | None,
    module: Any,
    inputs: tuple[Any, ...],
    output: Any,
) -> Any:
    out, bias, x = split_output(module, inputs, output)
    if layers.stacked is None:
        return out, bias
    shape_group, layer, target = slot
    if rows is None or not target.is_expert:
        return layers.to_linear(shape_group, layer, target, x, out), bias
    # With experts divided over tensor parallel ranks nothing is communicated here: outputs and gradients are parts, which the
    # token dispatcher sums together with the base layer's.
    grouped = rows.grouped(inputs[1], len(layers.stacked.adapters), target.experts, x.device)
    return layers.to_experts(shape_group, layer, grouped, x, out), bias


def _after_tower(layers: AdapterLayers, slot: AdapterSlot, module: Any, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
    return out if layers.stacked is None else layers.to_linear(*slot, inputs[0], out)


def _after_output(layers: AdapterLayers, module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    """Append ``A x`` to the hidden states for the output head, which gets B from :meth:`AdapterLayers.lora_delta`."""
    down = layers.down_of_output(inputs[0])
    if down is None:
        return output
    hidden, bias = output
    return torch.cat([hidden, down], dim=-1), bias


def _after_head(layers: AdapterLayers, module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    values, bias = output
    return layers.values(inputs[0], values), bias


def _after_embedding(
    layers: AdapterLayers, shape_group: int, target: TargetModule, module: Any, inputs: tuple[Any, ...], out: Tensor
) -> Tensor:
    return out if layers.stacked is None else layers.to_embedding(shape_group, target, inputs[0], out)


def split_output(module: Any, inputs: tuple[Any, ...], output: Any) -> tuple[Tensor, Any, Tensor]:
    """Return (output, bias, input of the linear layer) of a layer that has just run."""
    if not isinstance(module, te.TELayerNormColumnParallelLinear):
        out, bias = output
        return out, bias, inputs[0]
    if getattr(module, "return_layernorm_output", False):
        if len(output) == 3:
            out, bias, normed = output
        else:
            (out, normed), bias = output
        return out, bias, normed
    # MindSpeed's layer does not return its norm's output, so the norm runs again here.
    norm = getattr(module, "_rmsnorm" if module.config.normalization == "RMSNorm" else "_layernorm", None)
    if norm is None:
        raise PlatformError(f"{type(module).__name__} has no norm that adapters can take their input from")
    out, bias = output
    return out, bias, norm(inputs[0])


class ExpertRows:
    """Adapters of the rows that one layer's experts on this rank are computing.

    Args:
        in_order: rows of an expert are in the order of their tokens, which are sorted by adapter.
    """

    def __init__(self, *, in_order: bool) -> None:
        self.adapter_index: Tensor | None = None
        self._in_order = in_order
        self._grouped: ExpertAdapterRows | None = None

    def set_adapters(self, adapter_index: Tensor | None) -> None:
        """Set the adapter index of each row; None: all rows have the same adapter."""
        self.adapter_index, self._grouped = adapter_index, None

    def grouped(self, counts: Any, adapters: int, experts: int, device: torch.device) -> ExpertAdapterRows:
        """Group rows by expert and adapter.

        Args:
            counts: number of rows of each expert, or segments whose sizes the host does not know.
        """
        if self._grouped is None:
            self._grouped = self._group(counts, adapters, experts, device)
        return self._grouped

    def _group(self, counts: Any, adapters: int, experts: int, device: torch.device) -> ExpertAdapterRows:
        segments = counts if isinstance(counts, Segments) else Segments.of([int(count) for count in counts], device)
        if self.adapter_index is None:
            return ExpertAdapterRows(segments)
        row = torch.arange(len(self.adapter_index), device=segments.ends.device)
        expert = torch.searchsorted(segments.ends, row.int(), right=True)
        # On NPUs always sort: the device-side assertion is untested there, and MindSpeed has its own dispatcher.
        in_order = self._in_order and device.type != "npu"
        return by_expert_and_adapter(expert, self.adapter_index, experts, adapters, in_order=in_order)


def send_adapter_indices(moe: Any, mixed: Callable[[], TokenSegments | None]) -> ExpertRows:
    """Make the token dispatcher of a mixture-of-experts layer send tokens' adapter indices with them.

    It permutes tokens by expert and exchanges them over expert parallel ranks.

    Args:
        mixed: returns the micro batch's segments, or None if all its tokens have one adapter, or none.
    """
    dispatcher = moe.token_dispatcher
    # With fused permutation the dispatcher's mapping has another form.
    if not isinstance(dispatcher, MoEAlltoAllTokenDispatcher) or dispatcher.config.moe_permute_fusion:
        raise ConfigError(
            f"adapters on experts need Megatron's all-to-all token dispatcher, unfused; this model has "
            f"{type(dispatcher).__name__}"
        )
    # Rows from several ranks arrive by source, so they are not sorted by adapter.
    rows = ExpertRows(in_order=dispatcher.ep_size == dispatcher.tp_size == 1)
    preprocess, postprocess = dispatcher.dispatch_preprocess, dispatcher.dispatch_postprocess
    permuted: list[Tensor | None] = [None]  # passed from the first hook to the second

    def dispatch_preprocess(*args: Any, **options: Any) -> Any:
        # First: the mapping of this micro batch exists only after the dispatcher's own preprocessing.
        result = preprocess(*args, **options)
        permuted[0], segments = None, mixed()
        if segments is not None:
            local = segments.adapter_index[segments.local_slice]
            # The mapping holds each permuted row's original index: indexing with it permutes adapters as it did tokens.
            permuted[0] = local[dispatcher.reversed_local_input_permutation_mapping]
        return result

    def dispatch_postprocess(*args: Any, **options: Any) -> Any:
        result = postprocess(*args, **options)
        # Cleared, so that a forward pass without adapters never reads the indices of an earlier one.
        adapter_index, permuted[0] = permuted[0], None
        rows.set_adapters(None if adapter_index is None else exchange(dispatcher, adapter_index))
        return result

    reason = "sends the adapter index of every token to its expert"
    patch(dispatcher, "dispatch_preprocess", dispatch_preprocess, reason)
    patch(dispatcher, "dispatch_postprocess", dispatch_postprocess, reason)
    return rows


def exchange(dispatcher: MoEAlltoAllTokenDispatcher, adapter_index: Tensor) -> Tensor:
    """Exchange adapter indices [rows] as the dispatcher has just exchanged the permuted tokens."""
    column = adapter_index[:, None].float()  # the collectives take floats; indices this small are exact
    if dispatcher.ep_size > 1:
        column = all_to_all(dispatcher.ep_group, column, dispatcher.output_splits, dispatcher.input_splits)
    # In the dispatcher's order of exchanges: over expert parallel ranks, then over expert tensor parallel ones, then
    # the sort of what came from several ranks.
    if dispatcher.tp_size > 1:
        splits = dispatcher.output_splits_tp
        column = gather_from_sequence_parallel_region(
            column, group=dispatcher.tp_group, output_split_sizes=None if splits is None else splits.tolist()
        )
    if (sort_received := getattr(dispatcher, "sort_received", None)) is not None:  # with moe.experts: grouped
        column = sort_received(column)
    elif dispatcher.num_local_experts > 1:
        column, _ = sort_chunks_by_idxs(
            column, dispatcher.num_global_tokens_per_local_expert.ravel(), dispatcher.sort_input_by_local_experts
        )
    return column[:, 0].long()
