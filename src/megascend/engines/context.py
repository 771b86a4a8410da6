"""EngineSpec, an engine's settings, and EngineContext: the process, checkpoint, layout and groups that it is built on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from megascend.config import (
    Adam,
    Adapters,
    BaseWeights,
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
from megascend.config.training import precision_name
from megascend.errors import CheckpointError, ConfigError
from megascend.models.checkpoint_files.files import weight_files
from megascend.models.checkpoint_files.hub import snapshot
from megascend.models.checkpoint_files.info import ModelInfo, inspect_checkpoint
from megascend.models.checkpoint_files.read_ahead import read_ahead
from megascend.models.checkpoint_files.scalar_head import HeadKind
from megascend.runtime.bootstrap import Runtime, bootstrap
from megascend.runtime.distributed import process_groups
from megascend.runtime.distributed.engine_groups import GroupFactory
from megascend.runtime.distributed.groups import LEAVE_S
from megascend.runtime.distributed.launch import Launch
from megascend.runtime.distributed.process_groups import ProcessGroups
from megascend.runtime.topology.topology import Topology, plan
from megascend.surroundings import announce

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
    """Settings of an engine, those of :class:`megascend.MegatronBackend` under the same names; every engine uses some of them.

    Raises:
        ConfigError: a setting has none of its possible values.
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

    def __post_init__(self) -> None:
        for name, kind in (("precision", Precision), ("mtp", Mtp), ("vision_tower", VisionTower)):
            value, (*first, last) = getattr(self, name), get_args(kind)
            if value not in get_args(kind):
                raise ConfigError(f"{name} must be {', '.join(first)} or {last}, got {value!r}")

    @property
    def base_weights(self) -> BaseWeights:
        """Return the format of a frozen model's weights."""
        return "unquantised" if self.adapters is None else self.adapters.base_weights

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
        chosen = {name: value for name, value in settings.items() if value is not None}
        return cls(snapshot(model), **chosen | {"precision": precision_name(chosen.get("precision", cls.precision))})


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


Prepare = Callable[[Runtime, Topology], GroupFactory | None]
"""(runtime, topology) -> factory of the engine's groups; None: plain torch groups.

Called before ranks communicate: rejects settings that the engine does not support, and imports the packages that it needs.
"""


@contextmanager
def engine_context(
    engine: str, spec: EngineSpec, prepare: Prepare = lambda runtime, topology: None
) -> Iterator[EngineContext]:
    """Yield the context to build an engine in; if the block raises, the process groups are destroyed. Collective.

    Args:
        engine: the name under which it is registered.
        spec: its settings.
        prepare: called before ranks communicate.

    Raises:
        MegascendError: the settings, the checkpoint, the platform or the installed versions do not fit, or a rank is missing.
    """
    launch = Launch.from_environment()
    # Prefetched while packages are imported and ranks connect.
    with read_ahead(_weights(spec.model, launch), launch.local_rank, launch.local_size):
        runtime = bootstrap(
            spec.platform,
            parallel=spec.parallel,
            tf32=spec.tf32,
            engine=engine,
            provider=spec.provider,
        )
        info = inspect_checkpoint(spec.model, spec.head, spec.mtp)
        if info.quantised is not None and launch.rank == 0:
            logger.warning(
                "%s is quantised (%s): it is trained and exported dequantised, in the dtype of precision: %s",
                spec.model,
                info.quantised,
                spec.precision,
            )
        topology = plan(spec.parallel, launch.world_size, info.shape)
        # Settings and packages are checked before ranks connect: a rank that failed later would keep the others waiting.
        factory = prepare(runtime, topology)
        runtime.configure_topology(topology, spec.timeout_s)
        if launch.world_size > 1:
            announce(f"connecting {launch.world_size} ranks")
        groups = process_groups.initialize(topology, runtime.platform, spec.timeout_s, launch, factory)
        try:
            # cuBLAS reads the TF32 switch when it is loaded, perhaps before the bootstrap: verify with a product.
            if spec.precision == "fp32" and not runtime.tf32:
                runtime.platform.check_products()
            announce(f"building the model of {spec.model} on engine {engine}")
            with groups.monitor.phase("build"):
                yield EngineContext(runtime, topology, groups, info, spec.model, factory)
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
