"""The kinds of backend: each builds an engine, and has the verbs of :class:`megascend.backend.Backend`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from megascend.backend import Backend
from megascend.bootstrap import bootstrap
from megascend.config import Adam, Adapters, Batching, Moe, Parallel, PlatformName, Precision, Recompute, Schedule
from megascend.distributed.launch import Launch
from megascend.errors import ConfigError, TopologyError
from megascend.huggingface.info import inspect_checkpoint
from megascend.topology.topology import plan


def make_backend(engine: str, **settings: Any) -> Backend:
    """The backend of an engine, by the name that run files have for it.

    Args:
        settings: of the backend's constructor.

    Raises:
        ConfigError: there is no such engine, or it has no setting of one of these names.
    """
    if engine not in KINDS:
        raise ConfigError(f"engine: there is no {engine!r}; there are {', '.join(KINDS)}")
    kind = KINDS[engine]
    unknown = sorted(settings.keys() - signature(kind).parameters.keys())
    if unknown:
        raise ConfigError(
            f"engine {engine!r} has no setting {', '.join(unknown)}; leave it out, or choose another engine"
        )
    return kind(**settings)


class MegatronBackend(Backend):
    """A Hugging Face model, trained by Megatron-Core on all ranks of this world. The verbs: :class:`Backend`.

    Args:
        model: directory of a Hugging Face checkpoint with safetensors weights.
        parallel: how the ranks divide the work; data parallelism takes what is left of the world size.
        precision: ``fp32``, ``fp16`` or ``bf16``, for parameters, activations and pipeline messages. Main parameters,
            gradients and moments are fp32 in every case.
        tf32: as for :func:`megascend.bootstrap`, which is called if it has not been.
        optimizer, schedule, recompute, moe, batching: see :mod:`megascend.config`.
        adapters: freeze the model and train LoRA adapters on it (:meth:`add_adapter`); optimizer and schedule are then
            each adapter's, unless it has its own.
        provider_options: settings of the provider's own, beside those that follow from the model and the layout.
        platform: as for :func:`megascend.bootstrap`, which is called if it has not been.
        seed: of dropout and everything else that is random.
        timeout_s: seconds after which a missing rank is an error on all others.
        save_timeout_s: seconds after which a checkpoint that is waited for and still being written counts as failed.
        self_check: hold a small slice of the model against transformers first (docs/limits.md); a few seconds, once for a
            configuration.
        provider: as for :func:`megascend.bootstrap`.
        mindspeed: the earlier name of ``provider_options``.

    Raises:
        ConfigError, TopologyError, CheckpointError, PlatformError, VersionError, ImportOrderError,
        CollectiveTimeoutError, SelfCheckError: before any training, on every rank.
    """

    def __init__(
        self,
        model: str | Path,
        parallel: Parallel | None = None,
        precision: Precision = "bf16",
        tf32: bool | None = None,
        optimizer: Adam | None = None,
        schedule: Schedule | None = None,
        recompute: Recompute | None = None,
        moe: Moe | None = None,
        batching: Batching | None = None,
        adapters: Adapters | None = None,
        provider_options: Mapping[str, bool | int | float | str | None] | None = None,
        platform: PlatformName = "auto",
        seed: int = 1234,
        timeout_s: float = 600.0,
        save_timeout_s: float = 1800.0,
        self_check: bool = True,
        provider: str | None = None,
        mindspeed: Mapping[str, bool | int | float | str | None] | None = None,
    ) -> None:
        if mindspeed is not None:
            warnings.warn("mindspeed= is now called provider_options=", FutureWarning, stacklevel=2)
            if provider_options is not None:
                raise ConfigError("mindspeed= is now called provider_options=, and both are given: leave mindspeed out")
            provider_options = mindspeed
        if precision not in ("fp32", "fp16", "bf16"):
            raise ConfigError(f"precision must be fp32, fp16 or bf16, got {precision!r}")
        layout, batches = parallel or Parallel(), batching or Batching()
        runtime = bootstrap(platform, layout, tf32, "megatron", precision, provider)
        model_dir = Path(model)
        info = inspect_checkpoint(model_dir)
        launch = Launch.from_environment()
        topology = plan(layout, launch.world_size, info.shape)
        runtime.check_batching(topology, batches)
        runtime.load_megatron()

        from megascend.distributed import process_groups
        from megascend.engines.megatron.architecture import check_architecture
        from megascend.engines.megatron.engine import MegatronEngine
        from megascend.engines.megatron.groups import MegatronGroups, require_none_alive

        check_architecture(model_dir)
        require_none_alive()  # before anything is patched under a backend that is in use
        runtime.configure_topology(topology, timeout_s)
        groups = process_groups.initialize(topology, runtime.platform, timeout_s, launch, MegatronGroups())
        try:
            if precision == "fp32" and not runtime.tf32:
                runtime.platform.check_products()
            with groups.monitor.phase("build"):
                engine = MegatronEngine(
                    runtime,
                    topology,
                    groups,
                    info,
                    model_dir,
                    precision=precision,
                    adam=optimizer or Adam(),
                    schedule=schedule or Schedule(),
                    recompute=recompute or Recompute(),
                    moe=moe or Moe(),
                    batching=batches,
                    adapters=adapters,
                    provider_options=provider_options or {},
                    seed=seed,
                    self_check=self_check,
                )
        except BaseException:
            groups.destroy()  # so that another attempt in this process finds none left over
            raise
        super().__init__(engine, model_dir, runtime.platform, save_timeout_s)

    @property
    def self_check(self) -> Any:
        """What the check of the model's configuration against transformers found
        (:class:`megascend.selfcheck.verdict.Verdict`)."""
        return self.engine.self_check  # type: ignore[attr-defined]


class SingleBackend(Backend):
    """A Hugging Face model, trained by transformers in this process alone. The verbs: :class:`Backend`.

    For laptops, examples, and as a reference in tests: no Megatron is imported, and nothing in the process is patched. Micro
    batches are padded whatever ``batching.packing`` says. Adapters are applied by peft, one at a time: micro batches of
    several adapters run one after the other. The settings of ``optimizer`` that divide work over ranks have no effect.

    Args:
        model: directory of a Hugging Face checkpoint with safetensors weights.
        precision, optimizer, schedule, adapters, seed, timeout_s, save_timeout_s: as for :class:`MegatronBackend`.
        tf32, platform: as for :func:`megascend.bootstrap`, which is called for this engine if it has not been.
        recompute: ``granularity`` ``none`` or ``full``.
        moe: ``aux_loss`` ``none`` or ``transformers``.
        batching: see :mod:`megascend.config`.

    Raises:
        ConfigError, TopologyError, CheckpointError, PlatformError, VersionError: before any training.
    """

    def __init__(
        self,
        model: str | Path,
        precision: Precision = "bf16",
        tf32: bool | None = None,
        optimizer: Adam | None = None,
        schedule: Schedule | None = None,
        recompute: Recompute | None = None,
        moe: Moe | None = None,
        batching: Batching | None = None,
        adapters: Adapters | None = None,
        platform: PlatformName = "auto",
        seed: int = 1234,
        timeout_s: float = 600.0,
        save_timeout_s: float = 1800.0,
    ) -> None:
        if precision not in ("fp32", "fp16", "bf16"):
            raise ConfigError(f"precision must be fp32, fp16 or bf16, got {precision!r}")
        runtime = bootstrap(platform, None, tf32, "single", precision)
        model_dir = Path(model)
        info = inspect_checkpoint(model_dir)
        launch = Launch.from_environment()
        if launch.world_size != 1:
            raise TopologyError(
                f"engine single runs in one process, but {launch.world_size} were started (WORLD_SIZE); start one, or use "
                "MegatronBackend"
            )
        topology = plan(Parallel(), 1, info.shape)

        from megascend.distributed import process_groups
        from megascend.engines.single.engine import SingleEngine

        groups = process_groups.initialize(topology, runtime.platform, timeout_s, launch)
        try:
            if precision == "fp32" and not runtime.tf32:
                runtime.platform.check_products()
            with groups.monitor.phase("build"):
                engine = SingleEngine(
                    topology,
                    groups,
                    info,
                    model_dir,
                    precision=precision,
                    adam=optimizer or Adam(),
                    schedule=schedule or Schedule(),
                    recompute=recompute or Recompute(),
                    moe=moe or Moe(),
                    batching=batching or Batching(),
                    adapters=adapters,
                    seed=seed,
                )
        except BaseException:
            groups.destroy()
            raise
        super().__init__(engine, model_dir, runtime.platform, save_timeout_s)


KINDS: dict[str, Callable[..., Backend]] = {"megatron": MegatronBackend, "single": SingleBackend}
"""By the names of their engines. A backend of your own is added here, and its engine with ``megascend.register_engine``."""
