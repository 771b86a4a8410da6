"""Models and data by their names on the Hugging Face Hub, such as ``Qwen/Qwen3-0.6B``, downloaded by huggingface_hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from megascend.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from megascend.config import TrainerConfig

Settings = TypeVar("Settings", bound="TrainerConfig")
NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
"""A repository, ``owner/name``, optionally with a branch, a tag or a commit."""
FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md", ".rst", ".safetensors", ".yaml")
"""Endings of files, which are not names of repositories."""
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ckpt", "original/*", "metal/*")
"""Files of models that are not read: weights in other formats."""


def with_snapshots(config: Settings) -> Settings:
    """Return the settings with directories in place of names on the Hub.

    Raises:
        CheckpointError, DataError: a model or data can neither be downloaded nor are they in the Hub's cache.
    """
    from megascend.config import RunConfig

    changes: dict[str, Any] = {"model": snapshot(config.model, "model", "model")}
    if isinstance(config, RunConfig):
        data, validation = config.data, config.validation
        sources = tuple(
            source.model_copy(update={"path": snapshot(source.path, "dataset", f"data.sources[{number}]")})
            for number, source in enumerate(data.sources)
        )
        path = None if data.path is None else snapshot(data.path, "dataset", "data.path")
        # Prepared samples are read without the data.
        if data.prepared is None:
            changes["data"] = data.model_copy(update={"path": path, "sources": sources})
        if validation is not None and validation.path is not None and data.prepared is None:
            held_out = snapshot(validation.path, "dataset", "validation.path")
            changes["validation"] = validation.model_copy(update={"path": held_out})
    return config.model_copy(update=changes)


def snapshot(path: Path, kind: Literal["model", "dataset"], setting: str) -> Path:
    """Return a path as it is if it exists or is not a name on the Hub, else the directory with the downloaded files.

    Without a network, that is what the Hub's cache has of an earlier download.
    """
    match = NAME.fullmatch(str(path))
    # A folder of that name here: the path is one within it.
    if path.exists() or path.parent.exists() or match is None or path.suffix in FILES:
        return path
    from huggingface_hub import constants, snapshot_download

    repository, revision = match["repository"], match["revision"]
    try:
        return Path(
            snapshot_download(
                repository,
                repo_type=kind,
                revision=revision,
                ignore_patterns=list(OTHER_WEIGHTS) if kind == "model" else None,
            )
        )
    except (OSError, ValueError) as error:  # its own errors are of these kinds
        reason = " ".join(str(error).split())
        option = f" --revision {revision}" if revision else ""
        dataset = " --repo-type dataset" if kind == "dataset" else ""
        message = (
            f"{setting}: {path} does not exist here, and as a name on the Hugging Face Hub ({constants.ENDPOINT}) it cannot be "
            f"downloaded: {type(error).__name__}: {reason:.300}. On a machine without a network: run 'hf download {repository}"
            f"{dataset}{option}' where there is one, and copy the Hub's cache ({constants.HF_HUB_CACHE}) or the files, whose "
            f"directory {setting} can be; a private repository needs HF_TOKEN"
        )
        raise (CheckpointError if kind == "model" else DataError)(message) from error
