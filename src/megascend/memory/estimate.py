"""Peak memory of a rank in a training step, item by item.

``max(activations and what works on them, the optimizer's temporaries)`` on top of what stays from step to step. The formulas are
those of the engines' own code and of the kernels under it; ``tests/memory`` holds them against measured peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megascend.config import TrainerConfig
from megascend.huggingface.info import ModelInfo
from megascend.memory import megatron, transformers_engines
from megascend.memory.sizes import Items, Kernels, ModelSizes, Workload
from megascend.topology.topology import Topology

MIB = 2**20
CUDA_CONTEXT = 500 * MIB
"""What the driver, its modules and libraries take on a GPU outside of torch's allocator; roughly."""
FRAGMENTATION = 0.04
"""Of the activations, what torch's allocator holds and cannot use; roughly."""

ENGINES = ("megatron", "fsdp", "single")
"""Those that there is an estimate for."""


@dataclass(frozen=True)
class Estimate:
    """Bytes of the rank that needs most.

    Attributes:
        items: of tensors, by what they are for; their sum is the peak.
        overhead: of the device beside them, by what takes it; a rule of thumb.
        stage: pipeline stage of that rank.
        remarks: what the formulas leave out.
    """

    items: Items
    overhead: Items = field(default_factory=dict)
    stage: int = 0
    remarks: tuple[str, ...] = ()

    @property
    def tensors(self) -> int:
        """Peak of all tensors: what ``torch.cuda.max_memory_allocated`` tells."""
        return sum(self.items.values())

    @property
    def total(self) -> int:
        """What the device has to have."""
        return self.tensors + sum(self.overhead.values())


def estimate(
    config: TrainerConfig,
    info: ModelInfo,
    hf_config: Mapping[str, Any],
    topology: Topology,
    workload: Workload,
    kernels: Kernels,
) -> Estimate | None:
    """Return what a run's largest micro batch needs; None for an engine from outside. ``hf_config``: the model's
    ``config.json``.
    """
    if config.engine not in ENGINES:
        return None
    sizes = ModelSizes.of(info, hf_config)
    remarks = []
    if sizes.latent:
        remarks.append("attention with latent keys and values (MLA) is counted as plain attention")
    if sizes.experts:
        remarks.append("experts are taken to have equal loads")
    if config.engine == "megatron":
        per_stage = megatron.stage_items(config, info, sizes, topology, workload, kernels)
    else:
        per_stage = [transformers_engines.items(config, info, sizes, topology, workload, kernels)]
    stage, items = max(enumerate(per_stage), key=lambda entry: sum(entry[1].values()))
    overhead: Items = {}
    if kernels != "plain":
        overhead["driver and libraries"] = CUDA_CONTEXT
        overhead["fragmentation"] = int(FRAGMENTATION * items.get("activations", 0))
    return Estimate({name: size for name, size in items.items() if size}, overhead, stage, tuple(remarks))
