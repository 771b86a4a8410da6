"""Tensors of Hugging Face directories."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file


def exported_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a Hugging Face directory by name."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
