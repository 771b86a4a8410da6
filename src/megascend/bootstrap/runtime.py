"""The Runtime: the one object that knows what was done to this process, and the bootstrap that makes it."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megascend.bootstrap import patches as upstream_fixes
from megascend.bootstrap.import_order import require_clean
from megascend.bootstrap.stub_modules import install_missing_leaves
from megascend.bootstrap.versions import Stack, installed_versions, require_supported
from megascend.errors import ConfigError, ImportOrderError

if TYPE_CHECKING:
    from megascend.config import Parallel
    from megascend.platforms.base import Platform
    from megascend.topology.topology import Topology


QUIET_MODULES = (r"megatron\.core", r"mcore_bridge", r"torch\.distributed")
"""Regular expressions of modules whose deprecation warnings are addressed to their own developers."""


@dataclass
class Runtime:
    """What the bootstrap decided and changed.

    Attributes:
        platform: the platform in use.
        stack: the row of the version table that the installed packages match.
        tf32: products of fp32 matrices are TensorFloat-32 (CUDA only).
        changes: one line for each change made to the process, in order.
    """

    platform: Platform
    stack: Stack
    tf32: bool = False
    changes: list[str] = field(default_factory=list)
    _megatron_loaded: bool = False

    def load_megatron(self) -> None:
        """Import megatron.core and mcore_bridge, then let the platform finish its work on them. Idempotent."""
        if self._megatron_loaded:
            return
        with warnings.catch_warnings(), logged_from(logging.ERROR), no_collection():
            # Deprecations inside these packages, the absence of Apex, what of a dummy Transformer Engine mcore-bridge could
            # not patch: nothing that a user could act on.
            warnings.simplefilter("ignore")
            mcore_bridge = import_module("mcore_bridge")
            mcore_bridge.get_logger().setLevel(logging.WARNING)  # before its modules report settings at import
            for module in ("mcore_bridge.bridge", "mcore_bridge.model", "megatron.core.models.gpt"):
                import_module(module)
        for pattern in QUIET_MODULES:
            warnings.filterwarnings("ignore", module=pattern)
        self.changes.append(
            f"warnings raised in {', '.join(QUIET_MODULES)} are ignored; mcore_bridge logs warnings only"
        )
        self.changes += upstream_fixes.apply()
        self.changes += self.platform.finish()
        self._megatron_loaded = True

    def configure_topology(self, topology: Topology, timeout_s: float = 600) -> None:
        """Get ready for a layout. Call before its process groups are created.

        Args:
            timeout_s: of its collectives, in seconds.
        """
        self.changes += self.platform.configure_topology(topology) + self.platform.limit_collectives(timeout_s)

    def configure_model(self, config: Any, options: Mapping[str, Any]) -> None:
        """Get ready for a model. Call with its ModelConfig, before it is built; costs nothing if nothing changed.

        Args:
            config: mcore-bridge's ModelConfig.
            options: arguments for the package that patches Megatron on this platform.

        Raises:
            ConfigError: the platform would get this model, or an option, wrong.
            PlatformError: the process is not as it must be for this model.
        """
        self.changes += self.platform.configure_model(config, options)


@contextlib.contextmanager
def logged_from(level: int) -> Iterator[None]:
    """Nothing below ``level`` is logged by anyone until the block ends."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, level - 1))
    try:
        yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No cyclic garbage is looked for until the block ends.

    Imports make half a million objects that stay: looking through them again and again took a fifth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_current: Runtime | None = None


def bootstrap(platform: str = "auto", parallel: Parallel | None = None, tf32: bool | None = None) -> Runtime:
    """Prepare this process for Megatron-Core. Call it first; calling it again returns the same Runtime.

    It checks the version table, chooses the platform, and refuses to go on if Megatron-Core, Transformer Engine or
    mcore-bridge were imported too early. It never reads or changes ``sys.argv``.

    What it changes in the process (also in ``Runtime.changes``):

    - all: a few leaf modules that upstream imports unconditionally, where they cannot be imported here (see
      :mod:`megascend.bootstrap.stub_modules`).
    - ``cpu``: ``transformer_engine`` in ``sys.modules`` becomes :mod:`megascend.reference_te`; ``torch.cuda`` names that
      Megatron-Core calls act on the CPU (``torch.cuda.is_available()`` stays False); ``TORCHDYNAMO_DISABLE=1``;
      ``OMP_NUM_THREADS=1`` and one torch thread a process when several processes share the machine and the variable is
      not set.
    - ``cuda``: ``CUDA_DEVICE_MAX_CONNECTIONS=1`` where it is not set (the order Megatron-Core's overlaps rely on);
      ``NVIDIA_TF32_OVERRIDE=0``, or with ``tf32`` torch's own switch (see :mod:`megascend.platforms.cuda_products`).
    - all, once Megatron is loaded: ``megatron.core.tensor_parallel.mappings._reduce`` also reduces tensors that are not
      contiguous (see :mod:`megascend.bootstrap.patches`); a warnings filter for the modules in
      ``QUIET_MODULES``, and mcore-bridge's logger set to warnings.
    - ``cuda`` with ``MEGASCEND_REFERENCE_TE=1``: the reference Transformer Engine instead of the real one.
    - ``npu``: MindSpeed's adaptor is imported with arguments of the bootstrap's, and patches megatron.core and parts of
      torch (docs/npu.md lists them); ``HCCL_IF_BASE_PORT`` where no port is set.

    Args:
        platform: ``cpu``, ``cuda``, ``npu``, or ``auto`` for the first of npu, cuda, cpu that works here.
        parallel: the layout, where it is known already. It may be another one later; on an NPU with context
            parallelism, telling it here saves patching Megatron once more for it (about a second).
        tf32: products of fp32 matrices may be TensorFloat-32 (CUDA only); default: no, or what an earlier call has said.

    Raises:
        VersionError: the installed packages are not a row of the version table.
        ImportOrderError: something that has to be patched first is imported already.
        PlatformError: the platform is not available here.
        ConfigError: the process was bootstrapped for another platform or another ``tf32`` before, or the platform has none.
    """
    global _current
    if _current is not None:
        if platform not in ("auto", _current.platform.name):
            raise ConfigError(
                f"this process was bootstrapped for platform {_current.platform.name!r}; it cannot become {platform!r}. "
                "Start another process."
            )
        if tf32 not in (None, _current.tf32):
            raise ConfigError(
                f"this process was bootstrapped with tf32={_current.tf32}; it cannot become {tf32}: the choice is made before "
                f"anything is computed. Say so in the first call: megascend.bootstrap(tf32={tf32})"
            )
        return _current
    from megascend.config import Parallel
    from megascend.platforms import choose

    stack = require_supported(installed_versions())
    chosen = choose(platform)
    if chosen.must_patch_first:
        require_clean(sys.modules, chosen.name)
    with no_collection():
        changes = chosen.configure_products(bool(tf32)) + chosen.prepare(stack, parallel or Parallel())
    _current = Runtime(chosen, stack, bool(tf32), changes + install_missing_leaves())
    return _current


def current_runtime(needed_by: str) -> Runtime:
    """The Runtime of this process.

    Raises:
        ImportOrderError: ``bootstrap`` has not run; ``needed_by`` is named in the message.
    """
    if _current is None:
        raise ImportOrderError(
            f"{needed_by} needs megascend.bootstrap() to have run; make it the program's first call."
        )
    return _current
