"""Reading a checkpoint: first whether it is whole and fits, then into the live tensors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megascend.checkpoint import manifest, other_engine
from megascend.checkpoint.manifest import Manifest
from megascend.checkpoint.planners import LoadPlanner
from megascend.checkpoint.random_state import set_random_state
from megascend.checkpoint.reader import Reader
from megascend.distributed.objects import gather_objects, raise_on_all_ranks
from megascend.distributed.process_groups import ProcessGroups
from megascend.engines.base import Engine
from megascend.engines.chunks import Chunks
from megascend.errors import CheckpointError


def verified(directory: Path, groups: ProcessGroups) -> Manifest:
    """The manifest of a checkpoint of which every file is as it was written. Collective; each rank reads a part.

    Raises:
        CheckpointError: on every rank: it is incomplete or damaged; the message says which file.
    """
    problem, found = None, None
    try:
        found = manifest.read(directory)
        names = sorted(found.files)[groups.rank :: groups.world_size]
        problem = "; ".join(manifest.problems(directory, found.files, names)) or None
    except CheckpointError as error:
        problem = str(error)
    problems = [
        text for text in gather_objects(problem, "world", groups, f"whether {directory} is whole") if text is not None
    ]
    if problems or found is None:
        raise CheckpointError(f"{directory} cannot be loaded: {'; '.join(dict.fromkeys(problems))}")
    return found


def check_fits(found: Manifest, mine: Manifest, directory: Path) -> None:
    """Refuse a checkpoint of another model or kind.

    Raises:
        CheckpointError: it does not fit.
    """
    for what in ("model", "precision"):
        if getattr(found, what) != getattr(mine, what):
            raise CheckpointError(
                f"load: {directory} has {what} {getattr(found, what)}, this run has {getattr(mine, what)}"
            )
    if (found.optimizer is None) != (mine.optimizer is None):
        kind = "adapters on a frozen model" if found.optimizer is None else "a model that was trained itself"
        raise CheckpointError(f"load: {directory} holds {kind}; this backend trains the other kind")


def load(engine: Engine, directory: Path, found: Manifest, mine: Manifest) -> None:
    """Read a verified checkpoint into the model and its optimizer, or the adapters and theirs.

    Where the layout is the same, into the random generators as well.

    Raises:
        CheckpointError: it does not hold what this model needs (nothing has been changed then), or it stopped being readable
            half way (the model is of no use then).
        ConfigError: an adapter does not fit; the adapters are those from before then.
    """
    state: dict[str, Any] = engine.state(everything=True)
    random = f"random/{engine.groups.rank}"
    same_engine = found.engine == mine.engine
    same_layout = same_engine and found.layout == mine.layout
    counters = found.optimizer if same_engine else other_engine.counters(mine.optimizer, found.optimizer)
    if same_layout:
        state[random] = None
    if same_engine or engine.trainable.frozen:
        _check_names(state, directory, engine)
    else:
        translation = other_engine.translate(engine, state, directory, found)
        for values in translation.padding:
            values.zero_()
        state = {**translation.reads}
    if engine.trainable.frozen:
        engine.trainable.load_adapters({name: directory / "adapters" / name for name in found.adapters})
    problem = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # Every rank reads what it needs of the files; nothing is planned together.
            dcp.load(state, storage_reader=Reader(directory), planner=LoadPlanner(), no_dist=True)
    except (Exception, CheckpointException) as error:  # noqa: BLE001  reported on every rank
        reason = f"{type(error).__name__}: {error}"
        problem = CheckpointError(f"load: rank {engine.groups.rank} cannot read {directory}: {reason}")
    raise_on_all_ranks(problem, engine.groups, f"whether {directory} could be read")
    if same_layout:
        set_random_state(engine, state[random])
    engine.trainable.restore(found.step, counters)


def _check_names(state: dict[str, Any], directory: Path, engine: Engine) -> None:
    """Hold what is wanted against what there is, before anything is changed."""
    problem, tensors = None, set()
    try:
        stored = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
        tensors = {name for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
        for name, wanted in state.items():
            if name not in stored:
                problem = f"it has no {name}"
            elif isinstance(wanted, Chunks):
                shape: Any = getattr(stored[name], "size", None)
                if tuple(shape or ()) != wanted.shape and not wanted.may_differ:
                    problem = f"{name} has shape {tuple(shape or ())}, here it has {wanted.shape}"
    except Exception as error:  # noqa: BLE001  pickled metadata can fail in any way; reported on every rank
        problem = f"its metadata cannot be read: {error}"
    everyone = gather_objects((problem, list(state)), "world", engine.groups, f"what is needed of {directory}")
    problems = [text for text, _ in everyone if text is not None]
    left = sorted(tensors.difference(*(names for _, names in everyone)))
    if left and not problems:
        problems = [f"it has {left[0]}, for which there is no place here"]
    if problems:
        raise CheckpointError(f"load: {directory} does not fit this model: {problems[0]}")
