"""The kinds of backend: each builds an engine, and has the methods of :class:`megascend.backend.Backend`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.backend import Backend
from megascend.bootstrap import engines
from megascend.config import Adam, Adapters, Batching, Fsdp, Moe, Parallel, PlatformName, Precision, Recompute, Schedule
from megascend.distributed.launch import Launch
from megascend.engines.context import engine_context
from megascend.errors import ConfigError, TopologyError
from megascend.huggingface.scalar_head import HeadKind
from megascend.selfcheck import standing_by

if TYPE_CHECKING:
    from megascend.bootstrap import Runtime
    from megascend.engines.megatron.graphed_steps import GraphReport
    from megascend.selfcheck.process import Worker
    from megascend.topology.topology import Topology


def register_engine(
    name: str,
    backend: Callable[..., Backend],
    *,
    megatron: bool = False,
    packages: Sequence[str] = ("torch", "transformers"),
) -> None:
    """Make an engine known by its name, to :func:`megascend.bootstrap`, :func:`make_backend` and run files (``engine: NAME``).

    Every rank registers it before the bootstrap, most simply where the module that defines it is imported; a run file names that
    module under ``plugins``. Registering it again changes nothing.

    Args:
        backend: a subclass of :class:`Backend`, or a function that returns one. Its parameters are the settings that it knows, by
            the names that :class:`MegatronBackend` has for them, ``model`` among them.
        megatron: it runs on Megatron-Core, so a provider patches what the platform needs for it. For others nothing is patched.
        packages: of the version table, those that have to be installed in a version that was seen to work; with ``megatron`` all
            of it.

    Raises:
        ConfigError: another engine has that name, or a package is not in the version table.
    """
    if _backends.get(name, backend) is not backend:
        raise ConfigError(f"register_engine: another engine is called {name!r}; names in use: {', '.join(_backends)}")
    engines.register(name, megatron, packages)
    _backends[name] = backend


def settings_of(engine: str) -> frozenset[str]:
    """Names of the settings that an engine's backend knows.

    Raises:
        ConfigError: there is no such engine; the message lists those there are.
    """
    return frozenset(signature(_backend_of(engine)).parameters)


def make_backend(engine: str, **settings: Any) -> Backend:
    """The backend of an engine, by the name that run files have for it.

    Args:
        settings: of the backend's constructor.

    Raises:
        ConfigError: there is no such engine, or it has no setting of one of these names.
    """
    _refuse_unknown(engine, settings)
    return _backend_of(engine)(**settings)


def check_backend(engine: str, runtime: Runtime, topology: Topology, model: Path, **settings: Any) -> None:
    """Raise what a backend's constructor would raise before ranks meet. Of engines from outside, only their settings are known.

    Args:
        runtime: this process, prepared for the engine.
        settings: of the backend's constructor, without ``model``.

    Raises:
        ConfigError, TopologyError, CheckpointError, VersionError: the engine cannot do what they ask for.
    """
    _refuse_unknown(engine, settings)
    if engine in _checks:
        _checks[engine](runtime, topology, model, **settings)


def _refuse_unknown(engine: str, settings: Mapping[str, Any]) -> None:
    unknown = sorted(settings.keys() - settings_of(engine))
    if unknown:
        raise ConfigError(
            f"engine {engine!r} has no setting {', '.join(unknown)}; leave it out, or choose another engine"
        )


def _backend_of(engine: str) -> Callable[..., Backend]:
    if engine not in _backends:
        raise ConfigError(
            f"engine: there is no {engine!r}; there are {', '.join(_backends)}. Register yours on every rank "
            "(megascend.register_engine; a run file names the module under plugins)"
        )
    return _backends[engine]


class MegatronBackend(Backend):
    """A Hugging Face model, trained by Megatron-Core on all ranks of this world. Its methods are those of :class:`Backend`.

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
        self_check: compare a small slice of the model with transformers first (docs/limits.md); a few seconds, once for a
            configuration.
        provider: as for :func:`megascend.bootstrap`.
        head: what the model ends with: ``lm``, logits; ``scalar``, the head of a reward model or critic, from a checkpoint of
            transformers' ``...ForSequenceClassification`` or ``...ForTokenClassification`` with one label; or, in place of a
            causal language model's output layer, a new one of these (``new_sequence_classifier``, ``new_token_classifier``),
            drawn from ``seed`` as transformers draws it.

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
        head: HeadKind = "lm",
    ) -> None:
        batches = _with_number(batching)

        def prepare(runtime: Runtime, topology: Topology, model_dir: Path) -> Any:
            _check_megatron(runtime, topology, model_dir, batching=batches)

            from megascend.engines.megatron.groups import MegatronGroups, require_none_alive

            require_none_alive()  # before anything is patched under a backend that is in use
            return MegatronGroups()

        checking = _checking(Path(model), batches.max_length, self_check)
        context_of_engine = engine_context(
            "megatron",
            model,
            precision=precision,
            platform=platform,
            tf32=tf32,
            parallel=parallel,
            provider=provider,
            timeout_s=timeout_s,
            prepare=prepare,
            head=head,
        )
        with checking as checker, context_of_engine as context:
            from megascend.engines.megatron.engine import MegatronEngine

            engine = MegatronEngine(
                context.runtime,
                context.topology,
                context.groups,
                context.info,
                context.model_dir,
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
                checker=checker,
            )
        super().__init__(engine, context.model_dir, context.runtime.platform, save_timeout_s)

    @property
    def cuda_graphs(self) -> GraphReport | None:
        """What ``batching.cuda_graphs`` has captured, replayed and left alone so far; None without that setting."""
        graphs = self.engine.graphs  # type: ignore[attr-defined]
        return None if graphs is None else graphs.report()


class SingleBackend(Backend):
    """A Hugging Face model, trained by transformers in this process alone. Its methods are those of :class:`Backend`.

    For laptops, examples, and as a reference in tests: no Megatron is imported, and nothing in the process is patched. Micro
    batches are padded whatever ``batching.packing`` says. Adapters are applied by peft, one at a time: micro batches of
    several adapters run one after the other. The settings of ``optimizer`` that divide work over ranks have no effect.

    Args:
        model: directory of a Hugging Face checkpoint with safetensors weights.
        precision, optimizer, schedule, adapters, seed, timeout_s, save_timeout_s, self_check, head: as for
            :class:`MegatronBackend`.
        tf32, platform: as for :func:`megascend.bootstrap`, which is called for this engine if it has not been.
        recompute: ``granularity`` ``none`` or ``full``.
        moe: ``aux_loss`` ``none`` or ``transformers``.
        batching: see :mod:`megascend.config`.

    Raises:
        ConfigError, TopologyError, CheckpointError, PlatformError, VersionError, SelfCheckError: before any training.
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
        self_check: bool = True,
        head: HeadKind = "lm",
    ) -> None:
        batches = _with_number(batching)
        with engine_context(
            "single",
            model,
            precision=precision,
            platform=platform,
            tf32=tf32,
            timeout_s=timeout_s,
            prepare=_one_process,
            head=head,
        ) as context:
            from megascend.engines.single.engine import SingleEngine

            engine = SingleEngine(
                context.topology,
                context.groups,
                context.info,
                context.model_dir,
                precision=precision,
                adam=optimizer or Adam(),
                schedule=schedule or Schedule(),
                recompute=recompute or Recompute(),
                moe=moe or Moe(),
                batching=batches,
                adapters=adapters,
                seed=seed,
                self_check=self_check,
            )
        super().__init__(engine, context.model_dir, context.runtime.platform, save_timeout_s)


@contextmanager
def _checking(model_dir: Path, max_length: int | None, self_check: bool) -> Iterator[Worker | None]:
    """On rank 0, a process for the self-check, which gets ready while this one imports Megatron; it is ended with the block."""
    worker = None
    if self_check and "megatron.core" not in sys.modules and Launch.from_environment().rank == 0:
        worker = standing_by.worker_for(model_dir, max_length)
    if worker is None:
        yield None
        return
    with worker:
        yield worker
    standing_by.asked(model_dir, max_length)


def _with_number(batching: Batching | None) -> Batching:
    """Settings of micro batches, in which ``auto`` has been replaced by a number.

    Raises:
        ConfigError: it has not.
    """
    settings = batching or Batching()
    return settings.with_budget(settings.budget)


def _check_megatron(
    runtime: Runtime, topology: Topology, model_dir: Path, *, batching: Batching | None = None, **_: Any
) -> None:
    runtime.check_batching(topology, batching or Batching())
    runtime.load_megatron()

    from megascend.engines.megatron.architecture import check_architecture

    check_architecture(model_dir)


def _one_process(runtime: Runtime, topology: Topology, model_dir: Path) -> None:
    if topology.world_size != 1:
        raise TopologyError(
            f"engine single runs in one process, but {topology.world_size} were started (WORLD_SIZE); start one, or use "
            "MegatronBackend"
        )


def _check_single(
    runtime: Runtime,
    topology: Topology,
    model_dir: Path,
    *,
    recompute: Recompute | None = None,
    batching: Batching | None = None,
    **_: Any,
) -> None:
    from megascend.engines.single.engine import check_settings

    _one_process(runtime, topology, model_dir)
    check_settings(recompute or Recompute(), batching or Batching())


class FsdpBackend(Backend):
    """A Hugging Face model, trained by transformers and FSDP2 on all ranks. Its methods are those of :class:`Backend`.

    For architectures that mcore-bridge does not know, for work on plain transformers models, and where tensor and pipeline
    parallelism are not needed. No Megatron is imported. docs/fsdp.md says what works, with its test, and what does not.
    The settings of ``optimizer`` that divide work over ranks have no effect: parameters, gradients and moments are sharded.

    Args:
        model: directory of a Hugging Face checkpoint with safetensors weights; each rank reads its own rows of them.
        parallel: ``context`` with ``context_algorithm`` ``ulysses``, and ``expert``; ``tensor`` and ``pipeline`` are 1.
            Parameters are sharded over all ranks, experts over those that are left.
        fsdp: see :class:`megascend.config.Fsdp`.
        precision: of gathered parameters and of activations. Shards, sums of gradients and moments are fp32 in every case; with
            ``adapters`` the frozen model's shards have this precision too.
        tf32, platform: as for :func:`megascend.bootstrap`, which is called for this engine if it has not been.
        optimizer, schedule, batching, adapters, seed, timeout_s, save_timeout_s, self_check, head: as for
            :class:`MegatronBackend`.
        recompute: ``granularity`` ``none``, ``full`` (each layer by itself) or ``selective`` (by operators).
        moe: no update of correction biases.

    Raises:
        ConfigError, TopologyError, CheckpointError, PlatformError, VersionError, CollectiveTimeoutError, SelfCheckError: before
            any training.
    """

    def __init__(
        self,
        model: str | Path,
        parallel: Parallel | None = None,
        fsdp: Fsdp | None = None,
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
        self_check: bool = True,
        head: HeadKind = "lm",
    ) -> None:
        batches = _with_number(batching)
        settings, recomputed = fsdp or Fsdp(), recompute or Recompute()
        made: list[Any] = []

        def prepare(runtime: Runtime, topology: Topology, model_dir: Path) -> Any:
            _check_fsdp(
                runtime,
                topology,
                model_dir,
                fsdp=settings,
                recompute=recomputed,
                moe=moe,
                batching=batches,
                adapters=adapters,
            )

            from megascend.engines.fsdp import mesh, npu

            if runtime.platform.name == "npu":
                npu.use_grouped_operator()
            made.append(mesh.FsdpGroups(settings.replicate))
            return made[0]

        with engine_context(
            "fsdp",
            model,
            precision=precision,
            platform=platform,
            tf32=tf32,
            parallel=parallel,
            timeout_s=timeout_s,
            prepare=prepare,
            head=head,
        ) as context:
            from megascend.engines.fsdp.engine import FsdpEngine

            engine = FsdpEngine(
                context.topology,
                context.groups,
                context.info,
                context.model_dir,
                made[0],
                fsdp=settings,
                precision=precision,
                adam=optimizer or Adam(),
                schedule=schedule or Schedule(),
                recompute=recomputed,
                moe=moe or Moe(),
                batching=batches,
                adapters=adapters,
                seed=seed,
                page_locked=context.runtime.platform.page_locks_memory,
                self_check=self_check,
            )
        super().__init__(engine, context.model_dir, context.runtime.platform, save_timeout_s)


def _check_fsdp(
    runtime: Runtime,
    topology: Topology,
    model_dir: Path,
    *,
    fsdp: Fsdp | None = None,
    recompute: Recompute | None = None,
    moe: Moe | None = None,
    batching: Batching | None = None,
    adapters: Adapters | None = None,
    **_: Any,
) -> None:
    from megascend.engines.fsdp import mesh, npu, transformers_api
    from megascend.engines.fsdp.engine import check_settings

    settings = fsdp or Fsdp()
    transformers_api.check_version()
    if runtime.platform.name == "npu":
        npu.check_settings(settings)
    mesh.check_layout(topology)
    mesh.mesh_ranks(topology.world_size, settings.replicate, topology.expert)
    check_settings(settings, topology, recompute or Recompute(), moe or Moe(), batching or Batching(), adapters)


_backends: dict[str, Callable[..., Backend]] = {
    "megatron": MegatronBackend,
    "single": SingleBackend,
    "fsdp": FsdpBackend,
}

_checks: dict[str, Callable[..., None]] = {
    "megatron": _check_megatron,
    "single": _check_single,
    "fsdp": _check_fsdp,
}
