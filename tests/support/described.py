"""Published models as checkpoints without weights, and plans of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascend.config import Parallel, Recompute, TrainerConfig
from megascend.models.checkpoint_files.info import ModelInfo, inspect_checkpoint
from megascend.models.checkpoint_files.sparse_checkpoint import write_sparse_checkpoint
from megascend.models.memory.estimate import Estimate, estimate
from megascend.models.memory.sizes import Workload
from megascend.runtime.topology.topology import Topology, plan

WORKLOAD_TOKENS = 8192
FOLDER = Path(__file__).resolve().parents[1] / "models" / "published"
PUBLISHED: dict[str, dict[str, Any]] = json.loads((FOLDER / "index.json").read_text(encoding="utf-8"))
"""Source, parameters and a layout of each published configuration."""


@dataclass(frozen=True)
class PublishedModel:
    """A published model without weights: its configuration, a checkpoint on disk, and what is read from it."""

    config: Mapping[str, Any]
    path: Path
    info: ModelInfo


def published_config(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def describe_published(name: str, folder: Path) -> PublishedModel:
    """Describe the model in ``folder``: up to 3 s for one of a hundred thousand tensors."""
    config = published_config(name)
    path = write_sparse_checkpoint(folder, config)
    return PublishedModel(config, path, inspect_checkpoint(path))


def published_plan(model: PublishedModel, layout: Mapping[str, int]) -> tuple[Topology, Estimate]:
    """Return the topology and the memory of a rank in bf16 with full recomputation, for micro batches of 8,192 tokens.

    Args:
        layout: ``ranks``, ``tensor``, ``pipeline`` and ``expert``; experts are not divided by tensor parallelism if ``expert``
            is above 1.

    Raises:
        TopologyError: Megatron-Core cannot divide the model so.
    """
    sizes = {name: layout[name] for name in ("tensor", "pipeline", "expert")}
    parallel = Parallel(**sizes, expert_tensor=1 if layout["expert"] > 1 else None)
    topology = plan(parallel, layout["ranks"], model.info.shape)
    config = TrainerConfig(
        model=model.path,
        output=model.path / "run",
        steps=1,
        parallel=parallel,
        precision="bf16",
        recompute=Recompute(granularity="full"),
    )
    workload = Workload(WORKLOAD_TOKENS, micro_batches=8)
    memory = estimate(config, model.info, model.config, topology, workload, "fused")
    assert memory is not None
    return topology, memory
