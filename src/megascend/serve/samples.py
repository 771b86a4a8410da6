"""From what clients call a datum and a loss to megascend's samples and losses, and back. No ranks, no device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megascend.batch.losses import BUILT_IN, Loss, LossInputs
from megascend.batch.sample import Sample
from megascend.errors import ConfigError, DataError
from megascend.serve.api.bodies import as_float
from megascend.serve.api.wire import Datum, Span
from megascend.serve.samplers.sequences import RecordedSequence


def with_recorded(datum: Datum, find: Callable[[str], RecordedSequence]) -> Datum:
    """Give a sample the ``logprobs`` that were recorded when its tokens were sampled, and other tokens weight 0.

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
    weights = datum.inputs.get("weights", np.ones(targets.shape, np.float32))
    if weights.shape != targets.shape:
        raise DataError(f"weights {list(weights.shape)}, target_tokens {list(targets.shape)}: must have one shape")
    for place, _, tokens, _ in _covered(datum.token_spans, len(datum.tokens), "tokens", find):
        _check_equal(datum.tokens[place], tokens, "tokens", place)
    logprobs, sampled = np.zeros(targets.shape, np.float32), np.zeros(targets.shape, np.float32)
    for place, span, tokens, recorded in _covered(datum.target_spans, len(targets), "target_tokens", find):
        if span.sampled:
            _check_equal(targets[place], tokens, "target_tokens", place)
            logprobs[place], sampled[place] = recorded, 1.0
    if np.any(advantages[sampled == 0] != 0):
        raise DataError("stable_reinforce: advantages other than 0 stand on tokens that were not sampled")
    return replace(datum, inputs={**datum.inputs, "logprobs": logprobs, "weights": weights * sampled})


def _covered(spans: Sequence[Span], count: int, what: str, find: Callable[[str], RecordedSequence]):
    """Yield (slice of the field, span, tokens, log-probabilities or None) of each span, which cover ``count`` places."""
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


def _check_equal(actual: np.ndarray, recorded: np.ndarray, what: str, place: slice) -> None:
    wrong = np.flatnonzero(actual != recorded)
    if len(wrong):
        at = int(wrong[0])
        raise DataError(
            f"{what}[{place.start + at}] is {int(actual[at])}, the sequence that its provenance names has {int(recorded[at])}"
        )


def with_ratio_mask(datum: Datum) -> Datum:
    """Move ``sequence_ratio_mask`` of a sample of ``gspo``, if it has one, into its weights, so that the ratio is theirs.

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
    others = {name: tensor for name, tensor in datum.inputs.items() if name != "sequence_ratio_mask"}
    return replace(datum, inputs={**others, "weights": np.where(mask != 0, weights, np.float32(0))})


POLICY = ("importance_sampling", "ppo", "cispo", "gspo", "dro", "stable_reinforce")
_RENAMED = {"target_tokens": "target_ids", "weights": "weights", "logprobs": "old_logprobs", "advantages": "advantages"}
MAX_COLUMNS = 64
"""Most targets of one position."""


def loss_of(name: str, settings: Mapping[str, Any]) -> Loss:
    """Return the loss that clients know by ``name``: a sum over tokens.

    Args:
        settings: ``clip_low_threshold`` and ``clip_high_threshold`` bound the ratio of probabilities; ``beta`` of ``dro``;
            ``kl_coeff`` and ``max_ratio`` of ``stable_reinforce``.

    Raises:
        ConfigError: it is not here, or has no such setting.
    """
    known = ("cross_entropy", *POLICY)
    if name not in known:
        why = {
            "custom": "; the client computes custom losses itself with this server (forward_backward_custom)",
        }.get(name, "")
        raise ConfigError(f"loss_fn {str(name)[:60]!r} is not supported{why}; there are: {', '.join(known)}")
    numbers: dict[str, float] = {}
    for key, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"loss_fn_config: {str(key)[:60]!r} must be a number")
        number = as_float(value)
        if key in ("clip_low_threshold", "clip_high_threshold"):
            key, number = ("clip_low", 1 - number) if key == "clip_low_threshold" else ("clip_high", number - 1)
        if not np.isfinite(number) or number < 0:
            raise ConfigError(f"loss_fn_config: {key[:60]!r} cannot be {str(value)[:40]}")
        numbers[str(key)] = number
    return replace(BUILT_IN[name], reduction="sum").with_settings(**numbers)


def samples_of(datum: Datum, loss: Loss) -> list[Sample]:
    """Build the samples of one datum: one for each column of its targets, [n] or [n, k].

    Raises:
        DataError: a field is missing, of another length, not known to the loss, or not finite.
    """
    datum = with_ratio_mask(datum) if loss.name == "gspo" else datum
    needed = ["target_tokens", *(["logprobs", "advantages"] if loss.requires else [])]
    missing = [name for name in needed if name not in datum.inputs]
    unknown = [name for name in datum.inputs if name not in (*needed, "weights")]
    if missing or unknown:
        wrong = f"{missing[0]!r} is missing" if missing else f"{unknown[0][:60]!r} is unknown"
        raise DataError(f"loss_fn_inputs: {wrong}; {loss.name} takes {', '.join(needed)} and, if wanted, weights")
    targets = datum.inputs["target_tokens"]
    if targets.dtype.kind != "i" or targets.ndim not in (1, 2):
        raise DataError(f"target_tokens must be int64 [n] or [n, k], got {targets.dtype} {list(targets.shape)}")
    others = [
        f", {name[:40]} {list(tensor.shape)}" for name, tensor in datum.inputs.items() if tensor.shape != targets.shape
    ]
    if others or len(targets) != len(datum.tokens):
        raise DataError(
            f"{len(datum.tokens)} tokens, target_tokens {list(targets.shape)}{''.join(others)}: all must have one length, and "
            "all inputs of the loss one shape"
        )
    if targets.ndim == 2 and (
        not 1 <= targets.shape[1] <= MAX_COLUMNS or (targets.shape[1] > 1 and loss.name == "gspo")
    ):
        raise DataError(
            f"target_tokens {list(targets.shape)}: from 1 to {MAX_COLUMNS} targets at each position, 1 for gspo"
        )
    inputs = {"weights": np.ones(targets.shape, np.float32), **datum.inputs}
    columns = targets.shape[1] if targets.ndim == 2 else 1
    of_column: list[dict[str, Any]] = [
        {_RENAMED[k]: torch.from_numpy(np.array(v[:, i] if v.ndim == 2 else v)) for k, v in inputs.items()}
        for i in range(columns)
    ]
    tokens = torch.from_numpy(np.ascontiguousarray(datum.tokens))
    return [Sample(tokens, **each) for each in of_column]


def as_the_targets(data: Sequence[Datum], logprobs: Sequence[Tensor]) -> list[np.ndarray]:
    """Arrange log-probabilities of all samples as one float32 array for each datum, of the shape of its targets."""
    arrays, start = [], 0
    for datum in data:
        targets = datum.inputs["target_tokens"]
        columns = targets.shape[1] if targets.ndim == 2 else 1
        part = [each.numpy() for each in logprobs[start : start + columns]]
        # A copy: the answer is kept for a while, and must not keep the whole batch with it.
        arrays.append(np.stack(part, axis=1) if targets.ndim == 2 else part[0].copy())
        start += columns
    return arrays


def value_of(loss: Loss, samples: Sequence[Sample], logprobs: Sequence[Tensor]) -> float:
    """Sum a loss over samples, from log-probabilities that are known already."""
    return float(values_of(loss, samples, logprobs).double().sum())


def values_of(loss: Loss, samples: Sequence[Sample], logprobs: Sequence[Tensor]) -> Tensor:
    """Compute what each token of all samples adds to the sum, [n] one sample after the other."""

    def joined(name: str) -> Tensor | None:
        return None if getattr(samples[0], name) is None else torch.cat([getattr(each, name) for each in samples])

    owner = torch.cat([torch.full((len(each),), index) for index, each in enumerate(samples)])
    weights = torch.cat([each.weights for each in samples])
    inputs = LossInputs(
        targets=torch.cat([each.target_ids for each in samples]),
        weights=weights,
        sample=owner,
        sample_count=len(samples),
        pairs=torch.zeros(0, 2, dtype=torch.int64),
        reduce_context=lambda values: values,
        advantages=joined("advantages"),
        old_logprobs=joined("old_logprobs"),
        extra={},
    )
    values = loss(torch.cat(list(logprobs)), inputs)
    values = values[0] if isinstance(values, tuple) else values
    return torch.where(weights != 0, values * weights, 0.0)
