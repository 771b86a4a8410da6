"""The base model's own weights that peft saves beside factors of embedding and output layer.

peft would put them into the model. They are frozen, so they are those of the base model already; if not, the adapter belongs
to another one (or to one that was resized, or trained otherwise as well), and its factors alone would mean something else.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megascend.errors import CheckpointError
from megascend.huggingface.files import weight_files
from megascend.lora.peft_tensors import WEIGHTS, base_layer


def check_base_weights(adapter: Path, model_dir: Path) -> None:
    """Hold the base model's weights among an adapter's against the model's, in the less precise dtype of the two.

    Raises:
        CheckpointError: one differs.
    """
    try:
        with safe_open(adapter / WEIGHTS, "pt") as file:
            for key in file.keys():  # noqa: SIM118, it is no dict
                module = base_layer(key)
                if module is not None and not equal(file.get_tensor(key), read_tensor(model_dir, f"{module}.weight")):
                    raise CheckpointError(
                        f"{adapter}: {WEIGHTS} holds {key}, which is not the weight of {module} in {model_dir}; the adapter "
                        "was trained on another model, or that weight was trained or resized beside it"
                    )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{adapter}: {WEIGHTS} or the weights of {model_dir} cannot be read: {error}") from None


def equal(one: Tensor, other: Tensor | None) -> bool:
    """Whether two weights are the same but for a dtype that they were rounded to."""
    if other is None or one.shape != other.shape:
        return False
    dtype = one.dtype if one.dtype.itemsize <= other.dtype.itemsize else other.dtype
    return torch.equal(one.to(dtype), other.to(dtype))


def read_tensor(model_dir: Path, name: str) -> Tensor | None:
    """A tensor of a Hugging Face checkpoint, or None if it has none of that name."""
    for path in weight_files(model_dir):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118
                return file.get_tensor(name)
    return None
