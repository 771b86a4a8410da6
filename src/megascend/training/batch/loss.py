"""Contract of loss functions: callables on (log-probs or values, inputs), and what they require of samples and model.

A loss returns one value per token, per sample or per preference pair, *unreduced*; the step weights, normalises and sums over
micro batches, data and context parallel ranks, so a loss never depends on the layout. The built-in ones, and the registry by
name, are in :mod:`megascend.training.batch.losses`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from megascend.config.registry import LossUnit
from megascend.errors import ConfigError, DataError
from megascend.training.kernels.linear_divergence import TeacherDivergence

MARGIN = "margin"
"""Name in ``Sample.extra`` of the margin of a preference pair, the same number at each token."""

LARGEST_METRIC = torch.finfo(torch.float32).max
"""Limit of metrics that may overflow: an infinite one would spoil the average over all tokens or pairs."""


@dataclass
class LossInputs:
    """Inputs of a loss function: this rank's part of one micro batch; n tokens, padding included.

    Padding has weight 0, and its log-probability (or value), entropy and fields are 0; values of other tokens of weight 0 are 0
    if they are not finite. No token of weight 0 has a gradient, whatever the function returns there; other results do not
    depend on padding as long as the function works token by token (or on :meth:`sum_per_sample`).

    Attributes:
        targets: int64 [n].
        weights: float32 [n].
        entropy: float32 [n] with gradient, or None unless the loss asks for it.
        advantages, old_logprobs, ref_logprobs, returns, old_values: float32 [n] or None.
        extra: further float32 [n] fields.
        sample: int64 [n], index of each token's sample in the micro batch.
        sample_count: samples in the micro batch.
        pairs: int64 [pairs, 2], positions of the chosen and the rejected sample of each pair.
        labels: int64 [samples], the samples' labels, or float32 [samples, labels] if a sample has a number for each; None unless
            the loss requires ``label``.
        candidate_ids: int64 [n, K], a teacher's likeliest tokens, -1 at unused slots; None unless the loss requires
            ``candidates``, as the next two.
        teacher_logprobs: float32 [n, K], the teacher's log-probabilities of them.
        candidate_logprobs: float32 [n, K] with gradient, the model's. Both are 0 at unused slots.
        divergence: float32 [n] with gradient, from the teacher of the loss; None unless it has one.
        last: int64, indices of samples' last tokens among the n; None except for losses of values.
        reduce_context: sums a tensor over context parallel ranks, differentiably.
        members: index of each of the micro batch's samples in this rank's list, on the host.
    """

    targets: Tensor
    weights: Tensor
    sample: Tensor
    sample_count: int
    pairs: Tensor
    reduce_context: Callable[[Tensor], Tensor]
    entropy: Tensor | None = None
    # Tensors if all samples have them; Any, so that a loss that requires a field need not check for None.
    advantages: Any = None
    old_logprobs: Any = None
    ref_logprobs: Any = None
    returns: Any = None
    old_values: Any = None
    candidate_ids: Any = None
    teacher_logprobs: Any = None
    candidate_logprobs: Any = None
    divergence: Any = None
    labels: Any = None
    last: Tensor | None = None
    extra: dict[str, Tensor] | None = None
    members: Sequence[int] = ()

    def sum_per_sample(self, values: Tensor) -> Tensor:
        """Return the weighted sum of per-token ``values`` [n] over each sample, across context parallel ranks: [samples]."""
        # where, not a product: infinity at weight 0 must not become NaN.
        weighted_values = torch.where(self.weights != 0, values * self.weights, 0.0)
        totals = values.new_zeros(self.sample_count).index_add(0, self.sample, weighted_values)
        return self.reduce_context(totals)

    def mean_per_sample(self, values: Tensor) -> Tensor:
        """Return the weighted mean of per-token ``values`` [n] over each sample: [samples]; 0 without weights."""
        weights = self.sum_per_sample(torch.ones_like(values))
        return self.sum_per_sample(values) / torch.where(weights != 0, weights, 1.0)

    def at_last(self, values: Tensor) -> Tensor:
        """Return ``values`` [n, ...] at the last token of each sample, on any context parallel rank: [samples, ...]."""
        assert self.last is not None, "only losses of values get the samples' last tokens"
        # The context parallel ranks that do not hold a sample's last token add 0.
        totals = values.new_zeros(self.sample_count, *values.shape[1:])
        last_values = totals.index_add(0, self.sample[self.last], values[self.last])
        return self.reduce_context(last_values)


LossFunction = Callable[[Tensor, LossInputs], Any]


@dataclass(frozen=True)
class Loss:
    """A loss function and its requirements.

    Attributes:
        name: label for messages and metrics.
        function: ``(logprobs [n], LossInputs) -> losses`` or ``-> (losses, {metric: numbers})``; losses and metrics have
            shape [n] for ``per="token"``, [samples] for ``per="sample"`` and [pairs] for ``per="pair"``.
        of: first argument of the function: ``logprobs`` of the targets, or ``values`` of a scalar head, [n, labels] if it has
            several labels.
        per: unit of the average: tokens by their weights, or samples or preference pairs with equal weights.
        requires: per-token fields of :class:`megascend.Sample` that must be set, ``candidates`` or ``label``.
        entropy: True if ``inputs.entropy`` is needed.
        reduction: ``mean``: the sum of weighted values is divided by the weights of the global batch (or its pairs). ``sum``: it
            is not; then weights may also be negative, or 0 everywhere, and metrics are averaged over the targets with a weight.
        divisor: number by which the sum of weighted values is divided in place of the weights (samples, pairs) of the global
            batch; weights may then be 0 everywhere.
        settings: keyword arguments of ``function``; see :meth:`with_settings`.
        is_cross_entropy: the values are the negative log-probabilities, and the function only adds metrics. If the head can, it
            computes the gradient with the logits, as for ``cross_entropy``; the function is then called without a graph.
        divergence: ``inputs.divergence`` to compute: from a teacher, by its hidden states in the samples' ``teacher_states``.
    """

    name: str
    function: LossFunction
    per: LossUnit = "token"
    requires: tuple[str, ...] = ()
    entropy: bool = False
    reduction: Literal["mean", "sum"] = "mean"
    settings: tuple[tuple[str, float], ...] = ()
    of: Literal["logprobs", "values"] = "logprobs"
    is_cross_entropy: bool = False
    divisor: float | None = None
    divergence: TeacherDivergence | None = None

    def __post_init__(self) -> None:
        if self.divisor is not None and (self.reduction == "sum" or not 0 < self.divisor < math.inf):
            raise ConfigError(
                f"loss {self.name!r}: divisor is a number above 0 for losses with reduction='mean'; got {self.divisor}, "
                f"reduction={self.reduction!r}"
            )
        if self.divergence is not None and (
            "teacher_states" not in self.requires or self.entropy or self.of != "logprobs" or self.is_cross_entropy
        ):
            raise ConfigError(
                f"loss {self.name!r}: divergence=... needs 'teacher_states' in requires, of='logprobs' and no entropy; got "
                f"requires={self.requires}, of={self.of!r}, entropy={self.entropy}"
            )
        if self.is_cross_entropy and (self.per != "token" or self.of != "logprobs" or self.entropy):
            raise ConfigError(
                f"loss {self.name!r}: is_cross_entropy=True is for losses of tokens by their log-probabilities; got "
                f"per={self.per!r}, of={self.of!r}, entropy={self.entropy}"
            )

    def with_settings(self, /, **settings: float) -> Loss:
        """Return this loss with keyword arguments of its function, e.g. ``ppo``'s ``clip_low``. Equal settings make equal losses.

        Raises:
            ConfigError: the function has no such argument, or a default that is a number and the value is none.
        """
        defaults = self._arguments()
        for name, value in settings.items():
            if name not in defaults:
                names = ", ".join(defaults) or "none"
                raise ConfigError(f"loss {self.name!r} has no setting {name!r}; it has: {names}")
            is_number = isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
            if type(defaults[name]) in (int, float) and not is_number:
                raise ConfigError(f"loss {self.name!r}: {name} must be a number, got {value!r:.60}")
        return replace(self, settings=tuple(sorted({**dict(self.settings), **settings}.items())))

    def effective_settings(self) -> dict[str, Any]:
        """Return the keyword arguments of the function with their values, defaults included."""
        defaults = {name: value for name, value in self._arguments().items() if value is not inspect.Parameter.empty}
        return defaults | dict(self.settings)

    def _arguments(self) -> dict[str, Any]:
        """Return the names and defaults of the function's keyword arguments."""
        parameters = list(inspect.signature(self.function).parameters.values())[2:]
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {parameter.name: parameter.default for parameter in parameters if parameter.kind in kinds}

    def describe(self) -> str:
        """Describe what must be equal on all ranks."""
        settings = "".join(f", {name}={value!r}" for name, value in self.settings)
        divisor = "" if self.divisor is None else f", divisor={self.divisor!r}"
        divergence = "" if self.divergence is None else f", divergence={self.divergence.describe()}"
        return f"loss={self.name!r}{settings}{divisor}{divergence}" + (
            ", reduction='sum'" if self.reduction == "sum" else ""
        )

    def __call__(self, logprobs: Tensor, inputs: LossInputs) -> Any:
        return self.function(logprobs, inputs, **dict(self.settings))


def split_output(loss: Loss, output: Any, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Split a loss function's return value into values and metrics and check their shapes."""
    values, metrics = output if isinstance(output, tuple) else (output, {})
    for name, tensor in {"loss": values, **metrics}.items():
        if not isinstance(tensor, Tensor):
            raise DataError(
                f"loss {loss.name!r} returned {name} as {type(tensor).__name__}; per={loss.per!r} needs a tensor of shape "
                f"({count},)"
            )
        if tuple(tensor.shape) != (count,):
            raise DataError(
                f"loss {loss.name!r} returned {name} of shape {tuple(tensor.shape)}; per={loss.per!r} needs ({count},)"
            )
    return values, metrics
