"""megascend: train Hugging Face models with the real Megatron-Core on Ascend NPUs, CUDA GPUs and plain CPUs.

    import megascend

    megascend.bootstrap()                       # first line of the program
    backend = megascend.MegatronBackend(model="path/to/hf-checkpoint", parallel=megascend.Parallel(tensor=2))

Importing this package imports neither torch nor Megatron; every public name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megascend import errors as _errors

__version__ = "0.3.0"

_PUBLIC = {
    "bootstrap": "megascend.runtime.bootstrap",
    "Runtime": "megascend.runtime.bootstrap",
    "PatchProvider": "megascend.runtime.bootstrap",
    "register_provider": "megascend.runtime.bootstrap",
    "Backend": "megascend.backend",
    "MegatronBackend": "megascend.backends",
    "SingleBackend": "megascend.backends",
    "FsdpBackend": "megascend.backends",
    "make_backend": "megascend.backends",
    "register_engine": "megascend.backends",
    "engine_context": "megascend.engines.context",
    "EngineSpec": "megascend.engines.context",
    "ForwardBackwardResult": "megascend.training.batch.results",
    "ForwardResult": "megascend.training.batch.results",
    "StepResult": "megascend.training.batch.results",
    "Sample": "megascend.training.batch.sample",
    "SampleImages": "megascend.training.batch.images",
    "Candidates": "megascend.training.batch.candidates",
    "Loss": "megascend.training.batch.loss",
    "LossFunction": "megascend.training.batch.loss",
    "LossInputs": "megascend.training.batch.loss",
    "register_loss": "megascend.training.batch.losses",
    "Parallel": "megascend.config",
    "Adam": "megascend.config",
    "Schedule": "megascend.config",
    "Recompute": "megascend.config",
    "Moe": "megascend.config",
    "Batching": "megascend.config",
    "Classification": "megascend.config",
    "CudaGraphs": "megascend.config",
    "Fsdp": "megascend.config",
    "AdapterLoss": "megascend.training.batch.results",
    "AdapterQueue": "megascend.training.lora.queue",
    "AdapterFuture": "megascend.training.lora.queue",
    "Lora": "megascend.config",
    "register_lora_targets": "megascend.training.lora.target_maps",
    "Architecture": "megascend.models",
    "register_architecture": "megascend.models",
    "Adapters": "megascend.config",
    "Data": "megascend.config",
    "Sampler": "megascend.apps.sampling.sampler",
    "SampleRequest": "megascend.apps.sampling.request",
    "SampleResult": "megascend.apps.sampling.request",
    "SamplingParams": "megascend.apps.sampling.request",
    "RunConfig": "megascend.config",
    "Callback": "megascend.apps.train.callbacks",
    "register_tracker": "megascend.apps.tracking",
    "TrackedRun": "megascend.apps.tracking",
    "Tracker": "megascend.apps.tracking",
    "load_config": "megascend.config",
    "WeightSync": "megascend.sync",
}
# Every error: a program must be able to catch what a call may raise.
_PUBLIC |= {name: "megascend.errors" for name in vars(_errors) if name.endswith("Error")}
__all__ = [*_PUBLIC, "__version__"]

if TYPE_CHECKING:
    from megascend.apps.sampling.request import SampleRequest, SampleResult, SamplingParams
    from megascend.apps.sampling.sampler import Sampler
    from megascend.apps.tracking import TrackedRun, Tracker, register_tracker
    from megascend.apps.train.callbacks import Callback
    from megascend.backend import Backend
    from megascend.backends import FsdpBackend, MegatronBackend, SingleBackend, make_backend, register_engine
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
    from megascend.engines.context import EngineSpec, engine_context
    from megascend.errors import *  # noqa: F403
    from megascend.models import Architecture, register_architecture
    from megascend.runtime.bootstrap import PatchProvider, Runtime, bootstrap, register_provider
    from megascend.sync import WeightSync
    from megascend.training.batch.candidates import Candidates
    from megascend.training.batch.images import SampleImages
    from megascend.training.batch.loss import Loss, LossFunction, LossInputs
    from megascend.training.batch.losses import register_loss
    from megascend.training.batch.results import AdapterLoss, ForwardBackwardResult, ForwardResult, StepResult
    from megascend.training.batch.sample import Sample
    from megascend.training.lora.queue import AdapterFuture, AdapterQueue
    from megascend.training.lora.target_maps import register_lora_targets


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megascend' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
