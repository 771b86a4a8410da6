"""Checkpoints without weights: a configuration, and a sparse file whose header names every tensor.

With them, parameters, layouts and memory of a model can be computed without its weights, or disk space for them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megascend.models.checkpoint_files.architectures import architecture_in, transformers_config
from megascend.models.checkpoint_files.files import WEIGHT_FILE

BF16_BYTES = 2


def write_sparse_checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write ``config.json`` and a sparse bf16 safetensors file with the tensors of transformers' model; return ``folder``.

    Names and shapes are those under which transformers saves the model. Imports torch; takes seconds and no memory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    header, offset = {}, 0
    for name, shape in tensor_shapes(folder).items():
        end = offset + BF16_BYTES * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    content = json.dumps(header).encode()
    with (folder / WEIGHT_FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        file.truncate(8 + len(content) + offset)
    return folder


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the model of ``config.json``, built on torch's meta device, by their names in a checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.core_model_loading import revert_weight_conversion

    config = transformers_config(folder)
    loader = AutoModelForCausalLM if architecture_in(folder).images is None else AutoModelForImageTextToText
    with torch.device("meta"):
        model: Any = loader.from_config(config)
    tensors = model.state_dict()
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, tensors).items()}
