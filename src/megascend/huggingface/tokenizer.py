"""Read the tokenizer of a model's directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megascend.errors import CheckpointError
from megascend.huggingface.architectures import make_known_to_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's directory; nothing is downloaded."""
    from transformers import AutoTokenizer

    if not model.is_dir():
        raise CheckpointError(f"no model at {model.absolute()} (model): the directory does not exist")
    make_known_to_transformers(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:  # tokenizers raises nothing narrower
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{model}: transformers cannot load the tokenizer (tokenizer.json): {text}") from error
    # Without a vocabulary, transformers creates an empty one, with which all texts are equal.
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ordinary = len(tokenizer) - len(added | set(tokenizer.all_special_ids))
    if ordinary < 2:
        raise CheckpointError(
            f"{model}: the tokenizer knows {len(tokenizer)} token{'s' if len(tokenizer) != 1 else ''}, of which {ordinary} are "
            "not special: its vocabulary is missing; copy tokenizer.json (or tokenizer.model) from the model's source"
        )
    return tokenizer
