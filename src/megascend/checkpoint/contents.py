"""What is saved of a run, and what the checkpoint says about itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.checkpoint.manifest import Manifest
from megascend.checkpoint.random_state import random_state
from megascend.checkpoint.saver import CheckpointState
from megascend.checkpoint.state import model_state, optimizer_state
from megascend.errors import ConfigError

if TYPE_CHECKING:
    from megascend.engines.megatron.engine import MegatronStrategy

PACKAGES = ("megascend", "torch", "megatron-core", "mcore-bridge", "transformers")
AXES = ("tensor", "pipeline", "virtual_pipeline", "context", "data", "expert", "expert_tensor")


def describe(
    strategy: MegatronStrategy,
    step: int,
    progress: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Manifest:
    """The manifest of a checkpoint taken now.

    Args:
        step: optimizer steps done.
        progress, config: see :class:`Manifest`.

    Raises:
        ConfigError: one of them is not JSON.
    """
    shape, host = strategy.shape, strategy.adapters
    counters = None
    if host is None:
        optimizer = strategy.optimizer
        counters = {
            "updates": optimizer.updates,
            "skipped_in_a_row": optimizer.skipped_in_a_row,
            "scaler": optimizer.scaler_state,
        }
    return Manifest(
        step=step,
        precision=strategy.precision,
        model={"layers": shape.num_layers, "hidden": shape.hidden_size, "vocabulary": shape.vocab_size},
        layout={axis: getattr(strategy.topology, axis) for axis in AXES},
        optimizer=counters,
        adapters=[] if host is None else sorted(host.registry),
        versions={package: found for package in PACKAGES if (found := _version(package)) is not None},
        progress=_as_json("progress", progress or {}),
        config=None if config is None else _as_json("config", config),
    )


def state_of(strategy: MegatronStrategy) -> dict[str, Any]:
    """This rank's live tensors that a checkpoint holds; a frozen model is not among them. Local."""
    if strategy.adapters is not None:
        return {}
    strategy.finish_param_gather()
    return {**model_state(strategy, everything=False), **optimizer_state(strategy, everything=False)}


def collect(
    strategy: MegatronStrategy, manifest: Manifest, base_model: str, write_more: Callable[[Path], None] | None
) -> CheckpointState:
    """Everything that a checkpoint holds. Collective: adapters are brought together on rank 0."""
    host = strategy.adapters
    state = state_of(strategy)
    state[f"random/{strategy.groups.rank}"] = random_state()
    whole = {} if host is None else {name: host.collect_whole(name, optimizer=True) for name in manifest.adapters}
    return CheckpointState(
        state,
        manifest,
        {name: saved for name, saved in whole.items() if saved is not None},
        base_model,
        [] if host is None else list(host.registry.projections),
        write_more,
    )


def _as_json(what: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` as they will be read: with lists for tuples, and keys that are texts."""
    try:
        return json.loads(json.dumps(dict(values)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"save: {what} must be JSON: {error}") from error


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
