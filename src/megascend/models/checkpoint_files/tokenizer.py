"""Read the tokenizer of a model's directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.errors import CheckpointError, DataError
from megascend.models.checkpoint_files.architectures import make_known_to_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANCHORS = ("\n", "\x02", "(", "a")
"""Texts after which others are encoded; most vocabularies have no token that joins the first two with what follows."""


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
            "not special: its vocabulary is missing; copy tokenizer.json from the model's source"
        )
    return tokenizer


def following_tokens(text: str, tokenizer: PreTrainedTokenizerBase, before: str = "") -> list[int]:
    """Return the token ids of a text in the middle of a sequence, as a tokenizer of the whole sequence writes them.

    Tokenizers like those of SentencePiece begin what they encode with a space, which a text that follows others does not have.

    Args:
        before: end of the sequence's text before it, on which the tokens depend if it is a special token.

    Raises:
        DataError: such a tokenizer joins the text with whatever is before it.
    """

    def ids(content: str) -> list[int]:
        encoded: Any = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
        return list(encoded)

    for anchor in filter(None, (before, *ANCHORS)):
        first, both = ids(anchor), ids(anchor + text)
        if first and both[: len(first)] == first:
            return both[len(first) :]
    # Of a text that merges with all of them, and a tokenizer that adds nothing, it is as it is.
    if not text or ids(text + text)[: len(ids(text))] * 2 == ids(text + text):
        return ids(text)
    raise DataError(
        f"the tokenizer cannot write {text!r:.60} in the middle of a sequence: begin it with another character"
    )
