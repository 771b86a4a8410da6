"""EngineSpec, an engine's settings, and EngineContext: the process, checkpoint, layout and groups that it is built on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from megascend.config import Adapters, BaseWeights, Checkpoint
from megascend.config.rules import Rule, enforce
from megascend.config.training import MEASURED_BUDGET, EngineSettings, optimizer_of_adapters
from megascend.errors import CheckpointError
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
from megascend.runtime.platforms.base import Platform
from megascend.runtime.topology.topology import Topology, plan
from megascend.surroundings import announce

logger = logging.getLogger(__name__)


class EngineSpec(EngineSettings):
    """Settings of a backend, and of the engine that it builds: those of run files, and those that only programs set.

    Every engine uses some of them.
    """

    tf32: bool | None = Field(
        None, description="as for megascend.bootstrap, which is called if it has not been; CUDA only"
    )
    adapters: Adapters | None = Field(
        None,
        description="freeze the model and train LoRA adapters on it (add_adapter); optimizer and schedule are then each "
        "adapter's, unless it has its own",
    )
    head: HeadKind = Field(
        "lm",
        description="the model's last layer: lm, logits; scalar, the head of a reward model or critic, from a checkpoint of "
        "transformers' ...ForSequenceClassification or ...ForTokenClassification with one label; new_sequence_classifier or "
        "new_token_classifier, a new one in place of a causal language model's output layer, initialised from seed as in "
        "transformers; reward_model, the checkpoint's scalar head where it has one, else a new sequence classifier's; a "
        "megascend.Classification, likewise the head of a sequence classifier with its labels",
    )
    save_timeout_s: float = Field(
        Checkpoint.model_fields["timeout_s"].default,
        gt=0,
        description="seconds that a call waits for a checkpoint to be written before the save counts as failed",
    )

    rules = (
        MEASURED_BUDGET,
        optimizer_of_adapters("optimizer with adapters", lambda s: s.optimizer if s.adapters is not None else None),
    )

    @property
    def base_weights(self) -> BaseWeights:
        """Return the format of a frozen model's weights."""
        return "unquantised" if self.adapters is None else self.adapters.base_weights

    @classmethod
    def changed(cls, settings: Mapping[str, Any]) -> set[str]:
        """Return the names of the settings that are not at their defaults, for which None stands, too."""
        return {name for name, value in settings.items() if value not in (None, cls.model_fields[name].default)}

    @classmethod
    def of(cls, model: str | Path, settings: Mapping[str, Any]) -> EngineSpec:
        """Build the spec from settings by field name; None means the default. A name on the Hub is downloaded.

        Raises:
            ConfigError: a setting is unknown, or has none of its possible values.
        """
        chosen = {name: value for name, value in settings.items() if value is not None}
        spec = cls(model=Path(model), **chosen)
        return spec.model_copy(update={"model": snapshot(model)})


@dataclass(frozen=True)
class Setup:
    """Settings, device, layout and model of an engine that is about to be built, on which rules are evaluated."""

    engine: str
    spec: EngineSpec
    platform: Platform
    topology: Topology
    info: ModelInfo

    @property
    def model(self) -> str:
        """Return the type of the model."""
        return self.info.architecture.model_type

    @property
    def frozen(self) -> bool:
        """Return True if adapters are trained in place of the model."""
        return self.spec.adapters is not None

    def __getitem__(self, key: str) -> Any:
        """Return a setting by its key, or an attribute by its name."""
        first, *rest = key.split(".")
        value = getattr(self, first) if hasattr(self, first) else getattr(self.spec, first)
        for name in rest:
            value = getattr(value, name)
        return value


EVERY_ENGINE: tuple[Rule[Setup], ...] = (
    Rule(
        "vision_tower with {model}: it has no vision tower; leave it out",
        lambda s: s.spec.vision_tower == "train" and s.info.image_layout is None,
    ),
    Rule(
        "head with {model}: a scalar head on a model that takes images is not supported; leave it out",
        lambda s: s.info.image_layout is not None and s.info.scalar_head is not None,
    ),
    Rule(
        "adapters with a token classifier: an adapter stores neither its head's bias nor its dropout; leave "
        "adapters out",
        lambda s: s.frozen and s.info.scalar_head is not None and s.info.scalar_head.unit == "token",
    ),
)
"""Settings that no engine supports with a model."""
UNQUANTISED: Rule[Setup] = Rule(
    "base_weights with engine {engine}: only engine megatron quantises a frozen "
    "model; leave it out, or set engine: megatron",
    lambda s: s.spec.base_weights != "unquantised",
)


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

Called before ranks communicate: rejects checkpoints and layouts that the engine does not support, and imports its packages.
"""


@contextmanager
def engine_context(
    engine: str,
    spec: EngineSpec,
    prepare: Prepare = lambda runtime, topology: None,
    rules: Sequence[Rule[Setup]] = (UNQUANTISED,),
) -> Iterator[EngineContext]:
    """Yield the context to build an engine in; if the block raises, the process groups are destroyed. Collective.

    Args:
        engine: the name under which it is registered.
        spec: its settings.
        prepare: called before ranks communicate.
        rules: settings that the engine does not support.

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
        enforce((*EVERY_ENGINE, *rules), Setup(engine, spec, runtime.platform, topology, info))
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
