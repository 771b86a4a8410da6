"""Which characters a token stands for, with the space in it."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def with_whole_offsets(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer; or a copy of one that leaves spaces out of its offsets (``trim_offsets``), which does not.

    Without them a token of spaces alone stands nowhere: at its end, as if it belonged to what follows. Token ids are the same.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    processor = getattr(backend, "post_processor", None)
    if processor is None:
        return tokenizer
    state = json.loads(processor.__getstate__())
    if not _trims(state):
        return tokenizer
    from tokenizers.processors import ByteLevel

    changed = ByteLevel()
    changed.__setstate__(json.dumps(_untrimmed(state)).encode())  # of any kind
    own: Any = copy.deepcopy(tokenizer)
    own.backend_tokenizer.post_processor = changed
    return own


def _trims(state: Any) -> bool:
    if isinstance(state, list):
        return any(map(_trims, state))
    return isinstance(state, dict) and (bool(state.get("trim_offsets")) or any(map(_trims, state.values())))


def _untrimmed(state: Any) -> Any:
    if isinstance(state, list):
        return [_untrimmed(entry) for entry in state]
    if not isinstance(state, dict):
        return state
    return {name: False if name == "trim_offsets" else _untrimmed(entry) for name, entry in state.items()}
