"""Plans of checkpoints without weights (:mod:`megascend.huggingface.described`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megascend.config import Parallel, Recompute, TrainerConfig
from megascend.huggingface.files import read_config
from megascend.huggingface.info import inspect_checkpoint
from megascend.memory.estimate import Estimate, estimate
from megascend.memory.sizes import Workload
from megascend.topology.topology import Topology, plan

WORKLOAD_TOKENS = 8192


def published_plan(checkpoint: Path, layout: Mapping[str, int]) -> tuple[Topology, Estimate]:
    """Return the topology and the memory of a rank in bf16 with full recomputation, for micro batches of 8,192 tokens.

    Args:
        layout: ``ranks``, ``tensor``, ``pipeline`` and ``expert``; experts are not divided by tensor parallelism if ``expert``
            is above 1.

    Raises:
        TopologyError: Megatron-Core cannot divide the model so.
    """
    sizes = {name: layout[name] for name in ("tensor", "pipeline", "expert")}
    parallel = Parallel(**sizes, expert_tensor=1 if layout["expert"] > 1 else None)
    info = inspect_checkpoint(checkpoint)
    topology = plan(parallel, layout["ranks"], info.shape)
    config = TrainerConfig(
        model=checkpoint,
        output=checkpoint / "run",
        steps=1,
        parallel=parallel,
        precision="bf16",
        recompute=Recompute(granularity="full"),
    )
    workload = Workload(WORKLOAD_TOKENS, micro_batches=8)
    memory = estimate(config, info, read_config(checkpoint), topology, workload, "fused")
    assert memory is not None
    return topology, memory
