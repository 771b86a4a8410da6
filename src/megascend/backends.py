"""The kinds of backend: each builds an engine, and has the methods of :class:`megascend.backend.Backend`."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import TypeIs

from megascend.backend import Backend
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
from megascend.config.registry import ENGINES, EngineEntry, load
from megascend.config.rules import Rule, enforce
from megascend.engines.context import EVERY_ENGINE, EngineContext, EngineSpec, Setup, engine_context
from megascend.engines.rules import MEGATRON, ON_TRANSFORMERS
from megascend.errors import ConfigError, TopologyError
from megascend.models.checkpoint_files.hub import snapshot
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.models.checkpoint_files.scalar_head import HeadKind
from megascend.models.selfcheck import process
from megascend.runtime.bootstrap.versions import PACKAGES
from megascend.runtime.distributed.launch import Launch

if TYPE_CHECKING:
    from megascend.engines.base import Engine
    from megascend.engines.megatron.graphed_steps import GraphReport
    from megascend.models.checkpoint_files.info import ModelInfo
    from megascend.models.selfcheck.process import Worker
    from megascend.runtime.bootstrap import Runtime
    from megascend.runtime.distributed.engine_groups import GroupFactory
    from megascend.runtime.topology.topology import Topology


def register_engine(
    name: str,
    backend: Callable[..., Backend],
    *,
    megatron: bool = False,
    packages: Sequence[str] = ("torch", "transformers"),
    always_pads: bool = False,
    contiguous: bool = False,
    memory: Literal["stages", "shards", "whole"] | None = None,
    second_model: bool = False,
) -> None:
    """Register an engine by name, for :func:`megascend.bootstrap`, :func:`make_backend` and run files (``engine: NAME``).

    Every rank registers it before the bootstrap, most simply when the module that defines it is imported; a run file names that
    module under ``plugins``. Registering it again changes nothing.

    Args:
        backend: a subclass of :class:`Backend`, or a function that returns one. Its parameters are the settings that it accepts,
            under :class:`MegatronBackend`'s names for them, including ``model``.
        megatron: it runs on Megatron-Core, so a provider patches the process for the platform. For others nothing is patched.
        packages: packages of the version table that must be installed in a tested version; with ``megatron`` the full table.
        always_pads: micro batches are padded whatever ``batching.packing`` is.
        contiguous: a context parallel rank holds consecutive tokens of a sequence; else two chunks, as in Megatron-Core.
        memory: formulas that estimate a rank's memory: of Megatron-Core's stages, FSDP2's shards or a whole model; None: none.
        second_model: its backend has :meth:`Backend.frozen_engine`.

    Raises:
        ConfigError: another engine has that name, or a package is not in the version table.
    """
    if unknown := sorted({*packages} - {*PACKAGES}):
        raise ConfigError(
            f"engine {name!r}: the version table has no {', '.join(unknown)}; it has {', '.join(PACKAGES)}"
        )
    ENGINES.add(name, EngineEntry(backend, megatron, tuple(packages), always_pads, contiguous, memory, second_model))


def accepted_settings(engine: str) -> frozenset[str]:
    """Return the names of the settings that an engine's backend accepts.

    Raises:
        ConfigError: the engine is not registered; the message lists those that are.
    """
    backend = _backend_of(engine)
    names = frozenset(signature(backend).parameters)
    # Built-in engines share one constructor, so its signature has settings that some engines do not support.
    return names - backend.unsupported_settings if _is_built_in(backend) else names


def applicable(engine: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` without those that an engine does not have and that are at their defaults."""
    names = accepted_settings(engine) | EngineSpec.changed(settings)
    return {name: value for name, value in settings.items() if name in names}


def make_backend(engine: str, **settings: Any) -> Backend:
    """Build the backend of an engine, by its name in run files.

    Args:
        settings: arguments of the backend's constructor.

    Raises:
        ConfigError: the engine is not registered, or it does not have one of these settings.
    """
    _refuse(engine, settings.keys() - accepted_settings(engine))
    return _backend_of(engine)(**settings)


def check_backend(
    engine: str, runtime: Runtime, topology: Topology, info: ModelInfo, model: Path, **settings: Any
) -> Sequence[str]:
    """Run the checks that a backend's constructor makes before it reads weights, in one process and without process groups.

    For external engines only the names of settings are checked. The self-check is not run.

    Args:
        runtime: this process, prepared for the engine.
        info: description of the checkpoint in ``model``.
        settings: arguments of the backend's constructor, without ``model``.

    Returns:
        The names of the layers that adapters could act on; empty without adapters, and for external engines.

    Raises:
        ConfigError, TopologyError, CheckpointError, VersionError: the engine does not support these settings.
    """
    _refuse(engine, settings.keys() - accepted_settings(engine))
    backend = _backend_of(engine)
    if _is_built_in(backend):
        # Class methods instead of the constructor, because a dry run has no process groups.
        spec = EngineSpec.of(model, settings)
        enforce((*EVERY_ENGINE, *backend.rules), Setup(engine, spec, runtime.platform, topology, info))
        backend._check_spec(spec, runtime, topology)
        if spec.adapters is None and spec.optimizer.by_weight:
            from megascend.engines.common.weight_settings import SettingsByWeight

            SettingsByWeight(spec.optimizer, info, spec.vision_tower)
        return backend._check_model(spec, runtime, topology, info)
    return []


def _is_built_in(backend: Callable[..., Backend]) -> TypeIs[type[EngineBackend]]:
    """Check whether a backend is built in, not registered by another package."""
    return isinstance(backend, type) and issubclass(backend, EngineBackend)


def _refuse(engine: str, settings: Collection[str]) -> None:
    if settings:
        raise ConfigError(
            f"engine {engine!r} has no setting {', '.join(sorted(settings))}; leave it out, or choose another engine"
        )


def _backend_of(engine: str) -> Callable[..., Backend]:
    return load(ENGINES.require(engine).backend)


class EngineBackend(Backend, ABC):
    """Backend of a built-in engine: one constructor for all of them.

    Attributes:
        engine_name: its name in run files.
        unsupported_settings: parameters of the constructor that this engine refuses.
        rules: values of the others that it refuses.
        shares_process: a process may hold several models of this engine.
    """

    engine_name: ClassVar[str]
    unsupported_settings: ClassVar[frozenset[str]]
    rules: ClassVar[Sequence[Rule[Setup]]] = ()
    shares_process: ClassVar[bool] = True

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
        *,
        provider_options: Mapping[str, bool | int | float | str | None] | None = None,
        platform: PlatformName = "auto",
        seed: int = 1234,
        timeout_s: float = 600.0,
        save_timeout_s: float = 1800.0,
        self_check: bool = True,
        provider: str | None = None,
        head: HeadKind = "lm",
        fsdp: Fsdp | None = None,
        mtp: Mtp = "keep",
        mtp_loss_weight: float = 0.1,
        vision_tower: VisionTower = "frozen",
    ) -> None:
        """Build the model, and the engine that trains it. Collective.

        Args:
            model: directory of a Hugging Face checkpoint with safetensors weights, or a name on the Hub, ``owner/name`` or
                ``owner/name@revision``, which is downloaded.

        The others are settings of :class:`megascend.EngineSpec`, under the names that run files have for them; None is the
        default. docs/api/backends.md has a table of them.

        Raises:
            ConfigError, TopologyError, CheckpointError, PlatformError, VersionError, ImportOrderError,
            CollectiveTimeoutError, SelfCheckError: before any training, on every rank.
        """
        settings = {
            "parallel": parallel, "precision": precision, "tf32": tf32, "optimizer": optimizer, "schedule": schedule,
            "recompute": recompute, "moe": moe, "batching": batching, "adapters": adapters,
            "provider_options": provider_options, "platform": platform, "seed": seed, "timeout_s": timeout_s,
            "save_timeout_s": save_timeout_s, "self_check": self_check, "provider": provider, "head": head, "fsdp": fsdp,
            "mtp": mtp, "mtp_loss_weight": mtp_loss_weight, "vision_tower": vision_tower,
        }  # fmt: skip
        # A setting at its default asks for nothing: a program changes its engine by its constructor's name.
        _refuse(self.engine_name, self.unsupported_settings & EngineSpec.changed(settings))
        spec = EngineSpec.of(model, settings)

        # The worker starts first: it imports its packages while this process imports Megatron.
        with self._self_check_worker(spec) as worker, self._context(spec) as context:
            engine = self._build(spec, context, worker)
        super().__init__(engine, context.model_dir, context.runtime.platform, spec.save_timeout_s)
        self._built_from = spec, context

    def frozen_engine(self, model: str | Path) -> Engine:
        if not self.shares_process:
            return super().frozen_engine(model)
        trained, context = self._built_from
        # Not the settings of training: an optimizer, for example, may be one that adapters do not have.
        spec = EngineSpec(
            model=snapshot(model),
            precision=trained.precision,
            batching=trained.batching,
            # Without an adapter these freeze the model, so that it has neither gradients nor moments.
            adapters=Adapters(max_count=1, max_rank=1),
            seed=trained.seed,
            self_check=trained.self_check,
            fsdp=trained.fsdp.model_copy(update={"compile": False}),
        )
        info = inspect_checkpoint(spec.model)
        setup = Setup(self.engine_name, spec, context.runtime.platform, context.topology, info)
        enforce((*EVERY_ENGINE, *self.rules), setup)
        self._check_spec(spec, context.runtime, context.topology)
        return self._build(spec, replace(context, info=info, model_dir=spec.model), None)

    @classmethod
    def _context(cls, spec: EngineSpec) -> AbstractContextManager[EngineContext]:
        """Return the context to build the engine in."""

        def prepare(runtime: Runtime, topology: Topology) -> GroupFactory | None:
            cls._check_spec(spec, runtime, topology)
            return cls._prepare(spec, runtime)

        return engine_context(cls.engine_name, spec, prepare, cls.rules)

    @classmethod
    @abstractmethod
    def _check_spec(cls, spec: EngineSpec, runtime: Runtime, topology: Topology) -> None:
        """Raise, before ranks communicate, if the engine does not support ``spec``."""

    @classmethod
    @abstractmethod
    def _check_model(cls, spec: EngineSpec, runtime: Runtime, topology: Topology, info: ModelInfo) -> list[str]:
        """Raise, without building the model, what building it would raise; return the names of adapter targets."""

    @classmethod
    def _prepare(cls, spec: EngineSpec, runtime: Runtime) -> GroupFactory | None:
        """Prepare the process for the engine, and return the factory of its process groups; None: plain torch groups."""
        return None

    @classmethod
    def _self_check_worker(cls, spec: EngineSpec) -> AbstractContextManager[Worker | None]:
        """Run a process for the self-check within the context, if this one cannot compute it."""
        return contextlib.nullcontext()

    @classmethod
    @abstractmethod
    def _build(cls, spec: EngineSpec, context: EngineContext, worker: Worker | None) -> Engine:
        """Build the engine. Collective."""


class MegatronBackend(EngineBackend):
    """A Hugging Face model, trained by Megatron-Core on all ranks of this world. Its methods are those of :class:`Backend`.

    All settings but ``fsdp`` are for this engine.
    """

    engine_name = "megatron"
    unsupported_settings = frozenset({"fsdp"})
    rules = MEGATRON
    shares_process = False  # its parallel state and its patches are one model's

    @classmethod
    def _check_spec(cls, spec: EngineSpec, runtime: Runtime, topology: Topology) -> None:
        runtime.check_batching(topology, spec.batching)
        runtime.load_megatron()

        # Imported here, as in the other engines: none needs the packages of another.
        from megascend.engines.megatron.build import check_architecture

        check_architecture(spec.model)

    @classmethod
    def _check_model(cls, spec: EngineSpec, runtime: Runtime, topology: Topology, info: ModelInfo) -> list[str]:
        from megascend.engines.megatron.configuration import check_model

        return check_model(spec, runtime, topology, info)

    @classmethod
    def _prepare(cls, spec: EngineSpec, runtime: Runtime) -> GroupFactory:
        from megascend.engines.megatron.groups import MegatronGroups, require_none_alive

        require_none_alive()  # first, so that nothing is patched under a backend that is in use
        return MegatronGroups()

    @classmethod
    @contextlib.contextmanager
    def _self_check_worker(cls, spec: EngineSpec) -> Iterator[Worker | None]:
        """Start a checking process on rank 0: it imports its packages while this one imports Megatron."""
        model_dir, max_length, worker = spec.model, spec.batching.max_length, None
        # Worth it only while this process still has to import Megatron; otherwise the check starts its own process later.
        if spec.self_check and "megatron.core" not in sys.modules and Launch.from_environment().rank == 0:
            # On rank 0 only, which sends its verdict to the others: the check costs a process and seconds of CPU time.
            worker = process.start_worker(model_dir, max_length)
        if worker is None:
            yield None
            return
        with worker:
            yield worker
        # Reached only if the engine was built.
        process.mark_checked(model_dir, max_length)

    @classmethod
    def _build(cls, spec: EngineSpec, context: EngineContext, worker: Worker | None) -> Engine:
        from megascend.engines.megatron.engine import MegatronEngine

        return MegatronEngine(spec, context, worker)

    @property
    def cuda_graphs(self) -> GraphReport | None:
        """Report of ``batching.cuda_graphs``: micro batches captured, replayed and run eagerly; None without that setting."""
        graphs = self.engine.graphs  # type: ignore[attr-defined]
        return None if graphs is None else graphs.report()


class FsdpBackend(EngineBackend):
    """A Hugging Face model, trained by transformers and FSDP2 on all ranks. Its methods are those of :class:`Backend`.

    For architectures that mcore-bridge does not know, for work on plain transformers models, and where tensor and pipeline
    parallelism are not needed. No Megatron is imported. docs/fsdp.md lists what works, with its tests, and what does not.
    Each rank reads only its own rows of the model's files. Parameters are sharded over all ranks, experts over the ranks that
    expert parallelism leaves; shards, gradient sums and moments are fp32, but with ``adapters`` the frozen model's shards have
    ``precision``. The settings of ``optimizer`` that divide work over ranks have no effect.

    The settings ``provider`` and ``provider_options`` do not exist here. ``parallel`` supports ``context`` with
    ``context_algorithm`` ``ulysses``, and ``expert``; ``recompute.granularity`` is ``none``, ``full`` (layer by layer) or
    ``selective`` (by operators); ``moe`` does not update correction biases.
    """

    engine_name = "fsdp"
    unsupported_settings = frozenset({"provider", "provider_options"})
    _sharded: ClassVar[bool] = True
    rules = ON_TRANSFORMERS

    @classmethod
    def _check_spec(cls, spec: EngineSpec, runtime: Runtime, topology: Topology) -> None:
        from megascend.engines.fsdp import sharding, transformers_api

        transformers_api.check_version()
        sharding.check_layout(topology)
        # Called for what it raises: a layout without a mesh is refused before ranks communicate.
        sharding.mesh_ranks(topology.world_size, spec.fsdp.replicate, topology.expert)

    @classmethod
    def _check_model(cls, spec: EngineSpec, runtime: Runtime, topology: Topology, info: ModelInfo) -> list[str]:
        from megascend.engines.fsdp.engine import check_model

        return check_model(spec, info, topology, runtime.platform.name, sharded=cls._sharded)

    @classmethod
    def _prepare(cls, spec: EngineSpec, runtime: Runtime) -> GroupFactory:
        from megascend.engines.fsdp import sharding, transformers_api

        if runtime.platform.name == "npu":
            transformers_api.use_grouped_operator()
        return sharding.FsdpGroups(spec.fsdp.replicate)

    @classmethod
    def _build(cls, spec: EngineSpec, context: EngineContext, worker: Worker | None) -> Engine:
        from megascend.engines.fsdp.engine import FsdpEngine

        return FsdpEngine(spec, context, sharded=cls._sharded)


class SingleBackend(FsdpBackend):
    """A Hugging Face model, trained by transformers in a single process. Its methods are those of :class:`Backend`.

    For laptops, examples, and as a reference in tests: no Megatron is imported, and nothing in the process is patched. This is
    :class:`FsdpBackend` on one rank, with an unsharded model and transformers' own attention, so that it trains architectures
    that engine fsdp refuses. Micro batches are padded whatever ``batching.packing`` is: packed rows are exact only with some
    attention implementations. The settings of ``optimizer`` that divide work over ranks have no effect.

    All sizes of ``parallel`` are 1. The settings ``provider``, ``provider_options`` and ``fsdp`` do not exist here.
    """

    engine_name = "single"
    unsupported_settings = frozenset({"provider", "provider_options", "fsdp"})
    _sharded = False

    @classmethod
    def _check_spec(cls, spec: EngineSpec, runtime: Runtime, topology: Topology) -> None:
        if topology.world_size != 1:
            raise TopologyError(
                f"engine single runs in one process, but {topology.world_size} were started (WORLD_SIZE); start one, or use "
                "engine megatron or fsdp"
            )
        super()._check_spec(spec, runtime, topology)
