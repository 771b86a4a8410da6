"""The architecture of a checkpoint directory, and how transformers learns of it in each process."""

from __future__ import annotations

from pathlib import Path

from megascend.huggingface.files import read_config
from megascend.models import Architecture, architecture_of


def architecture_in(model_dir: Path) -> Architecture:
    """Return the declaration of the model in a directory."""
    return architecture_of(read_config(model_dir))


def make_known_to_transformers(model_dir: Path) -> None:
    """Import what transformers needs to read the model in a directory, if its declaration names a module for it."""
    architecture = architecture_in(model_dir)
    if architecture.transformers is not None:
        architecture.import_module(architecture.transformers)
