"""Collect an engine's state for a checkpoint, and load it from a checkpoint of the same or of another engine."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megascend.engines.base import Engine
from megascend.errors import CheckpointError, ConfigError
from megascend.runtime.distributed.objects import all_reduce_numbers, raise_on_all_ranks
from megascend.training.checkpoint import hf_slices
from megascend.training.checkpoint.hf_slices import HfSlices, Translation
from megascend.training.checkpoint.manifest import CheckpointManifest
from megascend.training.checkpoint.saver import CheckpointState
from megascend.training.checkpoint.slices import TensorSlices
from megascend.training.checkpoint.torch_io import ChunkReader, SliceLoadPlanner, stored_tensors

PACKAGES = ("megascend", "torch", "megatron-core", "mcore-bridge", "transformers")
AXES = ("tensor", "pipeline", "virtual_pipeline", "context", "data", "expert", "expert_tensor")


def describe(
    engine: Engine, progress: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None
) -> CheckpointManifest:
    """Return the manifest of a checkpoint of the engine's present state.

    Args:
        progress, config: see :class:`CheckpointManifest`.
    """
    shape, trainable = engine.info.shape, engine.trainable
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return CheckpointManifest(
        step=trainable.step_count,
        engine=engine.kind,
        precision=engine.precision,
        model={
            "layers": shape.num_layers,
            "hidden": shape.hidden_size,
            "vocabulary": shape.vocab_size,
            # Left out without one, as in checkpoints of earlier versions.
            **({"heads for multi-token prediction": 1} if engine.mtp_loss_weight else {}),
            **({} if engine.base_weights == "unquantised" else {"base weights": engine.base_weights}),
        },
        layout={axis: getattr(engine.topology, axis) for axis in AXES},
        optimizer=trainable.counters(),
        adapters=sorted(trainable.adapters),
        versions=versions,
        progress=_as_json("progress", progress or {}),
        config=None if config is None else _as_json("config", config),
    )


def _as_json(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` as they will be read back: with lists for tuples, and strings as keys."""
    try:
        return json.loads(json.dumps(dict(values)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"save: {name} must be JSON: {error}") from error


def engine_state(engine: Engine, *, loading: bool) -> dict[str, Any]:
    """Return this rank's weights and training state by name; empty for a frozen model.

    Args:
        loading: include replicas, since a load fills all tensors; otherwise only what this rank writes.
    """
    if engine.trainable.frozen:
        return {}
    state = {**engine.weights(), **engine.training_state(loading=loading)}
    if loading:
        return state
    state |= {name: value.without_replicas() for name, value in state.items() if isinstance(value, TensorSlices)}
    return {name: value for name, value in state.items() if not isinstance(value, TensorSlices) or value.slices}


def checkpoint_state(engine: Engine, manifest: CheckpointManifest, base_model: str) -> CheckpointState:
    """Collect the content of a checkpoint; tensors are live. Collective: adapters are gathered on rank 0."""
    trainable = engine.trainable
    slices: HfSlices | str | None = None
    if not trainable.frozen:
        try:
            slices = engine.hf_slices()
        except CheckpointError as error:
            # Saved as a reason: this engine can still resume the checkpoint, engines of other kinds report why they cannot.
            slices = str(error)
    return CheckpointState(
        state={**engine_state(engine, loading=False), _random_key(engine): random_state(engine)},
        manifest=manifest,
        adapters=trainable.saved_adapters(),
        base_model=base_model,
        projections=list(trainable.projections),
        hf_slices=slices,
    )


def load(engine: Engine, directory: Path, saved: CheckpointManifest, current: CheckpointManifest) -> None:
    """Read a verified checkpoint into the model and its optimizer, or the adapters and theirs. Collective.

    Where engine and layout are the same, the random generators continue too.

    Args:
        saved, current: manifests of the checkpoint and of the engine, already checked to fit.

    Raises:
        CheckpointError: the checkpoint does not fit this model (nothing has been changed), or reading a file failed (the model
            is unusable).
        ConfigError: an adapter does not fit; the present ones are kept.
    """
    # Live tensors: dcp.load writes into them.
    state: dict[str, Any] = engine_state(engine, loading=True)
    same_engine = saved.engine == current.engine
    same_layout = same_engine and saved.layout == current.layout
    counters = saved.optimizer if same_engine else _translate_counters(current.optimizer, saved.optimizer)
    if same_layout:
        state[_random_key(engine)] = None
    reader = ChunkReader(directory)
    if same_engine or engine.trainable.frozen:
        _check_names(state, reader, directory, engine)
    else:
        translation = _translate(engine, state, reader, directory, saved)
        for values in translation.padding:  # rows that no weight fills
            values.zero_()
        state = {**translation.reads}
    if engine.trainable.frozen:
        # Before the rest, since an adapter that does not fit must leave everything unchanged.
        engine.trainable.load_adapters({name: directory / "adapters" / name for name in saved.adapters})
    problem = None
    try:
        with warnings.catch_warnings():
            # torch warns that without torch.distributed it assumes a single process.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # no_dist: every rank reads its own slices; a plan common to all ranks would cost collectives and gain nothing.
            dcp.load(state, storage_reader=reader, planner=SliceLoadPlanner(), no_dist=True)
    # CheckpointException is a BaseException in torch.
    except (Exception, CheckpointException) as error:  # noqa: BLE001  reported on every rank
        reason = f"{type(error).__name__}: {error}"
        problem = CheckpointError(f"load: rank {engine.groups.rank} cannot read {directory}: {reason}")
    raise_on_all_ranks(problem, engine.groups, f"the read of {directory}")
    # Each rank has its random streams; another layout has ranks without one.
    if same_layout:
        set_random_state(engine, state[_random_key(engine)])
    engine.trainable.restore(saved.step, counters)


def _check_names(state: Mapping[str, Any], reader: ChunkReader, directory: Path, engine: Engine) -> None:
    """Compare an engine's tensors with those of a checkpoint of the same engine, before anything is changed."""
    problem, tensors = None, {}
    try:
        tensors, objects = stored_tensors(reader)
        for name, value in state.items():
            if name not in tensors and name not in objects:
                problem = f"it has no {name}"
            elif isinstance(value, TensorSlices):
                shape = tensors[name].shape if name in tensors else ()
                if shape != value.shape and not value.may_differ:
                    problem = f"{name} has shape {shape}, here it has {value.shape}"
    except Exception as error:  # noqa: BLE001  foreign metadata can fail in any way; reported on every rank
        problem = f"its metadata cannot be read: {error}"
    refusal = f"load: {directory} does not fit this model"
    _require_all_used(engine, directory, problem, list(state), tensors.keys(), lambda reason: f"{refusal}: {reason}")


def _translate(
    engine: Engine, state: Mapping[str, Any], reader: ChunkReader, directory: Path, saved: CheckpointManifest
) -> Translation:
    """Plan reading this rank's tensors from a checkpoint of another engine. Collective; changes nothing."""
    problem, translation, stored = None, Translation(), {}
    engine_slices = engine.hf_slices()
    try:
        stored = hf_slices.read(directory)
        translation = hf_slices.translate(state, engine_slices, stored, stored_tensors(reader)[0])
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001  foreign metadata can fail in any way; reported on every rank
        problem = f"its metadata cannot be read: {error}"
    weights = {hf_slice.weight for slices in stored.values() for hf_slice in slices}

    def refusal(reason: str) -> str:
        return (
            f"load: engine {engine.kind} cannot continue {directory} of engine {saved.engine}: {reason}. Continue it with engine "
            f"{saved.engine}, or export its weights there (export_hf)"
        )

    _require_all_used(engine, directory, problem, sorted(translation.weights), weights, refusal)
    return translation


def _require_all_used(
    engine: Engine,
    directory: Path,
    problem: str | None,
    used: Sequence[str],
    stored: Iterable[str],
    refusal: Callable[[str], str],
) -> None:
    """Raise CheckpointError on every rank if one has a problem, or if no rank has used an entry of the checkpoint."""
    purpose = f"the entries required of {directory}"
    raise_on_all_ranks(None if problem is None else CheckpointError(refusal(problem)), engine.groups, purpose)
    # A rank reads its own slices only, so only the union over ranks shows what nobody has read.
    # As flags in the order of the names, which are the same on all ranks: gathering the names themselves would be expensive.
    names, local = sorted(stored), set(used)
    flags = all_reduce_numbers([float(name in local) for name in names], "world", engine.groups, "max", purpose)
    unused = [name for name, flag in zip(names, flags, strict=True) if not flag]
    if unused:
        raise CheckpointError(refusal(f"unexpected key in checkpoint: {unused[0]}"))


def _translate_counters(current: dict[str, Any] | None, saved: dict[str, Any] | None) -> dict[str, Any] | None:
    """Convert another engine's optimizer counters to this engine's: fp16 scalers have only the scale in common."""
    if current is None or saved is None or saved["scaler"] is None:
        return saved
    return {**saved, "scaler": {**(current["scaler"] or {}), "scale": saved["scaler"]["scale"]}}


def random_state(engine: Engine) -> dict[str, Any]:
    """Return the state of every random generator of this process, including the engine's."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": None if engine.device.type == "cpu" else torch.get_device_module(engine.device).get_rng_state(),
        "tracker": engine.random_streams(),
    }


def set_random_state(engine: Engine, state: dict[str, Any]) -> None:
    """Restore every random generator from :func:`random_state`."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if engine.device.type != "cpu":
        torch.get_device_module(engine.device).set_rng_state(state["device"])
    engine.restore_random_streams(state["tracker"])


def _random_key(engine: Engine) -> str:
    return f"random/{engine.groups.rank}"
