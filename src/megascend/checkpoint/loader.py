"""Reading a checkpoint: first whether it is whole and fits, then into the live tensors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megascend.checkpoint import manifest
from megascend.checkpoint.manifest import Manifest
from megascend.checkpoint.random_state import set_random_state
from megascend.checkpoint.shards import LoadPlanner, Shards
from megascend.checkpoint.state import model_state, optimizer_state
from megascend.distributed.objects import gather_objects
from megascend.errors import CheckpointError

if TYPE_CHECKING:
    from megascend.distributed.process_groups import ProcessGroups
    from megascend.engines.megatron.engine import MegatronStrategy
    from megascend.lora.manager import AdapterManager


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


def load(strategy: MegatronStrategy, directory: Path, found: Manifest, mine: Manifest) -> None:
    """Read a verified checkpoint into the model and its optimizer, or the adapters and theirs.

    Where the layout is the same, into the random generators as well.

    Raises:
        CheckpointError: it does not hold what this model needs (nothing has been changed then), or it stopped being readable
            half way (the model is of no use then).
        ConfigError: an adapter does not fit; the adapters are those from before then.
    """
    state: dict[str, Any] = {}
    if strategy.adapters is None:
        strategy.finish_param_gather()
        state = {**model_state(strategy, everything=True), **optimizer_state(strategy, everything=True)}
    random = f"random/{strategy.groups.rank}"
    same_layout = found.layout == mine.layout
    if same_layout:
        state[random] = None
    _check_names(state, directory, strategy)
    if strategy.adapters is not None:
        _load_adapters(strategy.adapters, directory, found)
    problem = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # Every rank reads what it needs of the files; nothing is planned together.
            dcp.load(state, storage_reader=dcp.FileSystemReader(directory), planner=LoadPlanner(), no_dist=True)
    except (Exception, CheckpointException) as error:  # noqa: BLE001  reported on every rank
        problem = f"rank {strategy.groups.rank} cannot read {directory}: {type(error).__name__}: {error}"
    told = gather_objects(problem, "world", strategy.groups, f"whether {directory} could be read")
    problems = [text for text in told if text is not None]
    if problems:
        raise CheckpointError(f"load: {problems[0]}")
    if same_layout:
        set_random_state(state[random])
    if strategy.adapters is None and found.optimizer is not None:
        optimizer, saved = strategy.optimizer, found.optimizer
        optimizer.updates = saved["updates"]
        optimizer.scaler_state = saved["scaler"]
        optimizer.step_count, optimizer.skipped_in_a_row = found.step, saved["skipped_in_a_row"]
        optimizer.zero_grad()


def _load_adapters(host: AdapterManager, directory: Path, found: Manifest) -> None:
    """Have exactly the adapters of a checkpoint, or, if one does not fit, those from before."""
    before = dict(host.registry)
    for name in before:
        host.forget(name)
    try:
        for name in found.adapters:
            host.load(name, directory / "adapters" / name, optimizer=True)
    except BaseException:
        for name in list(host.registry):
            host.forget(name)
        for adapter in before.values():
            host.registry.add(adapter)
        raise


def _check_names(state: dict[str, Any], directory: Path, strategy: MegatronStrategy) -> None:
    """Hold what is wanted against what there is, before anything is changed."""
    problem, tensors = None, set()
    try:
        stored = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
        tensors = {name for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
        for name, wanted in state.items():
            if name not in stored:
                problem = f"it has no {name}"
            elif isinstance(wanted, Shards):
                shape: Any = getattr(stored[name], "size", None)
                if tuple(shape or ()) != wanted.shape and not wanted.may_differ:
                    problem = f"{name} has shape {tuple(shape or ())}, here it has {wanted.shape}"
    except Exception as error:  # noqa: BLE001  pickled metadata can fail in any way; reported on every rank
        problem = f"its metadata cannot be read: {error}"
    everyone = gather_objects((problem, list(state)), "world", strategy.groups, f"what is needed of {directory}")
    problems = [text for text, _ in everyone if text is not None]
    left = sorted(tensors.difference(*(names for _, names in everyone)))
    if left and not problems:
        problems = [f"it has {left[0]}, for which there is no place here"]
    if problems:
        raise CheckpointError(f"load: {directory} does not fit this model: {problems[0]}")
