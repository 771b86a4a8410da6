"""What settings, model and directories say about a run before it starts, whatever kind of run it is. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megascend.app.resume import RUN_FILES
from megascend.config import TrainerConfig
from megascend.errors import ConfigError
from megascend.huggingface.info import inspect_checkpoint
from megascend.io.paths import real


def check_settings(config: TrainerConfig, read: Mapping[str, Path | None], overwrite: bool) -> None:
    """Refuse settings that cannot work with this model, or whose paths are in each other's way.

    Args:
        read: the data that the run reads, by their setting.

    Raises:
        ConfigError: they cannot; the message names value, limit and setting.
        CheckpointError: the model is missing or damaged, as far as file headers tell.
    """
    check_paths(config, {name: path for name, path in read.items() if path is not None}, overwrite)
    context, longest = inspect_checkpoint(config.model).shape.max_position, config.batching.max_length
    if longest is not None and context is not None and longest > context:
        raise ConfigError(
            f"batching.max_length: {longest} is above the model's context of {context} tokens (max_position_embeddings in "
            f"{config.model / 'config.json'}): set {context} or less, or leave it out"
        )


def check_paths(config: TrainerConfig, read: Mapping[str, Path], overwrite: bool) -> None:
    """Refuse an output directory whose files would be read as data, or a run that would overwrite what it reads.

    Raises:
        ConfigError: it would.
    """
    output = real(config.output)
    for setting, path in read.items():
        if path.is_dir() and output.is_relative_to(real(path)):
            raise ConfigError(
                f"output: {config.output} lies in {setting}: {path}, so the run's files would be read as data: choose another"
            )
    for setting, path in {"model": config.model, **read}.items():
        places = {real(path), path.absolute()}  # a link itself is removed, too, and what a run has put behind its own
        for name in RUN_FILES if overwrite else ():
            cleared = (output / name, config.output.absolute() / name, real(output / name))
            if any(place.is_relative_to(above) for place in places for above in cleared):
                raise ConfigError(
                    f"{setting}: {path} is one of the files of an earlier run in output: {config.output}, which --overwrite "
                    "removes: choose another output, or copy it first"
                )
