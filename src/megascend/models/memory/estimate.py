"""Estimate of a rank's peak memory in a training step, item by item.

The peak is ``max(activations and temporaries of the passes, temporaries of the optimizer)`` on top of persistent state. The
formulas follow the code of the engines and kernels; ``tests/models/memory`` compares them with measured peaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megascend.config import TrainerConfig
from megascend.config.registry import ENGINES
from megascend.config.rl import RlConfig
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.models.memory import megatron, transformers_engines
from megascend.models.memory.activations import Case, LayerKind
from megascend.models.memory.sizes import Items, Kernels, ModelSizes, TeacherSizes, Workload
from megascend.runtime.topology.topology import Topology

MIB = 2**20
CUDA_CONTEXT = 500 * MIB
"""Approximate GPU memory of the driver, its modules and libraries, outside torch's allocator."""
FRAGMENTATION = 0.04
"""Approximate fraction of the activations that torch's allocator reserves but cannot use."""

SWAPPED_COPIES = 2
"""Copies of a rank's parameters in host memory for a reference, or a teacher, that takes the model's place on the device: its
own, and the model's in the meantime."""
STATE_COPIES = 2
"""Copies of a teacher's hidden states: by micro batch and by sample."""
TRANSIENT = (
    "activations",
    "output head",
    "backward pass",
    "update",
    "gathered parameters",
    "gradient of the output layer",
)
"""Items of engines fsdp and single that are not there during a teacher's forward pass."""


@dataclass(frozen=True)
class Estimate:
    """Memory of the rank that needs most, in bytes.

    Attributes:
        items: bytes of tensors, by purpose; their sum is the peak.
        host: bytes of offloaded optimizer state, and of other models, in host memory; on a CPU, where these are items, empty.
        overhead: outside tensors, by purpose; a rule of thumb.
        stage: pipeline stage of that rank.
        remarks: effects that the formulas omit.
    """

    items: Items
    overhead: Items = field(default_factory=dict)
    stage: int = 0
    remarks: tuple[str, ...] = ()
    host: Items = field(default_factory=dict)

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
    *,
    sizes: ModelSizes | None = None,
    groups: Sequence[megatron.StageGroup] | None = None,
) -> Estimate | None:
    """Estimate the memory of a run's largest micro batch; None for a registered engine.

    Args:
        hf_config: the model's ``config.json``.
        sizes, groups: of the model, and of the Megatron engine's stages, for callers that estimate many settings; None: computed
            here.
    """
    engine = ENGINES.get(config.engine)  # None: of a plug-in that is not imported here
    if engine is None or engine.memory is None:
        return None
    sizes = sizes or ModelSizes.of(info, hf_config)
    remarks = []
    if sizes.latent is not None and engine.memory != "stages":
        remarks.append("attention with latent keys and values (MLA) is counted as plain attention")
    if sizes.experts:
        remarks.append("experts are assumed to have equal loads")
    if info.image_layout is not None:
        remarks.append("activations of the vision tower are not counted")
    case = Case(config, info, sizes, topology, workload, LayerKind.of(config, workload, kernels))
    if engine.memory == "stages":
        per_stage = megatron.stage_items(case, groups)
    else:
        per_stage = {0: transformers_engines.items(case)}
    if workload.teacher is not None:
        per_stage = {
            stage: _with_teacher(case, items, workload.teacher, last=stage == topology.pipeline - 1)
            for stage, items in per_stage.items()
        }
    offloaded = {stage: items.pop(megatron.OFFLOADED, 0) for stage, items in per_stage.items()}
    stage, items = max(per_stage.items(), key=lambda entry: sum(entry[1].values()))
    host = _host_items(case, items)
    if offloaded[stage]:
        host[megatron.OFFLOADED] = offloaded[stage]
    if kernels == "plain":
        items, host = items | host, {}
    overhead: Items = {}
    if kernels != "plain":
        overhead["driver and libraries"] = CUDA_CONTEXT
        overhead["fragmentation"] = int(FRAGMENTATION * items.get("activations", 0))
    return Estimate({name: size for name, size in items.items() if size}, overhead, stage, tuple(remarks), host)


def _with_teacher(case: Case, items: Items, teacher: TeacherSizes, *, last: bool) -> Items:
    """Add a teacher's device memory: its output layer's rows, and a second model with its forward pass."""
    added: Items = {}
    if last and teacher.loss is not None:
        rows = -(-teacher.sizes.vocabulary // case.topology.tensor)
        added["teacher's output layer"] = case.kind.bytes * rows * teacher.sizes.hidden
    if teacher.swapped:
        return items | added
    parameters, forward = transformers_engines.second_model(replace(case, info=teacher.info, sizes=teacher.sizes))
    added["teacher"] = parameters
    if forward > sum(items.get(name, 0) for name in TRANSIENT):
        items = {name: size for name, size in items.items() if name not in TRANSIENT}
        added["teacher's forward pass"] = forward
    return items | added


def _host_items(case: Case, items: Items) -> Items:
    """Return the host memory of other models' weights and hidden states, for each rank."""
    config, topology, workload = case.config, case.topology, case.workload
    # Offloaded shards, which are fp32, are not on the device.
    parameters = items["parameters"] or 4 * case.info.parameter_count * config.fsdp.replicate // topology.world_size
    host: Items = {}
    if isinstance(config, RlConfig) and config.reference is not None and config.lora is None:
        host["reference"] = SWAPPED_COPIES * parameters
    teacher = workload.teacher
    if teacher is None:
        return host
    width = case.kind.bytes
    if teacher.swapped:
        host["teacher"] = SWAPPED_COPIES * parameters
    elif config.fsdp.offload:
        host["teacher"] = width * teacher.info.parameter_count * config.fsdp.replicate // topology.world_size
    if teacher.loss is not None:
        tokens = workload.step_tokens or workload.micro_batches * workload.tokens
        host["teacher's states"] = STATE_COPIES * width * teacher.sizes.hidden * tokens
    return host
