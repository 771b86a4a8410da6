"""Bootstrap of the process and construction of the backend, from the settings of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megascend.config import Adapters, TrainerConfig
from megascend.config.training import EngineSettings

if TYPE_CHECKING:
    from megascend.backend import Backend
    from megascend.runtime.bootstrap import Runtime

ADAPTER = "default"
"""Name of a run's adapter, the same as peft gives to one that it loads."""


def bootstrap(config: TrainerConfig) -> Runtime:
    """Prepare this process for a run's engine; see :func:`megascend.bootstrap`."""
    from megascend.runtime.bootstrap import bootstrap as prepare

    return prepare(
        platform=config.platform,
        parallel=config.parallel,
        tf32=config.tf32,
        engine=config.engine,
        provider=config.provider,
        affinity=config.affinity,
    )


def make_backend(config: TrainerConfig) -> Backend:
    from megascend import backends

    return backends.make_backend(config.engine, model=config.model, **backend_settings(config))


def backend_settings(config: TrainerConfig) -> dict[str, Any]:
    """Return the arguments of the backend's constructor, without ``model``, from the settings of a run."""
    from megascend import backends

    lora = config.lora
    # Run files have these under other names, or not at all.
    adapters = lora and Adapters(
        max_count=1, max_rank=lora.rank, targets=lora.targets, base_weights=config.base_weights
    )
    settings: dict[str, Any] = {
        "adapters": adapters,
        "head": config.head,
        "tf32": config.tf32 or None,
        "save_timeout_s": config.checkpoint.timeout_s,
    }
    settings |= {name: getattr(config, name) for name in EngineSettings.model_fields if name != "model"}
    # Leave out settings that the engine does not have, unless the user has changed them: the engine then refuses them by name.
    return backends.applicable(config.engine, settings)
