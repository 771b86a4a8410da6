"""Settings of an engine, and the context that it is built in: the process, the checkpoint, the layout, the groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from megascend.bootstrap import Runtime, bootstrap
from megascend.config import Adam, Adapters, Batching, Fsdp, Moe, Parallel, PlatformName, Precision, Recompute, Schedule
from megascend.distributed import process_groups
from megascend.distributed.engine_groups import GroupFactory
from megascend.distributed.launch import Launch
from megascend.distributed.process_groups import ProcessGroups
from megascend.errors import CheckpointError, ConfigError
from megascend.huggingface.files import weight_files
from megascend.huggingface.info import ModelInfo, inspect_checkpoint
from megascend.huggingface.read_ahead import read_ahead
from megascend.huggingface.scalar_head import HeadKind
from megascend.topology.topology import Topology, plan


@dataclass(frozen=True)
class EngineSpec:
    """Settings of an engine; each knows some of them.

    Attributes:
        model: directory of a Hugging Face checkpoint with safetensors weights.
        parallel: how the ranks divide the work; data parallelism takes what is left of the world size.
        precision: ``fp32``, ``fp16`` or ``bf16``, for parameters and activations.
        tf32, platform, provider: as for :func:`megascend.bootstrap`.
        optimizer, schedule, recompute, moe, batching, fsdp: see :mod:`megascend.config`.
        adapters: freeze the model and train LoRA adapters on it; None: train the model.
        provider_options: settings of the provider's own, beside those that follow from the model and the layout.
        seed: of dropout and everything else that is random.
        timeout_s: seconds after which a missing rank is an error on all others.
        self_check: compare a small slice of the model with transformers first.
        head: ``lm``, or the kind of scalar head.
    """

    model: Path
    parallel: Parallel = field(default_factory=Parallel)
    precision: Precision = "bf16"
    tf32: bool | None = None
    optimizer: Adam = field(default_factory=Adam)
    schedule: Schedule = field(default_factory=Schedule)
    recompute: Recompute = field(default_factory=Recompute)
    moe: Moe = field(default_factory=Moe)
    batching: Batching = field(default_factory=Batching)
    adapters: Adapters | None = None
    platform: PlatformName = "auto"
    seed: int = 1234
    timeout_s: float = 600.0
    self_check: bool = True
    head: HeadKind = "lm"
    provider: str | None = None
    provider_options: Mapping[str, bool | int | float | str | None] = field(default_factory=dict)
    fsdp: Fsdp = field(default_factory=Fsdp)

    @classmethod
    def of(cls, model: str | Path, settings: Mapping[str, Any]) -> EngineSpec:
        """Return the spec with these settings, by the names of its fields; None stands for the default."""
        return cls(Path(model), **{name: value for name, value in settings.items() if value is not None})


@dataclass(frozen=True)
class EngineContext:
    """What an engine is built in.

    Attributes:
        runtime: this process, prepared for the engine.
        topology, groups: rank arithmetic and process groups.
        info: of the checkpoint in ``model_dir``.
        factory: made the engine's groups; None: they are plain ones.
    """

    runtime: Runtime
    topology: Topology
    groups: ProcessGroups
    info: ModelInfo
    model_dir: Path
    factory: GroupFactory | None = None


Prepare = Callable[[Runtime, Topology, Path], GroupFactory | None]
"""(the process, the layout, the checkpoint's directory) -> factory of the engine's groups; None: plain ones.

It refuses what the engine cannot do, and imports what it needs. No rank has met another yet.
"""


@contextmanager
def engine_context(
    engine: str,
    model: str | Path,
    *,
    precision: Precision,
    platform: PlatformName = "auto",
    tf32: bool | None = None,
    parallel: Parallel | None = None,
    provider: str | None = None,
    timeout_s: float = 600.0,
    prepare: Prepare = lambda runtime, topology, model_dir: None,
    head: HeadKind = "lm",
) -> Iterator[EngineContext]:
    """Build an engine in the block; if that fails, the process groups are destroyed and another attempt finds none. Collective.

    Args:
        engine: the name under which it is registered.
        model: directory of a Hugging Face checkpoint with safetensors weights.
        platform, tf32, provider: as for :func:`megascend.bootstrap`, which is called if it has not been.
        parallel: how the ranks divide the work; default: data parallelism alone.
        timeout_s: seconds after which a missing rank is an error on all others.
        prepare: called before ranks meet.
        head: what the model ends with: logits (``lm``), the scalar head of its checkpoint (``scalar``), or a new one in place of
            a causal language model's output layer (``new_sequence_classifier``, ``new_token_classifier``).

    Raises:
        ConfigError, TopologyError, CheckpointError, PlatformError, VersionError, ImportOrderError, CollectiveTimeoutError:
            before anything is built.
    """
    if precision not in get_args(Precision):
        raise ConfigError(f"precision must be fp32, fp16 or bf16, got {precision!r}")
    layout, model_dir = parallel or Parallel(), Path(model)
    launch = Launch.from_environment()
    with read_ahead(_weights(model_dir, launch), launch.local_rank, launch.local_size):
        runtime = bootstrap(platform, layout, tf32, engine, precision, provider)
        info = inspect_checkpoint(model_dir, head)
        topology = plan(layout, launch.world_size, info.shape)
        factory = prepare(runtime, topology, model_dir)
        runtime.configure_topology(topology, timeout_s)
        groups = process_groups.initialize(topology, runtime.platform, timeout_s, launch, factory)
        try:
            if precision == "fp32" and not runtime.tf32:
                runtime.platform.check_products()
            with groups.monitor.phase("build"):
                yield EngineContext(runtime, topology, groups, info, model_dir, factory)
        except BaseException:
            groups.destroy()
            raise


def _weights(model_dir: Path, launch: Launch) -> list[Path]:
    """Return the weight files that all ranks together read whole; none with several hosts, of which each may read a part."""
    if launch.local_size != launch.world_size:
        return []
    try:
        return [path for path in weight_files(model_dir) if path.is_file()]
    except CheckpointError:
        return []  # inspect_checkpoint will raise it
