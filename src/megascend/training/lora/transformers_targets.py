"""Adapter targets in a transformers model: linear layers, fused experts, the embedding, the output layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megascend.config import VisionTower
from megascend.models import Images, architecture_named
from megascend.training.lora.peft_tensors import EXPERT_PARAMETERS
from megascend.training.lora.target_modules import (
    EMBEDDING,
    HEAD,
    OUTPUT,
    FusedSlice,
    RefusedTargets,
    TargetModule,
    refused_tower_targets,
)

FUSED_BY_MEGATRON = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one input: Megatron's engine applies one dropout mask to it, that of the first adapted layer."""


def layer_targets(model: Any) -> list[TargetModule]:
    """Return linear layers and fused experts of a model's layers, except routers and experts without a gate."""
    targets = []
    excluded = architecture_named(model.config.model_type).without_adapters
    for name, module in model.named_modules():
        if ".layers." not in f".{name}" or (excluded and name.endswith(excluded)):
            continue
        # Routers are not adapted.
        if isinstance(module, nn.Linear) and not name.endswith("gate"):
            out_features, in_features = module.weight.shape
            targets.append(_target(name, module, out_features, in_features))
        elif name.endswith(".experts") and getattr(module, "has_gate", True):
            for parameter in EXPERT_PARAMETERS:
                weight = getattr(module, parameter, None)
                if isinstance(weight, Tensor) and weight.ndim == 3:
                    count, *sizes = weight.shape
                    in_features, out_features = sizes if getattr(module, "is_transposed", False) else reversed(sizes)
                    targets.append(_target(f"{name}.{parameter}", module, out_features, in_features, count))
    return targets


def tower_targets(tower: nn.Module, images: Images) -> list[TargetModule]:
    """Return the linear layers of a vision tower, by their names in the model."""
    return [
        replace(
            _target(f"{images.tower}{name}", module, *module.weight.shape),
            split="none",
            rows="patches" if name.startswith(images.blocks) else "features",
        )
        for name, module in tower.named_modules()
        if isinstance(module, nn.Linear)
    ]


def divided_tower(
    tower: nn.Module | None, images: Images | None, trained: VisionTower
) -> tuple[list[TargetModule], RefusedTargets | None]:
    """Return the layers of a vision tower that adapters may act on, and its other modules that peft could adapt."""
    if tower is None or images is None:
        return [], None
    targets = tower_targets(tower, images)
    refused_targets = refused_tower_targets([target.slices[0].name for target in targets], images, trained)
    return (targets if trained == "train" else []), refused_targets


def embedding_and_output(model: Any) -> list[TargetModule]:
    """Return the embedding and the output layer if they are plain and named as peft's format requires."""
    targets = []
    for name, module in model.named_modules():
        last = name.rsplit(".", 1)[-1]
        if module is model.get_input_embeddings() and last == EMBEDDING and type(module) is nn.Embedding:
            rows, columns = module.weight.shape
            all_columns = torch.arange(columns)
            weight = FusedSlice(name, columns, all_columns, all_columns)
            targets.append(TargetModule(module, "row", (weight,), rows, columns, 0, rows))
        elif module is model.get_output_embeddings() and last == OUTPUT and isinstance(module, nn.Linear):
            out_features, in_features = module.weight.shape
            targets.append(_target(name, module, out_features, in_features))
    return targets


def head_targets(layer: Any) -> list[TargetModule]:
    """Return the scalar head ``layer`` as a target that every rank has completely; nothing for None."""
    if layer is None:
        return []
    # All labels are in one row of A: a head may have more of them than an adapter has ranks.
    return [replace(_target(HEAD, layer, len(layer.weight), layer.weight.numel()), split="none")]


def experts_without_gate(model: nn.Module) -> Iterator[str]:
    """Yield names of fused experts that peft's format of two parameters cannot hold."""
    for name, module in model.named_modules():
        if name.endswith(".experts") and not getattr(module, "has_gate", True):
            yield name


def drawn_as(name: str, allowed: Sequence[str]) -> str | None:
    """Return the projection in ``allowed`` whose name seeds the dropout of ``name``, so that all engines draw the same masks."""
    parent, _, last = name.rpartition(".")
    for siblings in FUSED_BY_MEGATRON:
        if last in siblings:
            return next((first for sibling in siblings if (first := f"{parent}.{sibling}") in allowed), None)
    return None


def is_transposed(target: TargetModule) -> bool:
    """Check whether a weight is stored as [experts, in, out]."""
    return target.is_expert and getattr(target.module, "is_transposed", False)


def _target(name: str, module: Any, out_features: int, in_features: int, experts: int | None = None) -> TargetModule:
    rows = torch.arange(out_features)
    weight = FusedSlice(name, out_features, rows, rows)
    return TargetModule(
        module,
        "column",
        (weight,),
        in_features,
        out_features,
        0,
        in_features,
        experts=experts or 1,
        expert_total=experts,
    )
