"""Estimate of a rank's peak memory in a training step, item by item.

The peak is ``max(activations and temporaries of the passes, temporaries of the optimizer)`` on top of persistent state. The
formulas follow the code of the engines and kernels; ``tests/memory`` compares them with measured peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megascend.config import TrainerConfig
from megascend.config.rl import RlConfig
from megascend.huggingface.info import ModelInfo
from megascend.memory import megatron, transformers_engines
from megascend.memory.sizes import Items, Kernels, ModelSizes, Workload
from megascend.topology.topology import Topology

MIB = 2**20
CUDA_CONTEXT = 500 * MIB
"""Approximate GPU memory of the driver, its modules and libraries, outside torch's allocator."""
FRAGMENTATION = 0.04
"""Approximate fraction of the activations that torch's allocator reserves but cannot use."""

ENGINES = ("megatron", "fsdp", "single")
"""Engines with an estimate."""
REFERENCE_COPIES = 2
"""Copies of a rank's parameters in host memory for a reference model: its own, and the policy's while it is on the device."""


@dataclass(frozen=True)
class Estimate:
    """Memory of the rank that needs most, in bytes.

    Attributes:
        items: bytes of tensors, by purpose; their sum is the peak.
        overhead: outside tensors, by purpose; a rule of thumb.
        stage: pipeline stage of that rank.
        remarks: effects that the formulas omit.
    """

    items: Items
    overhead: Items = field(default_factory=dict)
    stage: int = 0
    remarks: tuple[str, ...] = ()

    @property
    def tensors(self) -> int:
        """Peak of all tensors, as in ``torch.cuda.max_memory_allocated``."""
        return sum(self.items.values())

    @property
    def total(self) -> int:
        """Required device memory."""
        return self.tensors + sum(self.overhead.values())


def estimate(
    config: TrainerConfig,
    info: ModelInfo,
    hf_config: Mapping[str, Any],
    topology: Topology,
    workload: Workload,
    kernels: Kernels,
) -> Estimate | None:
    """Estimate the memory of a run's largest micro batch; None for a registered engine.

    ``hf_config``: the model's ``config.json``.
    """
    if config.engine not in ENGINES:
        return None
    sizes = ModelSizes.of(info, hf_config)
    remarks = []
    if sizes.latent is not None and config.engine != "megatron":
        remarks.append("attention with latent keys and values (MLA) is counted as plain attention")
    if sizes.experts:
        remarks.append("experts are assumed to have equal loads")
    if info.image_layout is not None:
        remarks.append("activations of the vision tower are not counted")
    if config.engine == "megatron":
        per_stage = megatron.stage_items(config, info, sizes, topology, workload, kernels)
    else:
        per_stage = [transformers_engines.items(config, info, sizes, topology, workload, kernels)]
    stage, items = max(enumerate(per_stage), key=lambda entry: sum(entry[1].values()))
    if isinstance(config, RlConfig) and config.reference is not None and config.lora is None:
        # Offloaded shards, which are fp32, are no item of the device.
        parameters = items["parameters"] or 4 * info.parameter_count * config.fsdp.replicate // topology.world_size
        copies = REFERENCE_COPIES * parameters
        if kernels == "plain":
            items = items | {"reference": copies}
        else:
            remarks.append(
                f"the reference takes {copies / 2**30:.2f} GiB of host memory per rank: twice the parameters"
            )
    overhead: Items = {}
    if kernels != "plain":
        overhead["driver and libraries"] = CUDA_CONTEXT
        overhead["fragmentation"] = int(FRAGMENTATION * items.get("activations", 0))
    return Estimate({name: size for name, size in items.items() if size}, overhead, stage, tuple(remarks))
