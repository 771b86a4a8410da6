"""What verl loads from the entry point ``verl.plugins`` while it is imported: nothing, unless megascend's engine was asked for.

With ``VERL_ENGINE_VENDOR=megascend`` the process is bootstrapped here, before verl imports Megatron-Core, and the engine is
registered when verl's registry exists. With ``VERL_PLATFORM=cpu`` verl gets a CPU platform, too. verl hides what a plugin
raises, in a message at debug level, and would then train with its own engine; so a failure ends the process.
"""

from __future__ import annotations

import os
import sys
import traceback

from megascend.integrations.verl.settings_table import VENDOR

ROLLOUT = "megascend"
"""The value of ``actor_rollout_ref.rollout.name`` that asks for megascend's rollout."""


def asked_for() -> bool:
    """Whether this process is to train with megascend."""
    return os.environ.get("VERL_ENGINE_VENDOR", "") == VENDOR


def install() -> None:
    """Prepare the process, and register what verl looks up by name. Once."""
    import megascend
    from megascend.bootstrap.import_hooks import after_import

    on_cpu = os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"
    if on_cpu:
        from megascend.integrations.verl.cpu_platform import register

        register()
    megascend.bootstrap("cpu" if on_cpu else "auto", engine="megatron")
    after_import("verl.workers.engine", _register_engine)
    after_import("verl.workers.rollout.base", _register_adapter)
    after_import("verl.workers.rollout.replica", _register_replica)
    after_import("verl.trainer.ppo.v1.trainer_sync", _register_trainer)


def _register_engine() -> None:
    import megascend.integrations.verl.engine  # noqa: F401  registers itself


def _register_adapter() -> None:
    """By the table that verl itself looks up: it has no function for it."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    _ROLLOUT_REGISTRY[ROLLOUT, "async"] = "megascend.integrations.verl.rollout.ServerAdapter"


def _register_replica() -> None:
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    def load() -> type:
        from megascend.integrations.verl.rollout import Replica

        return Replica

    RolloutReplicaRegistry.register(ROLLOUT, load)


def _register_trainer() -> None:
    from megascend.integrations.verl.trainer import register

    register()


if asked_for():
    try:
        install()
    except Exception as error:
        traceback.print_exc()
        print(f"VERL_ENGINE_VENDOR={VENDOR}: the engine cannot be had: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error
