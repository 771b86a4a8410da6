"""Whether a run's output will have room for what the run writes."""

from __future__ import annotations

import shutil
from pathlib import Path

from megascend.app.earlier_run import CHECKPOINTS
from megascend.config import TrainerConfig
from megascend.huggingface.info import inspect_checkpoint

CHECKPOINT_BYTES = 14
"""Of a parameter in a checkpoint: the weight in bf16, the fp32 original and two moments."""


def disk_needed(config: TrainerConfig, parameters: int) -> int:
    """Bytes of the checkpoints that are kept, the one that is being written, and the export; of an adapter none to speak of.

    A run without ``checkpoint.every`` writes one when a signal stops it.
    """
    if config.lora is not None:
        return 0
    of_weight = 4 if config.precision == "fp32" else 2
    kept = config.checkpoint.keep_last + 1 if config.checkpoint.every else 1
    if config.checkpoint.every and config.checkpoint.keep_every:
        kept += config.steps // config.checkpoint.keep_every
    exports = config.export + (kept if config.checkpoint.hf else 0)
    return parameters * (kept * CHECKPOINT_BYTES + exports * of_weight)


def disk_warning(config: TrainerConfig) -> str | None:
    """What is missing, in a sentence; None if there is room. What an earlier run has left gives way, or is there already.

    Raises:
        CheckpointError: the model is missing or damaged, as far as file headers tell.
    """
    earlier = [path for name in (CHECKPOINTS, "hf") for path in (config.output / name).rglob("*") if path.is_file()]
    needed = disk_needed(config, inspect_checkpoint(config.model).parameter_count)
    free = free_bytes(config.output) + sum(path.stat().st_size for path in earlier)
    if needed <= free:
        return None
    return (
        f"output: {config.output} has {in_words(free)} free, and checkpoints and export will take about {in_words(needed)}: make "
        "room, choose another output, or lower checkpoint.keep_last"
    )


def free_bytes(path: Path) -> int:
    """Of the disk on which a path is, or will be."""
    path = path.resolve()
    return shutil.disk_usage(next(each for each in (path, *path.parents) if each.is_dir())).free


def in_words(count: int) -> str:
    """Bytes in a unit that leaves few digits."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
