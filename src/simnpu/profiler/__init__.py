"""``torch_npu.profiler`` of the simulated device: what the CPU does, recorded by ``torch.profiler``; never device times.

A session that asks for the CPU's activity writes its trace where torch_npu would write its own. The device's activity
(kernel times, AI core metrics, memory bandwidth) does not exist here: it is accepted, and every folder that is written
says in ``profiler_info.json`` that it holds none.
"""

from simnpu.profiler import dynamic_profile as dynamic_profile
from simnpu.profiler.experimental_config import (
    AiCMetrics,
    ExportType,
    HostSystem,
    ProfilerLevel,
    _ExperimentalConfig,
    supported_ai_core_metrics,
    supported_export_type,
    supported_profiler_level,
)
from simnpu.profiler.profiler import (
    ProfilerActivity,
    _KinetoProfile,
    profile,
    supported_activities,
    tensorboard_trace_handler,
)
from simnpu.profiler.scheduler import ProfilerAction
from simnpu.profiler.scheduler import Schedule as schedule

__all__ = [
    "AiCMetrics",
    "ExportType",
    "HostSystem",
    "ProfilerAction",
    "ProfilerActivity",
    "ProfilerLevel",
    "_ExperimentalConfig",
    "_KinetoProfile",
    "dynamic_profile",
    "profile",
    "schedule",
    "supported_activities",
    "supported_ai_core_metrics",
    "supported_export_type",
    "supported_profiler_level",
    "tensorboard_trace_handler",
]


def __getattr__(name: str) -> object:
    from simnpu.errors import missing

    raise missing(name, "torch_npu.profiler")
