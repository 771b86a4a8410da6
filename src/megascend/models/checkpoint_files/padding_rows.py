"""Restore embedding rows that transformers overwrites while it loads a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open

from megascend.errors import CheckpointError
from megascend.models.checkpoint_files.files import TensorHeader


def restore_padding_rows(model: Any, headers: Mapping[str, TensorHeader]) -> None:
    """Copy the row of ``pad_token_id`` of every embedding of a loaded transformers model from the files, in place.

    The row is a token like any other to training.
    """
    # After from_pretrained has read the files, transformers runs _init_weights again, and skips parameters that carry a flag.
    # weight.data[padding_idx] carries none, so architectures that zero the row through it (youtu) lose what the files hold.
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Embedding) or module.padding_idx is None:
            continue
        row = module.weight.data[module.padding_idx]
        header_name = _stored_name(f"{name}.weight", tuple(module.weight.shape), headers)
        if header_name is None:
            if not row.any():
                raise CheckpointError(
                    f"model: row {module.padding_idx} (pad_token_id) of {name} is zero once loaded, and no tensor is known to "
                    "hold it: set pad_token_id: null in config.json"
                )
            continue
        # A slice: only the row is read, not the embedding.
        with safe_open(headers[header_name].file, "pt") as opened:
            row.copy_(opened.get_slice(header_name)[module.padding_idx])


def _stored_name(name: str, shape: tuple[int, ...], headers: Mapping[str, TensorHeader]) -> str | None:
    """Return the name of an embedding in the files, which may lack or have prefixes; None unless it is the only one."""
    in_files = {key for key, header in headers.items() if header.shape == shape and header.file is not None}
    if name in in_files:
        return name
    ending = "." + ".".join(name.split(".")[-2:])
    alike = [key for key in in_files if f".{key}".endswith(ending)]
    return alike[0] if len(alike) == 1 else None
