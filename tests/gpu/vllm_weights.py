"""Weights of a checkpoint with noise: the same for a test and the trainers that it starts."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file


def changed_weights(
    checkpoint: Path, seed: int, device: torch.device | str = "cpu", scale: float = 0.05
) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors in bfloat16, with noise of a seed; those of seed 0 are unchanged."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, tensor in sorted(load_file(checkpoint / "model.safetensors").items()):
        noise = torch.randn(tensor.shape, generator=generator) * (scale if seed else 0.0)
        weights[name] = (tensor.float() + noise).to(device, torch.bfloat16)
    return weights
