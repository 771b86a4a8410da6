"""Typed settings of a run. Parsing and checking them imports neither torch nor Megatron.

The same sections serve the Python API (``MegatronBackend(parallel=Parallel(tensor=2))``) and the YAML file of
``megascend train``. Unknown keys are errors, as are values that no run could use; what depends on the model or on the
number of processes is checked later, by :mod:`megascend.runtime.topology.topology`.
"""

from __future__ import annotations

from megascend.config.data import (
    DATA_COLUMNS,
    Classification,
    Data,
    DataImages,
    Distillation,
    Validation,
    ValidationTasks,
)
from megascend.config.run import (
    Checkpoint,
    Generation,
    Profile,
    Prompt,
    Push,
    RunConfig,
    TrainerConfig,
    load_config,
    parsed,
)
from megascend.config.run_file import check_file_name, read_settings
from megascend.config.section import Count, Seconds, Section, Size
from megascend.config.training import (
    Adam,
    Adapters,
    Affinity,
    BaseWeights,
    Batching,
    ContextAlgorithm,
    CudaGraphs,
    Fsdp,
    Lora,
    Moe,
    Mtp,
    Muon,
    Parallel,
    ParameterGroup,
    PlatformName,
    Precision,
    Recompute,
    Schedule,
    VisionTower,
)

__all__ = [
    "DATA_COLUMNS",
    "Adam",
    "Adapters",
    "Affinity",
    "BaseWeights",
    "Batching",
    "Checkpoint",
    "Classification",
    "ContextAlgorithm",
    "Count",
    "CudaGraphs",
    "Data",
    "DataImages",
    "Distillation",
    "Fsdp",
    "Generation",
    "Lora",
    "Moe",
    "Mtp",
    "Muon",
    "Parallel",
    "ParameterGroup",
    "PlatformName",
    "Precision",
    "Profile",
    "Prompt",
    "Push",
    "Recompute",
    "RunConfig",
    "Schedule",
    "Seconds",
    "Section",
    "Size",
    "TrainerConfig",
    "Validation",
    "ValidationTasks",
    "VisionTower",
    "check_file_name",
    "load_config",
    "parsed",
    "read_settings",
]
