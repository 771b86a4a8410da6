"""Model, optimizer and random state of all ranks in one directory, in Megatron-Core's distributed format.

Megatron's own writer starts two kinds of helper processes for every save (about four seconds, and a script without a
main guard hangs in them). :class:`_DirectSave` keeps Megatron's format and hands the writing to torch's plain
``FileSystemWriter``, which uses threads; planning goes over Gloo.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

from megascend.errors import CheckpointError
from megascend.huggingface.files import replace_directory
from megascend.parallel.objects import barrier, gather_objects
from megascend.parallel.process_groups import ProcessGroups
from megascend.strategy.megatron import MegatronStrategy

FORMAT = 1
MANIFEST = "megascend.json"
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}
"""Optimizer state is keyed by parameter, not by bucket, so that another layout can read it."""


class _DirectSave(TorchDistSaveShardedStrategy):
    """Saves synchronously, in this process."""

    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__("torch_dist", 1)
        self._gloo = groups.gloo("world")
        # Copying ahead, torch leaves tensors on the device whose type is not the one it takes for this machine's: MindSpeed
        # makes torch.cuda.is_available() true, and NPU tensors would not be copied at all.
        self._copy_ahead = 10_000_000 if groups.device.type == "cuda" else 0

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:  # type: ignore[override]
        tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        dcp.save(
            mcore_to_pyt_state_dict(tensors, False),
            storage_writer=dcp.FileSystemWriter(
                checkpoint_dir, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=self._copy_ahead
            ),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
            process_group=self._gloo,
        )


def save(strategy: MegatronStrategy, path: Path) -> None:
    """Write a checkpoint; ``path`` appears, or is replaced, only when it is complete.

    Raises:
        CheckpointError: ``path`` exists and is not a megascend checkpoint.
    """
    groups = strategy.groups
    refusal = None
    if groups.rank == 0 and path.exists() and not (path / MANIFEST).is_file():
        refusal = f"save: {path} exists and is no megascend checkpoint; choose another directory"
    _agree(refusal, groups)
    strategy.finish_param_gather()
    temporary = path.with_name(f".{path.name}.writing")
    if groups.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    barrier(groups, label="save")
    dist_checkpointing.save(
        _state(strategy, loading=False),
        str(temporary),
        sharded_strategy=_DirectSave(groups),
        validate_access_integrity=False,
        content_metadata=SHARDING,
    )
    if groups.rank == 0:
        (temporary / MANIFEST).write_text(json.dumps(_manifest(strategy), indent=2) + "\n")
        replace_directory(temporary, path)
    barrier(groups, label="save")


def load(strategy: MegatronStrategy, path: Path) -> None:
    """Read a checkpoint into the model, the optimizer and the random generators.

    Model and optimizer load under another layout too; random state is restored where the layout is the same.

    Raises:
        CheckpointError: there is none, or it is of another format or model; nothing has been changed.
    """
    problem = None
    manifest: dict[str, Any] = {}
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        problem = f"load: {path / MANIFEST} is missing; the directory is no complete megascend checkpoint"
    except json.JSONDecodeError as error:
        problem = f"load: {path / MANIFEST} is damaged: {error}"
    mine = _manifest(strategy)
    for key in ("format", "model"):
        if problem is None and manifest.get(key) != mine[key]:
            problem = f"load: {path} has {key} {manifest.get(key)}, this run has {mine[key]}"
    _agree(problem, strategy.groups)
    strategy.finish_param_gather()
    same_layout = manifest["layout"] == mine["layout"]
    state = _state(strategy, loading=True, with_random_state=same_layout)
    try:
        loaded: Any = dist_checkpointing.load(state, str(path), validate_access_integrity=False)
    except Exception as error:
        raise CheckpointError(f"load: rank {strategy.groups.rank} cannot read {path}: {error}") from error
    for index, chunk in enumerate(strategy.bare_chunks):
        chunk.load_state_dict(loaded[f"model{index}"], strict=True)
    strategy.optimizer.megatron.load_state_dict(loaded["optimizer"])
    strategy.optimizer.step_count = manifest["step"]
    strategy.optimizer.skipped_in_a_row = manifest["skipped_in_a_row"]
    if same_layout:
        _set_random_state(loaded["random"])
    strategy.optimizer.zero_grad()


def _state(strategy: MegatronStrategy, loading: bool, with_random_state: bool = True) -> dict[str, Any]:
    strategy.optimizer.create_state()
    metadata = {**SHARDING, "dp_cp_group": strategy.groups.device_group("dp_cp")}
    state: dict[str, Any] = {}
    for index, chunk in enumerate(strategy.bare_chunks):
        state[f"model{index}"] = chunk.sharded_state_dict(metadata=metadata)
    # Megatron keys the optimizer's shards by those of the model: one dictionary over all chunks.
    model = {key: value for name, part in state.items() for key, value in _prefixed(name, part).items()}
    if len(strategy.chunks) == 1:
        model = state["model0"]
    state["optimizer"] = strategy.optimizer.megatron.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    if with_random_state:
        rank, world = strategy.groups.rank, strategy.topology.world_size
        state["random"] = ShardedObject("random", _random_state(), (world,), (rank,))
    return state


def _prefixed(name: str, part: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}.{key}": value for key, value in part.items()}


def _manifest(strategy: MegatronStrategy) -> dict[str, Any]:
    topology, shape = strategy.topology, strategy.shape
    return {
        "format": FORMAT,
        "stack": strategy.runtime.stack.name,
        "model": {"layers": shape.num_layers, "hidden": shape.hidden_size, "vocabulary": shape.vocab_size},
        "layout": {
            axis: getattr(topology, axis)
            for axis in ("tensor", "pipeline", "virtual_pipeline", "context", "data", "expert", "expert_tensor")
        },
        "step": strategy.optimizer.step_count,
        "skipped_in_a_row": strategy.optimizer.skipped_in_a_row,
    }


def _random_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),  # type: ignore[reportOptionalMemberAccess]
    }


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])  # type: ignore[reportOptionalMemberAccess]


def _agree(problem: str | None, groups: ProcessGroups) -> None:
    found = [text for text in gather_objects(problem, "world", groups) if text is not None]
    if found:
        raise CheckpointError(found[0])
