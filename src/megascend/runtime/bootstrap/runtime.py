"""The Runtime, the record of all changes to this process, and the bootstrap that creates it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megascend.changes import change_list, changed, record
from megascend.config.registry import EngineEntry
from megascend.errors import ConfigError, ImportOrderError
from megascend.reference import fla as reference_fla
from megascend.runtime.bootstrap import engines, patches, providers
from megascend.runtime.bootstrap.deferred_imports import deferring
from megascend.runtime.bootstrap.import_hooks import after_import
from megascend.runtime.bootstrap.providers import PatchProvider, ProviderSetup, refuse_options
from megascend.runtime.bootstrap.run_site import megascend_run
from megascend.runtime.bootstrap.stub_modules import install_missing_leaves
from megascend.runtime.bootstrap.versions import Stack, installed_versions, require_supported, require_undeclared
from megascend.surroundings import announce, set_user_variables

if TYPE_CHECKING:
    from megascend.config import Affinity, Batching, Parallel
    from megascend.runtime.platforms.base import Platform
    from megascend.runtime.topology.topology import Topology


QUIET_MODULES = (r"megatron\.core", r"mcore_bridge", r"torch\.distributed")
"""Regular expressions of modules whose deprecation warnings only their developers can act on."""
QUIET_MESSAGES = {
    # From 0.19 on, for every model that is built: mcore-bridge builds its models from these classes.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
}
"""By logger, the beginning of a message that only developers of programs on Megatron-Core can act on."""


@dataclass
class Runtime:
    """Result of the bootstrap, and record of the changes to this process.

    Attributes:
        stack: the row of the version table that the installed packages match.
        engine: name of the engine that the process is prepared for. After a bootstrap that names none, that is what the first
            backend needs, or Megatron-Core if it is imported before.
        provider: the provider that patches Megatron-Core; None for an engine without Megatron.
        tf32: products of fp32 matrices are TensorFloat-32 (CUDA only).
    """

    platform: Platform
    stack: Stack
    engine: str = engines.DEFAULT
    provider: PatchProvider | None = None
    tf32: bool = False
    affinity: Affinity = "none"
    _megatron_loaded: bool = False
    _is_open: bool = False  # the engine is not decided, and nothing is patched for one

    @property
    def changes(self) -> list[str]:
        """Return one line for each change that megascend has made to the process so far, in order."""
        return change_list()

    def load_megatron(self) -> None:
        """Import megatron.core and mcore_bridge for a megascend engine, without their warnings. Idempotent.

        Megatron-Core's faults are patched independently of this call: see :meth:`PatchProvider.when_imported`.

        Raises:
            ConfigError: the process was prepared for an engine without Megatron.
        """
        if self._megatron_loaded:
            return
        if self._is_open:
            self.prepare_for(engines.DEFAULT)
        if self.provider is None:
            raise ConfigError(
                f"this process was prepared for engine {self.engine!r}, so Megatron was not patched; start another process with "
                "megascend.bootstrap(engine='megatron') first"
            )
        announce("importing Megatron-Core")
        with warnings.catch_warnings(), suppress_logs_below(logging.ERROR), gc_paused(), deferring():
            # Deprecations inside these packages, a missing Apex, parts of a dummy Transformer Engine that mcore-bridge could
            # not patch: a user cannot act on any of them.
            warnings.simplefilter("ignore")
            # Inside the function: an import at the top of this file would load Megatron before it is patched.
            mcore_bridge = import_module("mcore_bridge")
            mcore_bridge.get_logger().setLevel(logging.WARNING)  # before its modules report settings at import
            for module in ("mcore_bridge.bridge", "mcore_bridge.model", "megatron.core.models.gpt"):
                import_module(module)
        # These modules also warn later, when they are called, once for every rank.
        for pattern in QUIET_MODULES:
            warnings.filterwarnings("ignore", module=pattern)
        changed(f"warnings raised in {', '.join(QUIET_MODULES)} are ignored; mcore_bridge logs warnings only")
        for logger, beginning in QUIET_MESSAGES.items():
            logging.getLogger(logger).addFilter(
                lambda record, beginning=beginning: not str(record.msg).startswith(beginning)
            )
        changed(f"messages that begin with {' or '.join(map(repr, QUIET_MESSAGES.values()))} are not logged")
        record(self.provider.after_megatron())
        self._megatron_loaded = True

    def check_batching(self, topology: Topology, batching: Batching) -> None:
        """Raise ConfigError for a form of micro batches that would be computed wrongly here on ``topology``."""
        if self.provider is not None:
            self.provider.check_batching(topology, batching)

    def configure_topology(self, topology: Topology, timeout_s: float = 600) -> None:
        """Prepare the process for a layout. Call before its process groups are created.

        Args:
            timeout_s: timeout of its collectives, in seconds.
        """
        if self.provider is not None:
            record(self.provider.for_topology(topology))
        record(self.platform.limit_collectives(timeout_s))

    def configure_model(self, config: Any, options: Mapping[str, Any]) -> None:
        """Prepare the process for a model. Call with its configuration, before it is built; cheap if nothing changed.

        Args:
            config: mcore-bridge's ModelConfig; ignored without a provider.
            options: the provider's settings.

        Raises:
            ConfigError: the provider does not support this model or an option.
            PlatformError: the process is not patched as this model requires.
        """
        if self.provider is None:
            refuse_options(options, f"engine {self.engine!r} has no provider")
        else:
            record(self.provider.for_model(config, options))

    def require_same(
        self, platform: str, tf32: bool | None, engine: str | None, provider: str | None, affinity: Affinity | None
    ) -> None:
        """Raise ConfigError unless the arguments of a later bootstrap call agree with the first one."""
        if platform not in ("auto", self.platform.name):
            raise ConfigError(
                f"this process was bootstrapped for platform {self.platform.name!r}; it cannot become {platform!r}. "
                "Start another process."
            )
        if tf32 not in (None, self.tf32):
            raise ConfigError(
                f"this process was bootstrapped with tf32={self.tf32}; it cannot become {tf32}: pass it in the first call: "
                f"megascend.bootstrap(tf32={tf32})"
            )
        if affinity not in (None, self.affinity):
            raise ConfigError(
                f"this process was bootstrapped with affinity={self.affinity!r}; it cannot become {affinity!r}: pass it in the "
                f"first call: megascend.bootstrap(affinity={affinity!r})"
            )
        # These two share a patched Megatron-Core, and engines without Megatron share an unpatched process. In any other pair,
        # one engine would run with the patches of the other.
        if self._is_open:
            return
        on_megatron_core = {engines.DEFAULT, engines.MEGATRON_CORE}
        if (
            engine not in (None, self.engine)
            and not {engine, self.engine} <= on_megatron_core
            and (engines.needs(engine).megatron or engines.needs(self.engine).megatron)
        ):
            state = (
                f"and provider {self.provider.name!r} has patched it ({len(self.changes)} changes, see Runtime.changes)"
                if self.provider is not None
                else "without any patch"
            )
            raise ConfigError(
                f"this process was bootstrapped for engine {self.engine!r}, {state}; engine {engine!r} cannot run in it: start "
                f"another process with megascend.bootstrap(engine={engine!r})"
            )
        kind = type(self.provider)
        names = () if self.provider is None else (self.provider.name, f"{kind.__module__}:{kind.__qualname__}")
        if provider is not None and provider not in names:
            used = "no provider" if self.provider is None else f"provider {self.provider.name!r}"
            raise ConfigError(
                f"this process was bootstrapped with {used}; it cannot become {provider!r}. Pass it in the first call: "
                f"megascend.bootstrap(provider={provider!r})"
            )

    def prepare_for(self, engine: str | None, parallel: Parallel | None = None, provider: str | None = None) -> None:
        """Prepare a process whose engine is open for ``engine``; extend one for Megatron-Core only to megascend's engine.

        Raises as :func:`bootstrap`, and the engine then stays open.
        """
        if self._is_open and (engine or provider):
            from megascend.config import Parallel

            engine = engine or engines.DEFAULT
            needs = _needs(engine, provider)
            stack = require_supported(installed_versions(), needs.packages)
            if needs.megatron:
                require_undeclared(stack)
                self.provider = _create_provider(provider, ProviderSetup(self.platform, stack, parallel or Parallel()))
            else:
                self.provider = None
            megascend_run.disarm()
            _patch(self)
            self.engine, self.stack, self._is_open = engine, stack, False
        if self.engine == engines.MEGATRON_CORE and engine == engines.DEFAULT:
            self.stack = require_supported(installed_versions(), engines.needs(engine).packages)
            self.engine = engine


@contextlib.contextmanager
def suppress_logs_below(level: int) -> Iterator[None]:
    """Suppress all log records below ``level`` within the context."""
    disabled = logging.root.manager.disable
    # disable() takes the highest level that is suppressed; a stricter setting of the program stays.
    logging.disable(max(disabled, level - 1))
    try:
        yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause cyclic garbage collection within the context.

    Imports create half a million permanent objects; scanning them repeatedly took a fifth of the imports' time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_current: Runtime | None = None


def bootstrap(
    platform: str = "auto",
    parallel: Parallel | None = None,
    tf32: bool | None = None,
    engine: str | None = None,
    provider: str | None = None,
    affinity: Affinity | None = None,
) -> Runtime:
    """Prepare this process for an engine. Call it first; calling it again returns the same Runtime.

    It checks the version table, chooses the platform, and for an engine that runs on Megatron-Core raises if Megatron-Core,
    Transformer Engine or mcore-bridge are imported already. It never reads ``sys.argv``, which is as before afterwards.

    Without ``engine`` and ``provider`` the engine stays open: the first backend decides it, or Megatron-Core's first import.
    On an NPU Megatron is patched at once.

    ``Runtime.changes`` lists all changes to the process; docs/process.md#changes-to-the-process explains them.

    Args:
        platform: ``cpu``, ``cuda``, ``npu``, or ``auto`` for the first available of npu, cuda, cpu.
        parallel: the layout, if it is known already. It may change later; on an NPU with context parallelism, passing it here
            avoids patching Megatron a second time (about a second).
        tf32: products of fp32 matrices may be TensorFloat-32 (CUDA only); default: value of an earlier call, or False.
        engine: engine that the process is prepared for: ``megatron``; ``megatron-core``, for a third-party program on
            Megatron-Core that needs no mcore-bridge; ``single``, ``fsdp``, or one registered with
            ``megascend.register_engine``; default: value of an earlier call, or what is used first.
        provider: provider that patches Megatron (see :mod:`megascend.runtime.bootstrap.providers`); default: the platform's
            first.
            ``MEGASCEND_REFERENCE_TE=1`` in the environment means ``reference`` on ``cuda``.
        affinity: ``numa``: all threads of this process run on the CPUs of one NUMA node, its device's if known (see
            :mod:`megascend.runtime.platforms.affinity`); ``none``, the default: on all CPUs that the launcher allows.

    Raises:
        VersionError: the installed packages are not a row of the version table.
        MissingDependencyError: a module that this Megatron-Core imports without declaring it is not installed.
        ImportOrderError: something that has to be patched first is imported already.
        PlatformError: the platform is not available here.
        ConfigError: engine or provider is unknown; or the process was bootstrapped for another platform, engine, provider or
            ``tf32`` before, or the platform has no TF32.
    """
    global _current
    if _current is not None:
        _current.require_same(platform, tf32, engine, provider, affinity)
        _current.prepare_for(engine, parallel, provider)
        return _current
    from megascend.config import Parallel
    from megascend.runtime.platforms import choose

    if "torch" not in sys.modules:
        announce("importing torch")
    record(set_user_variables())
    # Under `megascend run` an import hook would call the bootstrap; this program has called it first.
    if (hook := sys.modules.get("megascend_run")) is not None:
        hook.disarm()
    chosen = choose(platform)
    # On an NPU Megatron is patched at once: what is imported first there cannot be mended later.
    is_open = engine is None and provider is None and chosen.device_type != "npu"
    engine = engine or engines.DEFAULT
    needs, versions = _needs(engine, provider), installed_versions()
    # Without Megatron-Core only another engine can follow; it checks its own packages.
    has_megatron = not is_open or versions["megatron-core"] is not None
    stack = require_supported(versions, needs.packages if has_megatron else ("torch",))
    needs_provider = needs.megatron and has_megatron
    if needs_provider:
        require_undeclared(stack)
    setup = ProviderSetup(chosen, stack, parallel or Parallel())
    patcher = _create_provider(provider, setup) if needs_provider else None
    runtime = Runtime(chosen, stack, engine, patcher, bool(tf32), affinity or "none", _is_open=is_open)
    # First: what it sets (NVIDIA_TF32_OVERRIDE, ONEDNN_MAX_CPU_ISA) is read once, by the first product of the process.
    record(chosen.configure_products(runtime.tf32))
    if is_open:
        megascend_run.before_import(lambda: runtime.prepare_for(engines.DEFAULT, parallel))
    else:
        _patch(runtime)
    record(chosen.prepare())
    # Before the large imports: threads that they start inherit the binding.
    if runtime.affinity == "numa":
        record([_bind_to_numa_node(chosen)])
    _current = runtime
    return runtime


def _needs(engine: str, provider: str | None) -> EngineEntry:
    """Return the requirements of an engine; refuse a provider for one without Megatron."""
    needs = engines.needs(engine)
    if provider is not None and not needs.megatron:
        raise ConfigError(
            f"provider={provider!r}: engine {engine!r} needs no Megatron, and so no provider; leave it out"
        )
    return needs


def _patch(runtime: Runtime) -> None:
    """Make the engine's changes of docs/process.md#changes-to-the-process, in the order that they need."""
    platform, provider = runtime.platform, runtime.provider
    with gc_paused():
        if provider is not None:
            record(provider.before_megatron())
        if platform.device_type == "cpu":
            record(reference_fla.install(state_spaces=provider is not None))
        if provider is None:
            return
        record(install_missing_leaves())
        # These modules are patched at their import, by megascend's engine or by any program.
        patches.patch_on_import()
        for module, patch_module in provider.when_imported().items():
            after_import(module, lambda patch_module=patch_module: record(patch_module()))


def _bind_to_numa_node(platform: Platform) -> str:
    """Bind this process to the CPUs of one NUMA node; return a one-line report."""
    from megascend.runtime.distributed.launch import Launch
    from megascend.runtime.platforms.affinity import bind_to_node

    launch = Launch.from_environment()
    return bind_to_node(launch.local_rank, launch.local_size, platform.pci_address(launch.local_rank))


def _create_provider(name: str | None, setup: ProviderSetup) -> PatchProvider:
    """Create the provider, and check that no package that it has to patch first is imported."""
    platform = setup.platform.name
    if name is None and platform == "cuda" and os.environ.get("MEGASCEND_REFERENCE_TE") == "1":
        name = "reference"
    provider = providers.create(name, setup)
    if provider.must_come_first:
        # None: a package that the self-check's worker hides.
        require_clean([name for name, module in sys.modules.items() if module is not None], platform)
    return provider


def current_runtime(needed_by: str) -> Runtime:
    """Return the Runtime of this process."""
    if _current is None:
        raise ImportOrderError(
            f"{needed_by} needs megascend.bootstrap() to have run; make it the program's first call."
        )
    return _current


PATCHED_FIRST = ("megatron_adaptor", "megatron.core", "transformer_engine", "mcore_bridge")


def require_clean(modules: Iterable[str], platform: str) -> None:
    """Raise ImportOrderError if any package that has to be patched first is already imported."""
    loaded = set(modules)
    early = [name for name in PATCHED_FIRST if name in loaded]
    if early:
        raise ImportOrderError(
            f"{', '.join(early)} {'was' if len(early) == 1 else 'were'} imported before megascend.bootstrap(), with wrong "
            f"implementations for platform {platform!r}: make it the first lines of the program"
        )
