"""What is saved of a run, and what the checkpoint says about itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megascend.checkpoint.manifest import Manifest
from megascend.checkpoint.random_state import random_state
from megascend.checkpoint.saver import CheckpointState
from megascend.engines.base import Engine
from megascend.engines.hf_parts import HfParts
from megascend.errors import CheckpointError, ConfigError

PACKAGES = ("megascend", "torch", "megatron-core", "mcore-bridge", "transformers")
AXES = ("tensor", "pipeline", "virtual_pipeline", "context", "data", "expert", "expert_tensor")


def describe(
    engine: Engine,
    progress: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Manifest:
    """The manifest of a checkpoint taken now.

    Args:
        progress, config: see :class:`Manifest`.

    Raises:
        ConfigError: one of them is not JSON.
    """
    shape, trainable = engine.info.shape, engine.trainable
    return Manifest(
        step=trainable.step_count,
        engine=engine.kind,
        precision=engine.precision,
        model={"layers": shape.num_layers, "hidden": shape.hidden_size, "vocabulary": shape.vocab_size},
        layout={axis: getattr(engine.topology, axis) for axis in AXES},
        optimizer=trainable.counters(),
        adapters=sorted(trainable.adapters),
        versions={package: found for package in PACKAGES if (found := _version(package)) is not None},
        progress=_as_json("progress", progress or {}),
        config=None if config is None else _as_json("config", config),
    )


def collect(
    engine: Engine, manifest: Manifest, base_model: str, write_more: Callable[[Path], None] | None
) -> CheckpointState:
    """Everything that a checkpoint holds. Collective: adapters are brought together on rank 0."""
    state = engine.state(everything=False)
    parts: HfParts | str | None = None
    if not engine.trainable.frozen:
        try:
            parts = engine.hf_parts()
        except CheckpointError as error:
            parts = str(error)
    state[f"random/{engine.groups.rank}"] = random_state(engine)
    trainable = engine.trainable
    return CheckpointState(
        state, manifest, trainable.saved_adapters(), base_model, list(trainable.projections), parts, write_more
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
