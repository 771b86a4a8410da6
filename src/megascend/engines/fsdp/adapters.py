"""LoRA adapters on a sharded transformers model: many in one batch, replicated on every rank.

They are applied inside the layers, whose parameters are gathered while they run, so they need no communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from megascend.config import Adapters, VisionTower
from megascend.engines.base import adapter_settings
from megascend.engines.common.vision import tower
from megascend.engines.context import EngineContext, EngineSpec
from megascend.engines.fsdp.expert_parallel import ExpertShare
from megascend.engines.fsdp.experts import SortedRows, frozen_experts
from megascend.engines.fsdp.transformers_api import compute_experts_by, grouped_experts
from megascend.errors import ConfigError
from megascend.models import Images
from megascend.training.lora.adapter_layers import AdapterLayers, AdapterSlot, start_graph
from megascend.training.lora.adapter_set import AdapterSet
from megascend.training.lora.layout import ShapeGroup
from megascend.training.lora.registry import AdapterRegistry, check_limits
from megascend.training.lora.segments import ExpertAdapterRows, by_expert_and_adapter
from megascend.training.lora.target_modules import EMBEDDING, HEAD, RefusedTargets, TargetModule, check_untied, matches
from megascend.training.lora.transformers_targets import (
    divided_tower,
    drawn_as,
    embedding_and_output,
    experts_without_gate,
    head_targets,
    layer_targets,
)


def add_hooks(model: Any, shape_groups: Sequence[ShapeGroup], *, divided: bool = False) -> AdapterLayers:
    """Add forward hooks to a model's adapted layers, and return the layers.

    Args:
        divided: ranks hold different experts, to which tokens are sent (expert parallelism).
    """
    layers = AdapterLayers()
    # gate_up and down are parameters of one module, so one function computes both with their adapters.
    expert_slots: dict[int, tuple[Any, dict[str, AdapterSlot]]] = {}
    for number, shape_group in enumerate(shape_groups):
        for layer, target in enumerate(shape_group.target_modules):
            module = target.module
            # Both are applied by the loss head, not by a hook.
            if target.is_output:
                layers.output = number, target
                continue
            if target.is_head:
                layers.head = number, target
                continue
            layers.expect_call(target)
            if target.is_expert:
                slots = expert_slots.setdefault(id(module), (module, {}))[1]
                # By the parameter's own name (gate_up_proj, down_proj), by which the experts function looks it up.
                slots[target.slices[0].name.rsplit(".", 1)[-1]] = number, layer, target
            elif target.is_embedding:
                module.register_forward_hook(partial(_after_embedding, layers, number, target))
            else:
                module.register_forward_hook(partial(_after, layers, (number, layer, target)))
    for module, slots in expert_slots.values():
        compute_experts_by(module, partial(_experts, layers, slots, divided), partial(_adapters_of_tokens, layers))
    # Recomputation needs an input that requires a gradient, and the embedding is frozen.
    model.get_input_embeddings().register_forward_hook(start_graph)
    return layers


def _after(layers: AdapterLayers, slot: AdapterSlot, module: Any, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
    if layers.stacked is None:
        return out
    # Rows of a vision tower are those of images, which to_linear checks.
    layers.record_call(slot[2], inputs[0] if slot[2].rows == "tokens" else None)
    return layers.to_linear(*slot, inputs[0], out)


def _after_embedding(
    layers: AdapterLayers, shape_group: int, target: TargetModule, module: Any, inputs: tuple[Any, ...], out: Tensor
) -> Tensor:
    if layers.stacked is None:
        return out
    layers.record_call(target, out)
    return layers.to_embedding(shape_group, target, inputs[0], out)


def _adapters_of_tokens(layers: AdapterLayers) -> Tensor | None:
    """Return each token's adapter, int64 [n]; None if all tokens have the same one."""
    return None if layers.mixed is None else layers.mixed.adapter_index


def _experts(
    layers: AdapterLayers,
    slots: dict[str, AdapterSlot],
    divided: bool,
    module: Any,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    row_adapters: Tensor | None = None,
) -> Tensor:
    """Compute experts with adapters; see :func:`megascend.engines.fsdp.experts.frozen_experts`.

    Args:
        row_adapters: int64 [n], each row's adapter; None: all rows have the same one.
    """
    if layers.stacked is None:
        return grouped_experts(module, hidden, index, weights)
    # With divided experts, rows come from other ranks: their number differs from the micro batch's.
    layers.record_call(next(iter(slots.values()))[2], None if divided else hidden)
    adapters = len(layers.stacked.adapters)
    # Computed at the first product and used for both, which have the same rows.
    grouped: ExpertAdapterRows | None = None

    def add(parameter: str, rows: SortedRows, x: Tensor, out: Tensor) -> Tensor:
        nonlocal grouped
        if parameter not in slots:
            return out
        shape_group, layer, target = slots[parameter]
        if grouped is None:
            grouped = (
                ExpertAdapterRows(rows.segments)
                if row_adapters is None
                else by_expert_and_adapter(
                    rows.expert, row_adapters[rows.token], target.experts, adapters, in_order=False
                )
            )
        return layers.to_experts(shape_group, layer, grouped, x, out)

    return frozen_experts(module, hidden, index, weights, add)


def sharded_adapters(
    model: Any,
    spec: EngineSpec,
    context: EngineContext,
    targets: Sequence[TargetModule],
    share: ExpertShare | None,
    refused_targets: RefusedTargets | None = None,
) -> AdapterSet:
    """Return the adapters that the layers of a transformers model apply.

    Every rank has all factors (under expert parallelism, those of its own experts) and makes the same step; gradients are
    summed over the ranks once a step.

    Args:
        model: the model before it is sharded; may be on ``meta``.
        targets: result of :func:`adapter_targets`.
        share: share of the experts that this rank will hold; None: all.
    """
    settings = adapter_settings(spec, context.info, context.groups.device)
    # Before the registry exists, which allocates factors by each target's number of experts.
    targets = [_local_experts(target, share) for target in targets]
    names = sorted(target.slices[0].name for target in targets)
    allowed = [name for name in names if matches(name, settings.limits.targets)]
    drawn_targets = [replace(target, drawn_as=drawn_as(target.slices[0].name, allowed)) for target in targets]
    registry = AdapterRegistry.for_model(drawn_targets, names, settings, refused_targets)
    layers = add_hooks(model, registry.shape_groups, divided=share is not None)
    merge = None if context.info.image_layout is None else context.info.image_layout.merge
    return AdapterSet(registry, context.groups, context.model_dir, layers, merge)


def adapter_targets(
    model: Any, limits: Adapters, images: Images | None = None, trained: VisionTower = "frozen", *, tied: bool
) -> tuple[list[TargetModule], RefusedTargets | None]:
    """Return the layers of a model that adapters can act on, and those that peft could adapt and that are refused.

    Args:
        model: may be on ``meta``.
        images: declaration of a model's images; None: it takes none.
        trained: ``train`` if adapters may act on its vision tower.
    """
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    check_untied(limits.targets, embedding.removesuffix(EMBEDDING), tied=tied)
    ungated = next(experts_without_gate(model), None)
    if ungated is not None and limits.targets == "all-linear":
        raise ConfigError(
            f"engine fsdp: adapters.targets is all-linear, but {ungated} of {type(model).__name__} has no gate, and such "
            "experts are not adapted; name the other layers in adapters.targets"
        )
    tower_layers, refused_targets = divided_tower(None if images is None else tower(model, images), images, trained)
    targets = layer_targets(model) + ([] if tied else embedding_and_output(model)) + tower_layers
    targets += head_targets(getattr(model, HEAD, None))
    check_limits(limits, [target.slices[0].name for target in targets], refused_targets)
    return targets, refused_targets


def _local_experts(target: TargetModule, share: ExpertShare | None) -> TargetModule:
    """Restrict an expert target to this rank's experts."""
    if share is None or not target.is_expert:
        return target
    count = target.experts // share.size
    return replace(target, experts=count, expert_start=share.index * count)
