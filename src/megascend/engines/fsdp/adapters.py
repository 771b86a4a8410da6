"""LoRA adapters on a sharded transformers model: many in one batch, whole on every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megascend.config import Adam, Adapters, Schedule
from megascend.distributed.process_groups import ProcessGroups
from megascend.engines.fsdp.adapter_layers import AdapterLayers
from megascend.engines.fsdp.expert_parallel import ExpertShare
from megascend.errors import ConfigError
from megascend.lora.adapter_set import MixedAdapters
from megascend.lora.registry import AdapterRegistry
from megascend.lora.target_modules import EMBEDDING, TargetModule, check_untied, matches
from megascend.lora.transformers_targets import (
    drawn_as,
    embedding_and_output,
    experts_without_gate,
    is_transposed,
    layer_targets,
)
from megascend.topology.topology import Topology


class FsdpAdapters(MixedAdapters):
    """Adapters in the layers of a frozen transformers model, many in one batch.

    Every rank has all factors, of its own experts where those are divided, and steps them alike; gradients are summed over the
    ranks once a step.

    Args:
        model: not yet sharded; may be without memory.
        tied: the output layer is the embedding.
        share: which experts will be this rank's; None: all.
        dtype: in which layers compute.

    Attributes:
        layers: applies them.
        transposed: projections whose weight is stored as [experts, in, out].

    Raises:
        ConfigError: a target is not there, or cannot be adapted.
    """

    def __init__(
        self,
        model: Any,
        topology: Topology,
        groups: ProcessGroups,
        limits: Adapters,
        *,
        adam: Adam,
        schedule: Schedule,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        model_dir: Path,
        tied: bool,
        share: ExpertShare | None,
    ) -> None:
        embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
        check_untied(limits.targets, embedding.removesuffix(EMBEDDING), tied=tied)
        ungated = next(experts_without_gate(model), None)
        if ungated is not None and limits.targets == "all-linear":
            raise ConfigError(
                f"engine fsdp: adapters.targets is all-linear, but {ungated} of {type(model).__name__} has no gate, and such "
                "experts are not adapted; name the other layers in adapters.targets"
            )
        found = [_of_rank(target, share) for target in layer_targets(model)]
        found += [] if tied else embedding_and_output(model)
        everything = sorted(target.slices[0].name for target in found)
        allowed = [name for name in everything if matches(name, limits.targets)]
        drawn = [replace(target, drawn_as=drawn_as(target.slices[0].name, allowed)) for target in found]
        registry = AdapterRegistry.of_model(
            drawn, everything, limits, adam=adam, schedule=schedule, seed=seed, dtype=dtype, device=device
        )
        self.layers = AdapterLayers(model, registry.shape_groups, divided=share is not None)
        self.transposed = {target.slices[0].name for target in found if is_transposed(target)}
        super().__init__(
            registry,
            topology,
            groups,
            model_dir,
            layers=self.layers,
            dtype=dtype,
            device=device,
            sequence_first=False,
        )


def _of_rank(target: TargetModule, share: ExpertShare | None) -> TargetModule:
    """Of experts, this rank's."""
    if share is None or not target.is_expert:
        return target
    count = target.experts // share.size
    return replace(target, experts=count, expert_start=share.index * count)
