"""Adapters in a Megatron model: hooks in its layers, and the stacked adapters of the last call."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from megascend.config import Adam, Adapters, Schedule
from megascend.distributed.objects import gather_objects
from megascend.distributed.process_groups import ProcessGroups
from megascend.lora.layers import AdapterLayers
from megascend.lora.mixed_adapters import MixedAdapters
from megascend.lora.registry import AdapterRegistry
from megascend.lora.target_maps import find_target_modules
from megascend.lora.target_modules import ModelLayout, check_untied
from megascend.topology.topology import Topology


class AdapterManager(MixedAdapters):
    """Adapters in the layers of a frozen Megatron model, many in one batch.

    Attributes:
        layers: applies them.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        config: Any,
        topology: Topology,
        groups: ProcessGroups,
        tensor_names: Collection[str],
        limits: Adapters,
        *,
        adam: Adam,
        schedule: Schedule,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        vocab_size: int,
        model_dir: Path,
    ) -> None:
        for chunk in chunks:
            chunk.requires_grad_(False)
        layout = ModelLayout(config, topology, groups.coordinates, tensor_names, vocab_size)
        check_untied(limits.targets, layout.prefix, tied=not config.untie_embeddings_and_output_weights)
        found = find_target_modules(chunks, layout)
        mine = sorted({fused_slice.name for target in found for fused_slice in target.slices})
        everything = sorted({name for rank in gather_objects(mine, "world", groups, "layers") for name in rank})
        registry = AdapterRegistry.of_model(
            found, everything, limits, adam=adam, schedule=schedule, seed=seed, dtype=dtype, device=device
        )
        self.layers = AdapterLayers(
            chunks,
            registry.shape_groups,
            tensor_size=topology.tensor,
            sequence_parallel=topology.sequence_parallel and topology.tensor > 1,
        )
        super().__init__(
            registry,
            topology,
            groups,
            model_dir,
            layers=self.layers,
            dtype=dtype,
            device=device,
            sequence_first=True,
        )
