"""What a profiling session is asked to collect. Names and values follow torch_npu's public ``experimental_config``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

__all__ = [
    "AiCMetrics",
    "ExportType",
    "HostSystem",
    "ProfilerLevel",
    "_ExperimentalConfig",
    "supported_ai_core_metrics",
    "supported_export_type",
    "supported_profiler_level",
]


class ProfilerLevel:
    Level0 = "Level0"
    Level1 = "Level1"
    Level2 = "Level2"
    Level_none = "Level_none"


class AiCMetrics:
    PipeUtilization = "ACL_AICORE_PIPE_UTILIZATION"
    ArithmeticUtilization = "ACL_AICORE_ARITHMETIC_UTILIZATION"
    Memory = "ACL_AICORE_MEMORY_BANDWIDTH"
    MemoryL0 = "ACL_AICORE_L0B_AND_WIDTH"
    MemoryUB = "ACL_AICORE_MEMORY_UB"
    ResourceConflictRatio = "ACL_AICORE_RESOURCE_CONFLICT_RATIO"
    L2Cache = "ACL_AICORE_L2_CACHE"
    MemoryAccess = "ACL_AICORE_MEMORY_ACCESS"
    AiCoreNone = "ACL_AICORE_NONE"


class ExportType:
    Db = "db"
    Text = "text"


class HostSystem:
    CPU = "cpu"
    MEM = "mem"
    DISK = "disk"
    NETWORK = "network"
    OSRT = "osrt"
    NUMA = "numa"


def values(group: type) -> set[str]:
    """Return the values of one of the groups above."""
    return {value for name, value in vars(group).items() if not name.startswith("_")}


def supported_profiler_level() -> set[str]:
    return values(ProfilerLevel)


def supported_ai_core_metrics() -> set[str]:
    return values(AiCMetrics)


def supported_export_type() -> set[str]:
    return values(ExportType)


class _ExperimentalConfig:
    """Options, checked; as in torch_npu, an unknown value logs a warning and is replaced by the default."""

    def __init__(
        self,
        profiler_level: str = ProfilerLevel.Level0,
        aic_metrics: str = AiCMetrics.PipeUtilization,
        l2_cache: bool = False,
        msprof_tx: bool = False,
        mstx: bool = False,
        data_simplification: bool = True,
        record_op_args: bool = False,
        op_attr: bool = False,
        gc_detect_threshold: float | None = None,
        export_type: str | Sequence[str] = ExportType.Text,
        host_sys: Sequence[str] | None = None,
        mstx_domain_include: Sequence[str] | None = None,
        mstx_domain_exclude: Sequence[str] | None = None,
        sys_io: bool = False,
        sys_interconnection: bool = False,
    ) -> None:
        self.profiler_level = checked_value("profiler_level", profiler_level, ProfilerLevel, ProfilerLevel.Level0)
        self.aic_metrics = checked_value("aic_metrics", aic_metrics, AiCMetrics, AiCMetrics.AiCoreNone)
        self.mstx = bool(mstx or msprof_tx or self.profiler_level == ProfilerLevel.Level_none)
        exports = [export_type] if isinstance(export_type, str) else list(export_type)
        self.export_type = [checked_value("export_type", kind, ExportType, ExportType.Text) for kind in exports]
        self.host_sys = [checked_value("host_sys", kind, HostSystem, HostSystem.CPU) for kind in host_sys or ()]
        self.gc_detect_threshold = gc_detect_threshold
        self.mstx_domain_include = list(mstx_domain_include or ())
        self.mstx_domain_exclude = list(mstx_domain_exclude or ())
        switches = {
            "l2_cache": l2_cache,
            "data_simplification": data_simplification,
            "record_op_args": record_op_args,
            "op_attr": op_attr,
            "sys_io": sys_io,
            "sys_interconnection": sys_interconnection,
        }
        for name, value in switches.items():
            if not isinstance(value, bool):
                warnings.warn(f"torch_npu.profiler: {name} must be a bool, found {value!r}; it is off", stacklevel=2)
            setattr(self, name, value is True)

    def __repr__(self) -> str:
        return f"_ExperimentalConfig({vars(self)})"


def checked_value(name: str, value: Any, group: type, otherwise: str) -> str:
    """``value`` if it is one of the group's, else ``otherwise`` with a warning."""
    if isinstance(value, str) and value in values(group):
        return value
    expected = ", ".join(sorted(values(group)))
    warnings.warn(
        f"torch_npu.profiler: {name} must be one of {expected}, found {value!r}; {otherwise} is used", stacklevel=3
    )
    return otherwise
