"""The architecture of a checkpoint directory, and how transformers learns of it in each process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megascend.huggingface.files import read_config
from megascend.models import Architecture, architecture_of


def architecture_in(model_dir: Path) -> Architecture:
    """Return the declaration of the model in a directory."""
    return architecture_of(read_config(model_dir))


def transformers_config(model_dir: Path) -> Any:
    """Return transformers' configuration of the model in a directory, without its quantisation: weights are read dequantised."""
    from transformers import AutoConfig

    make_known_to_transformers(model_dir)
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        part.__dict__.pop("quantization_config", None)
    return config


def make_known_to_transformers(model_dir: Path) -> None:
    """Import what transformers needs to read the model in a directory, if its declaration names a module for it."""
    architecture = architecture_in(model_dir)
    architecture.make_known_to_transformers()
