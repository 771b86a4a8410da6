"""Convert between the protocol's datums and losses and megascend's samples and losses. Pure: no ranks, no device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from megascend.apps.serve.api.bodies import as_float
from megascend.apps.serve.api.wire import MAX_COLUMNS, Datum, ProvenanceSpan
from megascend.apps.serve.samplers.sequences import RecordedSequence
from megascend.apps.train.measurement import loss_values
from megascend.config.registry import losses_of_responses
from megascend.errors import ConfigError, DataError
from megascend.training.batch.loss import Loss
from megascend.training.batch.losses import BUILT_IN
from megascend.training.batch.results import AdapterLoss
from megascend.training.batch.sample import Sample


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


def loss_of(name: str, settings: Mapping[str, Any]) -> Loss:
    """Return the loss with the protocol's ``name``, summed over tokens.

    Args:
        settings: ``clip_low_threshold`` and ``clip_high_threshold`` bound the probability ratio; ``beta`` of ``dro``;
            ``kl_coeff`` and ``max_ratio`` of ``stable_reinforce``.
    """
    supported = [loss for loss in losses_of_responses() if loss in BUILT_IN]
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


@dataclass(frozen=True)
class TrainResult:
    """Result of a request: sum of its loss, targets with a weight, metrics, and log-probabilities by datum."""

    loss: float
    tokens: int
    metrics: Mapping[str, float]
    logprobs: list[np.ndarray]


class RequestSamples(Sequence[Sample]):
    """The samples of a request: one per column of its datums' targets, [n] or [n, k], built when they are read.

    A column takes the time and the memory of a sample only while its batch runs.

    Raises:
        DataError: a datum does not fit the loss.
    """

    def __init__(self, data: Sequence[Datum], loss: Loss) -> None:
        self._data: list[Datum] = []
        for index, datum in enumerate(data):
            try:
                self._data.append(_checked(datum, loss))
            except DataError as error:
                raise error if len(data) == 1 else DataError(f"sample {index}: {error}") from None
        columns = [datum.columns for datum in self._data]
        self._ends = np.cumsum(columns, dtype=np.int64)
        self.lengths = np.repeat([len(datum.tokens) for datum in self._data], columns)

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, key: int) -> Sample: ...
    @overload
    def __getitem__(self, key: slice) -> list[Sample]: ...
    def __getitem__(self, key: int | slice) -> Sample | list[Sample]:
        if isinstance(key, slice):
            return [self[index] for index in range(len(self))[key]]
        index = range(len(self))[key]
        number = int(np.searchsorted(self._ends, index, "right"))
        datum = self._data[number]
        column = index - int(self._ends[number]) + datum.columns
        # Copies: the arrays may be read-only views of the request's body, and a tensor would keep all of it in memory.
        inputs: dict[str, Any] = {
            _RENAMED[k]: torch.from_numpy(np.array(v[:, column] if v.ndim == 2 else v)) for k, v in datum.inputs.items()
        }
        return Sample(torch.from_numpy(np.ascontiguousarray(datum.tokens)), **inputs, images=datum.model_input.sources)

    def arrange(self, value: AdapterLoss) -> TrainResult:
        """Arrange the log-probabilities of all samples by datum."""
        arrays = arrange_as_targets(self._data, value.logprobs or [])
        return TrainResult(value.loss, value.tokens, value.metrics, arrays)


def samples_of(datum: Datum, loss: Loss) -> list[Sample]:
    """Build the samples of one datum."""
    return list(RequestSamples([datum], loss))


def _checked(datum: Datum, loss: Loss) -> Datum:
    """Check a datum's inputs; return it with weights."""
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
    if not len(targets):
        raise DataError("a sample must hold at least one token")
    inputs = {"weights": np.ones(targets.shape, np.float32), **datum.inputs}
    if datum.images:
        inputs["weights"] = _weights_beside_images(datum, inputs["weights"])
    for name, values in inputs.items():
        # As Sample does, of all columns at once; of tokens without a weight only the weight has to be finite.
        used = values if name == "weights" else np.where(inputs["weights"] == 0, 0, values)
        if values.dtype.kind == "f" and not np.isfinite(used).all():
            raise DataError(f"{name} holds {used[~np.isfinite(used)][0]}; all values must be finite")
    return replace(datum, inputs=inputs)


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
    flat, arrays, start = torch.cat(list(logprobs)).numpy(), [], 0
    for datum in data:
        shape = datum.inputs["target_tokens"].shape
        part = flat[start : start + math.prod(shape)]
        # A copy: answers are retained for minutes, and a view would retain those of the whole request with it.
        arrays.append(np.array(part if len(shape) == 1 else part.reshape(shape[::-1]).T, order="C"))
        start += len(part)
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
