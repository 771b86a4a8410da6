"""Reading a checkpoint that an engine of another kind has written, each rank what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megascend.checkpoint import hf_parts_file
from megascend.checkpoint.manifest import Manifest
from megascend.distributed.objects import gather_objects
from megascend.engines.base import Engine
from megascend.engines.chunks import Chunks
from megascend.engines.hf_parts import Translation, translated
from megascend.errors import CheckpointError


def translate(engine: Engine, state: dict[str, Any], directory: Path, found: Manifest) -> Translation:
    """Where this rank's tensors are in a checkpoint of another engine. Collective; nothing has been changed afterwards.

    Raises:
        CheckpointError: on every rank: it does not say what its tensors are, or lacks something, or has something for which
            there is no place.
    """
    problem, translation, theirs = None, Translation(), {}
    mine = engine.hf_parts()
    try:
        theirs = hf_parts_file.read(directory)
        translation = translated(state, mine, theirs, _stored(directory))
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001  pickled metadata can fail in any way; reported on every rank
        problem = f"its metadata cannot be read: {error}"
    what = f"what is needed of {directory}"
    everyone = gather_objects((problem, sorted(translation.weights)), "world", engine.groups, what)
    problems = [text for text, _ in everyone if text is not None]
    held = {part.weight for parts in theirs.values() for part in parts}
    left = sorted(held.difference(*(weights for _, weights in everyone)))
    if left and not problems:
        problems = [f"it has {left[0]}, for which there is no place here"]
    if problems:
        raise CheckpointError(
            f"load: engine {engine.kind} cannot continue {directory} of engine {found.engine}: {problems[0]}. Continue it with "
            f"engine {found.engine}, or export its weights there (export_hf)"
        )
    return translation


def counters(mine: dict[str, Any] | None, theirs: dict[str, Any] | None) -> dict[str, Any] | None:
    """The optimizer's counters of a checkpoint as this engine has them: of the fp16 scaler, the scale is what all have."""
    if mine is None or theirs is None or theirs["scaler"] is None:
        return theirs
    return {**theirs, "scaler": {**(mine["scaler"] or {}), "scale": theirs["scaler"]["scale"]}}


def _stored(directory: Path) -> dict[str, Chunks]:
    """Shape and dtype of every tensor of a checkpoint."""
    entries = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    return {
        name: Chunks(tuple(entry.size), entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
