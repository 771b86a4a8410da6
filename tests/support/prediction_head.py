"""Tiny checkpoints with a head for multi-token prediction."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def add_prediction_head(source: Path, target: Path) -> Path:
    """Write the checkpoint ``source`` with its last layer as the head of the layers before it; return ``target``."""
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    layers = config["num_hidden_layers"] - 1
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    if config.get("mlp_layer_types"):
        config["mlp_layer_types"] = config["mlp_layer_types"][:layers]
    embedding = tensors["model.embed_tokens.weight"]
    width, head, dtype = config["hidden_size"], f"model.layers.{layers}.", embedding.dtype
    generator = torch.Generator().manual_seed(5)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{head}{name}.weight"] = (1.0 + 0.2 * torch.randn(width, generator=generator)).to(dtype)
    projection = torch.randn(width, 2 * width, generator=generator) / (2 * width) ** 0.5
    tensors[f"{head}eh_proj.weight"] = projection.to(dtype)
    tensors[f"{head}embed_tokens.weight"] = embedding.clone()
    tensors[f"{head}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target
