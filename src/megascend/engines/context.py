"""EngineSpec, an engine's settings, and EngineContext: the process, checkpoint, layout and groups that it is built on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from megascend.bootstrap import Runtime, bootstrap
from megascend.config import (
    Adam,
    Adapters,
    Batching,
    Fsdp,
    Moe,
    Mtp,
    Parallel,
    PlatformName,
    Precision,
    Recompute,
    Schedule,
    VisionTower,
)
from megascend.distributed import process_groups
from megascend.distributed.engine_groups import GroupFactory
from megascend.distributed.groups import LEAVE_S
from megascend.distributed.launch import Launch
from megascend.distributed.process_groups import ProcessGroups
from megascend.errors import CheckpointError, ConfigError
from megascend.huggingface.files import weight_files
from megascend.huggingface.info import ModelInfo, inspect_checkpoint
from megascend.huggingface.read_ahead import read_ahead
from megascend.huggingface.scalar_head import HeadKind
from megascend.topology.topology import Topology, plan

logger = logging.getLogger(__name__)

SECTIONS = {
    "parallel": Parallel,
    "optimizer": Adam,
    "schedule": Schedule,
    "recompute": Recompute,
    "moe": Moe,
    "batching": Batching,
    "adapters": Adapters,
    "fsdp": Fsdp,
}
"""Settings of an engine that have a class of their own."""


@dataclass(frozen=True)
class EngineSpec:
    """Settings of an engine; every engine uses some of them.

    Attributes:
        model: directory of a Hugging Face checkpoint with safetensors weights.
        parallel: parallel sizes; the data parallel size is the world size divided by their product.
        precision: ``fp32``, ``fp16`` or ``bf16``, for parameters and activations.
        tf32, platform, provider: as for :func:`megascend.bootstrap`.
        optimizer, schedule, recompute, moe, batching, fsdp: see :mod:`megascend.config`.
        adapters: freeze the model and train LoRA adapters on it; None: train the model.
        provider_options: further settings of the provider, beside those derived from the model and the layout.
        seed: seed of dropout and all other random numbers.
        timeout_s: seconds after which a missing rank is an error on all others.
        self_check: compare a small slice of the model with transformers first.
        head: ``lm``, or the kind of scalar head, or its labels; see :data:`megascend.huggingface.scalar_head.HeadKind`.
        mtp: ``train`` heads for multi-token prediction, ``keep`` them as they are, or ``drop`` them.
        mtp_loss_weight: factor of the loss of such a head.
        vision_tower: ``train`` if a vision tower is trained, or adapters may act on it; else ``frozen``.
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
    mtp: Mtp = "keep"
    mtp_loss_weight: float = 0.1
    vision_tower: VisionTower = "frozen"
    provider: str | None = None
    provider_options: Mapping[str, bool | int | float | str | None] = field(default_factory=dict)
    fsdp: Fsdp = field(default_factory=Fsdp)

    @classmethod
    def of(cls, model: str | Path, settings: Mapping[str, Any]) -> EngineSpec:
        """Build the spec from settings by field name; None means the default.

        Raises:
            ConfigError: a section is of another type, such as a dict or an optimizer of torch.
        """
        for name, kind in SECTIONS.items():
            value = settings.get(name)
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{name}: megascend.{kind.__name__}(...) is expected here (got {value!r:.200})")
        return cls(Path(model), **{name: value for name, value in settings.items() if value is not None})


@dataclass(frozen=True)
class EngineContext:
    """Process, layout, groups and checkpoint that an engine is built on.

    Attributes:
        runtime: this process, prepared for the engine.
        topology, groups: rank arithmetic and process groups.
        info: description of the checkpoint in ``model_dir``.
        factory: created the engine's groups; None: plain torch groups.
    """

    runtime: Runtime
    topology: Topology
    groups: ProcessGroups
    info: ModelInfo
    model_dir: Path
    factory: GroupFactory | None = None


Prepare = Callable[[Runtime, Topology, Path], GroupFactory | None]
"""(runtime, topology, checkpoint directory) -> factory of the engine's groups; None: plain torch groups.

Called before ranks communicate: rejects settings that the engine does not support, and imports the packages that it needs.
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
    mtp: Mtp = "keep",
) -> Iterator[EngineContext]:
    """Yield the context to build an engine in; if the block raises, the process groups are destroyed. Collective.

    Args:
        engine: the name under which it is registered.
        model: directory of a Hugging Face checkpoint with safetensors weights.
        precision: ``fp32``, ``fp16`` or ``bf16``.
        platform: as for :func:`megascend.bootstrap`, which is called if it has not been.
        tf32: as for :func:`megascend.bootstrap`.
        provider: as for :func:`megascend.bootstrap`.
        parallel: parallel sizes; default: data parallelism only.
        timeout_s: seconds after which a missing rank is an error on all others.
        prepare: called before ranks communicate.
        head: the model's last layer: logits (``lm``), the scalar head of its checkpoint (``scalar``), or a new one in place of
            a causal language model's output layer (``new_sequence_classifier``, ``new_token_classifier``); ``reward_model`` is
            the checkpoint's scalar head where it has one, else a new sequence classifier's; a ``Classification`` likewise the
            head of a sequence classifier with its labels.
        mtp: treatment of heads for multi-token prediction; see :class:`EngineSpec`.

    Raises:
        MegascendError: the settings, the checkpoint, the platform or the installed versions do not fit, or a rank is missing.
    """
    if precision not in get_args(Precision):
        raise ConfigError(f"precision must be fp32, fp16 or bf16, got {precision!r}")
    if mtp not in get_args(Mtp):
        raise ConfigError(f"mtp must be train, keep or drop, got {mtp!r}")
    layout, model_dir = parallel or Parallel(), Path(model)
    launch = Launch.from_environment()
    # Prefetched while packages are imported and ranks connect.
    with read_ahead(_weights(model_dir, launch), launch.local_rank, launch.local_size):
        runtime = bootstrap(platform, parallel=layout, tf32=tf32, engine=engine, precision=precision, provider=provider)
        info = inspect_checkpoint(model_dir, head, mtp)
        if info.quantised is not None and launch.rank == 0:
            logger.warning(
                "%s is quantised (%s): it is trained and exported dequantised, in the dtype of precision: %s",
                model_dir,
                info.quantised,
                precision,
            )
        topology = plan(layout, launch.world_size, info.shape)
        # Settings and packages are checked before ranks connect: a rank that failed later would keep the others waiting.
        factory = prepare(runtime, topology, model_dir)
        runtime.configure_topology(topology, timeout_s)
        groups = process_groups.initialize(topology, runtime.platform, timeout_s, launch, factory)
        try:
            # cuBLAS reads the TF32 switch when it is loaded, perhaps before the bootstrap: verify with a product.
            if precision == "fp32" and not runtime.tf32:
                runtime.platform.check_products()
            with groups.monitor.phase("build"):
                yield EngineContext(runtime, topology, groups, info, model_dir, factory)
        except BaseException:
            groups.destroy(LEAVE_S)
            raise


def _weights(model_dir: Path, launch: Launch) -> list[Path]:
    """Return the weight files to prefetch; none with several hosts, since a host may read only a part of them."""
    if launch.local_size != launch.world_size:
        return []
    try:
        return [path for path in weight_files(model_dir) if path.is_file()]
    except CheckpointError:
        return []  # inspect_checkpoint will raise it
