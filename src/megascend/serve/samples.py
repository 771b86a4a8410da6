"""Convert between the protocol's datums and losses and megascend's samples and losses. Pure: no ranks, no device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megascend.app.measurement import loss_values
from megascend.batch.loss import Loss
from megascend.batch.losses import BUILT_IN
from megascend.batch.policy_losses import POLICY
from megascend.batch.sample import Sample
from megascend.errors import ConfigError, DataError
from megascend.serve.api.bodies import as_float
from megascend.serve.api.wire import Datum, ProvenanceSpan
from megascend.serve.samplers.sequences import RecordedSequence


def with_recorded(datum: Datum, find: Callable[[str], RecordedSequence]) -> Datum:
    """Fill in the ``logprobs`` recorded when the sample's tokens were sampled; set the weight of all other tokens to 0.

    Args:
        find: looks up a recorded sequence by id; raises DataError for an unknown one.
    """
    targets, advantages = datum.inputs.get("target_tokens"), datum.inputs.get("advantages")
    if not datum.target_spans:
        raise DataError("stable_reinforce needs the provenance of tokens and targets (Datum.with_provenance)")
    if targets is None or advantages is None or targets.ndim != 1 or targets.shape != advantages.shape:
        raise DataError("stable_reinforce takes target_tokens and advantages of one shape [n]")
    weights = datum.inputs.get("weights", np.ones(targets.shape, np.float32))
    if weights.shape != targets.shape:
        raise DataError(f"weights {list(weights.shape)}, target_tokens {list(targets.shape)}: must have the same shape")
    for region, _, tokens, _ in _iterate_spans(datum.token_spans, len(datum.tokens), "tokens", find):
        _check_equal(datum.tokens[region], tokens, "tokens", region)
    logprobs, sampled = np.zeros(targets.shape, np.float32), np.zeros(targets.shape, np.float32)
    for region, span, tokens, recorded in _iterate_spans(datum.target_spans, len(targets), "target_tokens", find):
        if span.sampled:
            _check_equal(targets[region], tokens, "target_tokens", region)
            logprobs[region], sampled[region] = recorded, 1.0
    if np.any(advantages[sampled == 0] != 0):
        raise DataError("stable_reinforce: tokens that were not sampled must have advantage 0")
    return replace(datum, inputs={**datum.inputs, "logprobs": logprobs, "weights": weights * sampled})


def _iterate_spans(spans: Sequence[ProvenanceSpan], count: int, field: str, find: Callable[[str], RecordedSequence]):
    """Yield (slice of the field, span, tokens, log-probabilities or None) for each span; spans must cover ``count`` positions."""
    if sum(span.length for span in spans) != count or any(min(span.length, span.offset) < 0 for span in spans):
        raise DataError(f"the provenance covers {sum(span.length for span in spans)} {field} of {count}")
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


def _check_equal(actual: np.ndarray, recorded: np.ndarray, field: str, region: slice) -> None:
    wrong = np.flatnonzero(actual != recorded)
    if len(wrong):
        index = int(wrong[0])
        raise DataError(
            f"{field}[{region.start + index}] is {int(actual[index])}, the sequence that its provenance names has "
            f"{int(recorded[index])}"
        )


def with_ratio_mask(datum: Datum) -> Datum:
    """Fold ``sequence_ratio_mask`` of a ``gspo`` sample into its weights, over which the sequence ratio is computed."""
    mask, advantages = datum.inputs.get("sequence_ratio_mask"), datum.inputs.get("advantages")
    if mask is None or advantages is None:
        return datum
    weights = datum.inputs.get("weights", np.ones(mask.shape, np.float32))
    if not mask.shape == advantages.shape == weights.shape:
        raise DataError(
            f"sequence_ratio_mask {list(mask.shape)}, advantages {list(advantages.shape)}: must have the same shape"
        )
    if np.any(advantages[mask == 0] != 0):
        raise DataError("gspo: tokens masked by sequence_ratio_mask must have advantage 0")
    remaining = {name: tensor for name, tensor in datum.inputs.items() if name != "sequence_ratio_mask"}
    return replace(datum, inputs={**remaining, "weights": np.where(mask != 0, weights, np.float32(0))})


_RENAMED = {"target_tokens": "target_ids", "weights": "weights", "logprobs": "old_logprobs", "advantages": "advantages"}
MAX_COLUMNS = 64
"""Maximum number of targets at one position."""


def loss_of(name: str, settings: Mapping[str, Any]) -> Loss:
    """Return the loss with the protocol's ``name``, summed over tokens.

    Args:
        settings: ``clip_low_threshold`` and ``clip_high_threshold`` bound the probability ratio; ``beta`` of ``dro``;
            ``kl_coeff`` and ``max_ratio`` of ``stable_reinforce``.
    """
    supported = ("cross_entropy", *(policy.__name__ for policy in POLICY))
    if name not in supported:
        reason = ""
        if name == "custom":
            reason = "; the client computes custom losses itself with this server (forward_backward_custom)"
        raise ConfigError(f"loss_fn {str(name)[:60]!r} is not supported{reason}; supported: {', '.join(supported)}")
    numbers: dict[str, float] = {}
    for key, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"loss_fn_config: {str(key)[:60]!r} must be a number")
        number = as_float(value)
        # The protocol bounds the ratio itself, our losses its distance from 1.
        if key in ("clip_low_threshold", "clip_high_threshold"):
            key, number = ("clip_low", 1 - number) if key == "clip_low_threshold" else ("clip_high", number - 1)
        if not np.isfinite(number) or number < 0:
            raise ConfigError(f"loss_fn_config: {key[:60]!r} is {str(value)[:40]}, out of range")
        numbers[str(key)] = number
    # Sums, because clients split a batch into requests and add up what they return.
    return replace(BUILT_IN[name], reduction="sum").with_settings(**numbers)


def samples_of(datum: Datum, loss: Loss) -> list[Sample]:
    """Build the samples of one datum: one per column of its targets, [n] or [n, k]."""
    datum = with_ratio_mask(datum) if loss.name == "gspo" else datum
    required = ["target_tokens", *(["logprobs", "advantages"] if loss.requires else [])]
    missing = [name for name in required if name not in datum.inputs]
    unknown = [name for name in datum.inputs if name not in (*required, "weights")]
    if missing or unknown:
        wrong = f"{missing[0]!r} is missing" if missing else f"{unknown[0][:60]!r} is unknown"
        raise DataError(f"loss_fn_inputs: {wrong}; {loss.name} takes {', '.join(required)} and optionally weights")
    targets = datum.inputs["target_tokens"]
    if targets.dtype.kind != "i" or targets.ndim not in (1, 2):
        raise DataError(f"target_tokens must be int64 [n] or [n, k], got {targets.dtype} {list(targets.shape)}")
    mismatches = [
        f", {name[:40]} {list(tensor.shape)}" for name, tensor in datum.inputs.items() if tensor.shape != targets.shape
    ]
    if mismatches or len(targets) != len(datum.tokens):
        raise DataError(
            f"{len(datum.tokens)} tokens, target_tokens {list(targets.shape)}{''.join(mismatches)}: all must have the "
            "same length, and all inputs of the loss the same shape"
        )
    if targets.ndim == 2 and (
        not 1 <= targets.shape[1] <= MAX_COLUMNS or (targets.shape[1] > 1 and loss.name == "gspo")
    ):
        raise DataError(
            f"target_tokens {list(targets.shape)}: from 1 to {MAX_COLUMNS} targets at each position, 1 for gspo"
        )
    inputs = {"weights": np.ones(targets.shape, np.float32), **datum.inputs}
    if datum.images:
        inputs["weights"] = _weights_beside_images(datum, inputs["weights"])
    columns = targets.shape[1] if targets.ndim == 2 else 1
    # Copies: the arrays may be read-only views of the request's body, and a tensor would keep all of it in memory.
    column_inputs: list[dict[str, Any]] = [
        {_RENAMED[k]: torch.from_numpy(np.array(v[:, i] if v.ndim == 2 else v)) for k, v in inputs.items()}
        for i in range(columns)
    ]
    tokens = torch.from_numpy(np.ascontiguousarray(datum.tokens))
    images = datum.model_input.sources
    return [Sample(tokens, **inputs_of_column, images=images) for inputs_of_column in column_inputs]


def _weights_beside_images(datum: Datum, weights: np.ndarray) -> np.ndarray:
    """Return weights that are 0 where the target is an image's token, which is input only; by default 1 elsewhere."""
    before = np.append(datum.model_input.is_image()[1:], False)
    name = "weights" if "weights" in datum.inputs else "advantages"
    if name in datum.inputs and np.any(datum.inputs[name][before] != 0):
        position = int(np.flatnonzero(before & (datum.inputs[name] != 0).reshape(len(before), -1).any(1))[0])
        raise DataError(
            f"{name}[{position}] is not 0, and the token after it stands for an image, which is never learned"
        )
    weights = weights.copy()
    weights[before] = 0
    return weights


def arrange_as_targets(data: Sequence[Datum], logprobs: Sequence[Tensor]) -> list[np.ndarray]:
    """Arrange the log-probabilities of all samples as one float32 array per datum, in the shape of its targets."""
    arrays, start = [], 0
    for datum in data:
        targets = datum.inputs["target_tokens"]
        columns = targets.shape[1] if targets.ndim == 2 else 1
        part = [column.numpy() for column in logprobs[start : start + columns]]
        # A copy: answers are retained for minutes, and a view would retain the batch's tensor with them.
        arrays.append(np.stack(part, axis=1) if targets.ndim == 2 else part[0].copy())
        start += columns
    return arrays


def value_of(loss: Loss, samples: Sequence[Sample], logprobs: Sequence[Tensor]) -> float:
    """Sum a loss over samples, given their log-probabilities."""
    return float(values_of(loss, samples, logprobs).sum())


def values_of(loss: Loss, samples: Sequence[Sample], logprobs: Sequence[Tensor]) -> Tensor:
    """Compute each token's contribution to the sum, [n] in float64, sample after sample."""
    values, _ = loss_values(loss, samples, logprobs)
    weights = torch.cat([sample.weights for sample in samples])
    # Not values * weights alone: a loss that is infinite at a token of weight 0 would make the sum NaN.
    return torch.where(weights != 0, values * weights, 0.0)
