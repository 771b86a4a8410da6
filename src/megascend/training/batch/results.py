"""Results of the backend's methods."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from megascend.training.batch.loss import Loss

logger = logging.getLogger(__name__)

MTP_LOSS = "mtp_loss"
"""Metric of a head for multi-token prediction: its cross entropy, without the factor ``mtp_loss_weight``."""


@dataclass(frozen=True)
class AdapterLoss:
    """Loss and metrics of one adapter's samples in a ``forward_backward``, over all data parallel ranks.

    Attributes:
        loss: normalised by this adapter's own weights (or preference pairs); the sum for a loss with ``reduction="sum"``.
        tokens: targets with a weight other than 0.
        total_tokens: input tokens, padding excluded.
        metrics: reported by the loss function.
        logprobs: fp32 [length] on the CPU for each of a request's samples, if requested from :class:`megascend.AdapterQueue`.
    """

    loss: float
    tokens: int
    total_tokens: int
    metrics: dict[str, float]
    logprobs: list[Tensor] | None = None


@dataclass(frozen=True)
class TokenCounts:
    """Sums over samples: target weights, units, targets with a weight other than 0, input tokens.

    ``units``: samples of a loss per sample, or pairs of one per pair. For a loss with ``reduction="sum"`` each target with a
    weight counts 1 in ``weight``. ``routed``: samples with ``routed_experts``. ``mtp_weight``: as ``weight``, of all targets but
    each sample's first: those of a head for multi-token prediction. ``shared``: tokens of common prefixes that were computed with
    another sample.
    """

    weight: float = 0.0
    units: int = 0
    trained: int = 0
    tokens: int = 0
    routed: int = 0
    mtp_weight: float = 0.0
    shared: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass
class ForwardBackwardResult:
    """Outcome of one ``forward_backward``, the same on every rank.

    The figures stay on the device until they are read, so that a training step waits for it only once; reading them is
    local, not a collective.

    Attributes:
        micro_batches: micro batches that each data parallel rank ran.
        logprobs: fp32 [length] on the CPU for each of this data parallel rank's samples, in their order: log-probabilities of
            the targets from the same pass as the gradients; None if not requested.
        values: the same of a model with a scalar head: fp32 [length], its value at every token.
    """

    micro_batches: int
    _counts: dict[str, TokenCounts]
    _loss: Loss
    _names: tuple[str, ...]
    _totals: Tensor  # [counts, names], sums of weighted values times _scale
    _scale: float = 1.0
    _warns: bool = False  # one rank logs, not all
    logprobs: list[Tensor] | None = field(default=None, repr=False)
    values: list[Tensor] | None = field(default=None, repr=False)
    _replayed: Tensor | None = None  # [choices that differed, choices replayed], summed over ranks
    _read: list[list[float]] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        figures = {
            "loss": self.loss, "metrics": self.metrics, "tokens": self.tokens, "total_tokens": self.total_tokens,
            "micro_batches": self.micro_batches, "adapters": self.adapters,
        }  # fmt: skip
        return (
            f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in figures.items() if value != {})})"
        )

    @property
    def tokens(self) -> int:
        """Targets with a weight other than 0, over all data parallel ranks."""
        return sum(counts.trained for counts in self._counts.values())

    @property
    def total_tokens(self) -> int:
        """All input tokens over all data parallel ranks, padding excluded."""
        return sum(counts.tokens for counts in self._counts.values())

    @property
    def shared_tokens(self) -> int:
        """Of ``total_tokens``, those of common prefixes that were computed once for several samples, without the first."""
        return sum(counts.shared for counts in self._counts.values())

    @property
    def loss(self) -> float:
        """The token-weighted loss over the global batch; the sum for a loss with ``reduction="sum"``."""
        return self._averages()["loss"]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the loss function, averaged by weights (for a sum: over targets with a weight), samples or pairs.

        With ``Sample.routed_experts``, ``router_replay_changed`` is the share of replayed choices (a token in a layer) for which
        the router itself would have chosen other experts. A model that trains a head for multi-token prediction reports
        ``mtp_loss``, the mean cross entropy of that head's targets.
        """
        metrics = {name: value for name, value in self._averages().items() if name != "loss"}
        if self._replayed is not None:
            changed, replayed = self._replayed.tolist()
            metrics["router_replay_changed"] = changed / replayed if replayed else 0.0
        return metrics

    @property
    def adapters(self) -> dict[str, AdapterLoss]:
        """Figures of every adapter; empty if the model itself is trained."""
        losses = {}
        for (name, counts), sums in zip(self._counts.items(), self._sums(), strict=True):
            if name:
                figures = {key: self._average(key, value, counts) for key, value in zip(self._names, sums, strict=True)}
                losses[name] = AdapterLoss(figures.pop("loss"), counts.trained, counts.tokens, figures)
        return losses

    def _averages(self) -> dict[str, float]:
        all_counts = sum(self._counts.values(), TokenCounts())
        columns = zip(*self._sums(), strict=True)
        return {
            name: self._average(name, sum(column), all_counts)
            for name, column in zip(self._names, columns, strict=True)
        }

    def _average(self, name: str, total: float, counts: TokenCounts) -> float:
        if name == "loss" and self._loss.reduction == "sum":
            return total
        if name == "loss" and self._loss.divisor is not None:
            return total / self._loss.divisor
        count = counts.weight if self._loss.per == "token" else counts.units
        if name == MTP_LOSS:
            count = counts.mtp_weight
        return total / count if count else math.nan

    def _sums(self) -> list[list[float]]:
        if self._read is None:
            # Kept: the device is waited for once, however many figures are read.
            self._read = [[total / self._scale for total in row] for row in self._totals.tolist()]
            if self._warns:
                self._warn_of_overflow(self._read)
        return self._read

    def _warn_of_overflow(self, sums: list[list[float]]) -> None:
        """Log a loss that is not finite. Not an error: the gradient may be finite, and if it is not, the step is skipped."""
        position = self._names.index("loss")
        losses = {name: row[position] for name, row in zip(self._counts, sums, strict=True)}
        for name, loss in losses.items():
            if not math.isfinite(loss):
                ratio = "exp(logprob - old_logprob) overflows for differences above 88.7; ppo, cispo and gspo clip it"
                cause = f" ({ratio})" if "old_logprobs" in self._loss.requires else ""
                logger.warning(
                    "loss %r%s is %s: a token with a weight has a value beyond float32 (3.4e38) or NaN%s. If its "
                    "gradient is not finite either, all ranks skip the optimizer step",
                    self._loss.name,
                    f" of adapter {name!r}" if name else "",
                    loss,
                    cause,
                )


@dataclass(frozen=True)
class StepResult:
    """Outcome of one ``optimizer_step``, the same on every rank.

    Attributes:
        grad_norm: global L2 norm before clipping; not finite if the step was skipped for that.
        lr: learning rate of this step.
        skipped: True if no rank changed any parameter.
        skipped_in_a_row: consecutive skipped steps up to now.
        loss_scale: fp16 loss scale used for this step, 1.0 otherwise.
        adapters: every stepped adapter's result; empty when the model itself is trained. With several adapters the
            figures above are over all: the norm of all their gradients, the largest learning rate and loss scale, skipped
            if any was.
    """

    grad_norm: float
    lr: float
    skipped: bool
    skipped_in_a_row: int = 0
    loss_scale: float = 1.0
    adapters: Mapping[str, StepResult] = field(default_factory=dict)

    @classmethod
    def of(cls, adapters: Mapping[str, StepResult]) -> StepResult:
        """Build the result of a step of several adapters."""
        results = adapters.values()
        return cls(
            # Adapters have disjoint parameters, so their squared norms add up to that of all gradients.
            grad_norm=math.sqrt(sum(result.grad_norm**2 for result in results)),
            lr=max(result.lr for result in results),
            skipped=any(result.skipped for result in results),
            skipped_in_a_row=max(result.skipped_in_a_row for result in results),
            loss_scale=max(result.loss_scale for result in results),
            adapters=dict(adapters),
        )


@dataclass(frozen=True)
class ForwardResult:
    """Outcome of one ``forward``: one unpadded CPU tensor per sample, in the caller's order.

    Attributes:
        logprobs: fp32 [length] each, log-probability of every target.
        entropy: fp32 [length] each, entropy of the predicted distribution in nats, or None if not requested.
        logits: fp32 [length, vocabulary] each, or None if not requested.
        candidates: fp32 [length, at least K] each, log-probabilities of the sample's candidates, 0 at unused slots, or None if
            not requested.
    """

    logprobs: list[Tensor]
    entropy: list[Tensor] | None = None
    logits: list[Tensor] | None = None
    candidates: list[Tensor] | None = None
