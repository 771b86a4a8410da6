"""What a critic of verl's ends with: the head that its checkpoint has, or a new one. Reads headers alone."""

from __future__ import annotations

from pathlib import Path

from megascend.errors import ConfigError
from megascend.huggingface.files import tensor_headers
from megascend.huggingface.info import inspect_checkpoint
from megascend.huggingface.scalar_head import WEIGHT, HeadKind

DESCRIPTIONS: dict[HeadKind, str] = {
    "scalar": "a critic with the head of its checkpoint",
    "new_token_classifier": "a critic with a new head",
}


def head(model_dir: Path) -> HeadKind:
    """As verl's other engines: a checkpoint without a head gets a new one.

    Raises:
        ConfigError: the checkpoint asks for dropout before the head, which verl switches off in all critics.
        CheckpointError: its head is not one of a number for each token.
    """
    if WEIGHT not in tensor_headers(model_dir):
        return "new_token_classifier"
    found = inspect_checkpoint(model_dir, "scalar").scalar_head
    assert found is not None
    if found.dropout:
        raise ConfigError(
            f"{model_dir}/config.json: a critic of verl has no dropout before its head, and classifier_dropout is "
            f"{found.dropout:g} here (transformers' default where none is given); set classifier_dropout: 0 there"
        )
    return "scalar"
