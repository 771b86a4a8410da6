"""megascend: train Hugging Face models with the real Megatron-Core on Ascend NPUs, CUDA GPUs and plain CPUs.

    import megascend

    megascend.bootstrap()                       # first line of the program
    backend = megascend.MegatronBackend(model="path/to/hf-checkpoint", parallel=megascend.Parallel(tensor=2))

Importing this package imports neither torch nor Megatron; every public name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0.dev0"

_PUBLIC = {
    "bootstrap": "megascend.bootstrap",
    "Runtime": "megascend.bootstrap",
    "PatchProvider": "megascend.bootstrap",
    "register_provider": "megascend.bootstrap",
    "Backend": "megascend.backend",
    "MegatronBackend": "megascend.backends",
    "SingleBackend": "megascend.backends",
    "FsdpBackend": "megascend.backends",
    "make_backend": "megascend.backends",
    "register_engine": "megascend.backends",
    "engine_context": "megascend.engines.context",
    "ForwardBackwardResult": "megascend.batch.results",
    "ForwardResult": "megascend.batch.results",
    "StepResult": "megascend.batch.results",
    "Sample": "megascend.batch.sample",
    "SampleImages": "megascend.batch.images",
    "Candidates": "megascend.batch.candidates",
    "Loss": "megascend.batch.loss",
    "LossFunction": "megascend.batch.loss",
    "LossInputs": "megascend.batch.loss",
    "register_loss": "megascend.batch.losses",
    "Parallel": "megascend.config",
    "Adam": "megascend.config",
    "Schedule": "megascend.config",
    "Recompute": "megascend.config",
    "Moe": "megascend.config",
    "Batching": "megascend.config",
    "Classification": "megascend.config",
    "CudaGraphs": "megascend.config",
    "Fsdp": "megascend.config",
    "AdapterLoss": "megascend.batch.results",
    "AdapterQueue": "megascend.lora.queue",
    "AdapterFuture": "megascend.lora.queue",
    "Lora": "megascend.config",
    "register_lora_targets": "megascend.lora.target_maps",
    "register_architecture": "megascend.models",
    "Adapters": "megascend.config",
    "Data": "megascend.config",
    "Sampler": "megascend.sampling.sampler",
    "SampleRequest": "megascend.sampling.request",
    "SampleResult": "megascend.sampling.request",
    "SamplingParams": "megascend.sampling.request",
    "RunConfig": "megascend.config",
    "register_tracker": "megascend.tracking",
    "TrackedRun": "megascend.tracking",
    "Tracker": "megascend.tracking",
    "load_config": "megascend.config",
    "MegascendError": "megascend.errors",
    "ConfigError": "megascend.errors",
    "TopologyError": "megascend.errors",
    "DataError": "megascend.errors",
    "EvaluationError": "megascend.errors",
    "LossFunctionError": "megascend.errors",
    "OutOfStepError": "megascend.errors",
    "ImportOrderError": "megascend.errors",
    "VersionError": "megascend.errors",
    "MissingDependencyError": "megascend.errors",
    "PlatformError": "megascend.errors",
    "OutOfDeviceMemoryError": "megascend.errors",
    "CheckpointError": "megascend.errors",
    "HubError": "megascend.errors",
    "ProcessGroupError": "megascend.errors",
    "CollectiveTimeoutError": "megascend.errors",
    "PeerLostError": "megascend.errors",
    "NonFiniteError": "megascend.errors",
    "QueueFullError": "megascend.errors",
    "ControllerError": "megascend.errors",
    "MessageError": "megascend.errors",
    "EngineOwnedError": "megascend.errors",
    "LeaseLapsedError": "megascend.errors",
    "ControllerBusyError": "megascend.errors",
    "ControllerLostError": "megascend.errors",
    "ControllerRestartedError": "megascend.errors",
    "RolloutTaskError": "megascend.errors",
    "WeightSync": "megascend.weightsync",
    "WeightSyncError": "megascend.errors",
    "SelfCheckError": "megascend.errors",
}
__all__ = [*_PUBLIC, "__version__"]

if TYPE_CHECKING:
    from megascend.backend import Backend
    from megascend.backends import FsdpBackend, MegatronBackend, SingleBackend, make_backend, register_engine
    from megascend.batch.candidates import Candidates
    from megascend.batch.images import SampleImages
    from megascend.batch.loss import Loss, LossFunction, LossInputs
    from megascend.batch.losses import register_loss
    from megascend.batch.results import AdapterLoss, ForwardBackwardResult, ForwardResult, StepResult
    from megascend.batch.sample import Sample
    from megascend.bootstrap import PatchProvider, Runtime, bootstrap, register_provider
    from megascend.config import (
        Adam,
        Adapters,
        Batching,
        Classification,
        CudaGraphs,
        Data,
        Fsdp,
        Lora,
        Moe,
        Parallel,
        Recompute,
        RunConfig,
        Schedule,
        load_config,
    )
    from megascend.engines.context import engine_context
    from megascend.errors import (
        CheckpointError,
        CollectiveTimeoutError,
        ConfigError,
        ControllerBusyError,
        ControllerError,
        ControllerLostError,
        ControllerRestartedError,
        DataError,
        EngineOwnedError,
        EvaluationError,
        HubError,
        ImportOrderError,
        LeaseLapsedError,
        LossFunctionError,
        MegascendError,
        MessageError,
        MissingDependencyError,
        NonFiniteError,
        OutOfDeviceMemoryError,
        OutOfStepError,
        PeerLostError,
        PlatformError,
        ProcessGroupError,
        QueueFullError,
        RolloutTaskError,
        SelfCheckError,
        TopologyError,
        VersionError,
        WeightSyncError,
    )
    from megascend.lora.queue import AdapterFuture, AdapterQueue
    from megascend.lora.target_maps import register_lora_targets
    from megascend.models import register_architecture
    from megascend.sampling.request import SampleRequest, SampleResult, SamplingParams
    from megascend.sampling.sampler import Sampler
    from megascend.tracking import TrackedRun, Tracker, register_tracker
    from megascend.weightsync import WeightSync


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megascend' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
