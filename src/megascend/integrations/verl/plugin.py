"""Entry point ``verl.plugins``, which verl loads on import: does nothing unless ``VERL_ENGINE_VENDOR=megascend``.

It bootstraps the process before verl imports Megatron-Core, and registers the engine once verl's registry exists. With
``VERL_PLATFORM=cpu`` it also registers a CPU platform. verl logs a plugin's exceptions at debug level only and would train with
its own engine, so a failure ends the process.
"""

from __future__ import annotations

import os
import sys
import traceback

from megascend.integrations.verl.settings_table import ROLLOUT_NAME, VENDOR


def is_selected() -> bool:
    """Check whether this process is to use megascend's engine."""
    return os.environ.get("VERL_ENGINE_VENDOR", "") == VENDOR


def install() -> None:
    """Prepare the process, and register engine, rollout and trainer with verl. Call once."""
    import megascend
    from megascend.runtime.bootstrap.import_hooks import after_import

    on_cpu = os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"
    if on_cpu:
        from megascend.integrations.verl.cpu_platform import register

        register()
    # During the import of verl, before it imports Megatron-Core.
    megascend.bootstrap("cpu" if on_cpu else "auto", engine="megatron")
    # verl loads plug-ins during its own import, before its registries exist: register after each module is imported.
    after_import("verl.workers.engine", _register_engine)
    after_import("verl.workers.rollout.base", _register_adapter)
    after_import("verl.workers.rollout.replica", _register_replica)
    after_import("verl.trainer.ppo.v1.trainer_sync", _register_trainer)


def _register_engine() -> None:
    import megascend.integrations.verl.engine  # noqa: F401  registers itself


def _register_adapter() -> None:
    """Add the adapter to verl's table directly: verl has no function to register one."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    # A class path, as in verl's own entries.
    _ROLLOUT_REGISTRY[ROLLOUT_NAME, "async"] = "megascend.integrations.verl.rollout.ServerAdapter"


def _register_replica() -> None:
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    def load() -> type:
        from megascend.integrations.verl.rollout import Replica

        return Replica

    RolloutReplicaRegistry.register(ROLLOUT_NAME, load)


def _register_trainer() -> None:
    from megascend.integrations.verl.trainer import register

    register()


if is_selected():
    try:
        install()
    # verl would log the exception at debug level and train with its own engine.
    except Exception as error:
        traceback.print_exc()
        print(f"VERL_ENGINE_VENDOR={VENDOR}: the engine cannot be used: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error
