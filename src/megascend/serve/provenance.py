"""Losses that count sampled tokens only: what a sample says of where its tokens come from becomes its weights. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from megascend.errors import DataError
from megascend.serve.sequences import RecordedSequence
from megascend.serve.spans import Span
from megascend.serve.wire import Datum


def with_recorded(datum: Datum, find: Callable[[str], RecordedSequence]) -> Datum:
    """A sample whose ``logprobs`` are those that were recorded when its tokens were sampled; other tokens have weight 0.

    Args:
        find: a recorded sequence by its id; raises DataError for others.

    Raises:
        DataError: it does not say where all its tokens are from, says what was not recorded, or has an advantage elsewhere.
    """
    targets, advantages = datum.inputs.get("target_tokens"), datum.inputs.get("advantages")
    if not datum.target_spans:
        raise DataError("stable_reinforce needs the provenance of tokens and targets (Datum.with_provenance)")
    if targets is None or advantages is None or targets.ndim != 1 or targets.shape != advantages.shape:
        raise DataError("stable_reinforce takes target_tokens and advantages of one shape [n]")
    given = datum.inputs.get("weights", np.ones(targets.shape, np.float32))
    if given.shape != targets.shape:
        raise DataError(f"weights {list(given.shape)}, target_tokens {list(targets.shape)}: must have one shape")
    for place, _, tokens, _ in _covered(datum.token_spans, len(datum.tokens), "tokens", find):
        _check_equal(datum.tokens[place], tokens, "tokens", place)
    logprobs, sampled = np.zeros(targets.shape, np.float32), np.zeros(targets.shape, np.float32)
    for place, span, tokens, found in _covered(datum.target_spans, len(targets), "target_tokens", find):
        if span.sampled:
            _check_equal(targets[place], tokens, "target_tokens", place)
            logprobs[place], sampled[place] = found, 1.0
    if np.any(advantages[sampled == 0] != 0):
        raise DataError("stable_reinforce: advantages other than 0 stand on tokens that were not sampled")
    return replace(datum, inputs={**datum.inputs, "logprobs": logprobs, "weights": given * sampled})


def _covered(spans: Sequence[Span], count: int, what: str, find: Callable[[str], RecordedSequence]):
    """(slice of the field, span, tokens, log-probabilities or None) of each span, which cover ``count`` places."""
    if sum(span.length for span in spans) != count or any(min(span.length, span.offset) < 0 for span in spans):
        raise DataError(f"the provenance covers {sum(span.length for span in spans)} {what} of {count}")
    start = 0
    for span in spans:
        recorded = find(span.sequence)
        tokens = recorded.tokens if span.sampled else recorded.prompt
        part = slice(span.offset, span.offset + span.length)
        if part.stop > len(tokens):
            kind = "sampled tokens" if span.sampled else "tokens of its prompt"
            raise DataError(
                f"sequence {span.sequence[:160]!r} has {len(tokens)} {kind}; the provenance names {part.stop}"
            )
        yield slice(start, start + span.length), span, tokens[part], recorded.logprobs[part] if span.sampled else None
        start += span.length


def _check_equal(given: np.ndarray, recorded: np.ndarray, what: str, place: slice) -> None:
    wrong = np.flatnonzero(given != recorded)
    if len(wrong):
        at = int(wrong[0])
        raise DataError(
            f"{what}[{place.start + at}] is {int(given[at])}, the sequence that its provenance names has {int(recorded[at])}"
        )


def with_ratio_mask(datum: Datum) -> Datum:
    """A sample of ``gspo`` whose ``sequence_ratio_mask``, if it has one, stands in its weights, so that the ratio is theirs.

    Raises:
        DataError: it has another shape, or a token that it leaves out has an advantage.
    """
    mask, advantages = datum.inputs.get("sequence_ratio_mask"), datum.inputs.get("advantages")
    if mask is None or advantages is None:
        return datum
    weights = datum.inputs.get("weights", np.ones(mask.shape, np.float32))
    if not mask.shape == advantages.shape == weights.shape:
        raise DataError(
            f"sequence_ratio_mask {list(mask.shape)}, advantages {list(advantages.shape)}: must have one shape"
        )
    if np.any(advantages[mask == 0] != 0):
        raise DataError("gspo: advantages other than 0 stand on tokens that sequence_ratio_mask leaves out")
    others = {name: found for name, found in datum.inputs.items() if name != "sequence_ratio_mask"}
    return replace(datum, inputs={**others, "weights": np.where(mask != 0, weights, np.float32(0))})
