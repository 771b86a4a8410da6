"""Typed settings of a run. Parsing and checking them imports neither torch nor Megatron.

The same sections serve the Python API (``MegatronBackend(parallel=Parallel(tensor=2))``) and the YAML file of
``megascend train``. Unknown keys are errors, as are values that no run could use; what depends on the model or on the
number of processes is checked later, by :mod:`megascend.topology.topology`.
"""

from __future__ import annotations

from megascend.config.data import DATA_COLUMNS, Data, Distillation, Dpo, Kto, Orpo, Pictures, Simpo, Validation
from megascend.config.run import (
    Checkpoint,
    Generation,
    Parsed,
    Profile,
    Prompt,
    PromptMessage,
    RunConfig,
    TrainerConfig,
    load_config,
    parsed,
)
from megascend.config.run_file import read_settings
from megascend.config.section import Beta, Count, Seconds, Section, Seed, Size
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
    ModuleName,
    Moe,
    Mtp,
    Muon,
    Parallel,
    ParameterGroup,
    PlatformName,
    Precision,
    ProviderOptions,
    Recompute,
    RecomputeModule,
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
    "Beta",
    "Checkpoint",
    "ContextAlgorithm",
    "Count",
    "CudaGraphs",
    "Data",
    "Distillation",
    "Dpo",
    "Fsdp",
    "Generation",
    "Kto",
    "Lora",
    "ModuleName",
    "Moe",
    "Mtp",
    "Muon",
    "Orpo",
    "Parallel",
    "ParameterGroup",
    "Parsed",
    "Pictures",
    "PlatformName",
    "Precision",
    "Profile",
    "Prompt",
    "PromptMessage",
    "ProviderOptions",
    "Recompute",
    "RecomputeModule",
    "RunConfig",
    "Schedule",
    "Seconds",
    "Section",
    "Seed",
    "Simpo",
    "Size",
    "TrainerConfig",
    "Validation",
    "VisionTower",
    "load_config",
    "parsed",
    "read_settings",
]
