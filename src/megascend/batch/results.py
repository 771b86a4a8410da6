"""What the backend's methods return."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from megascend.batch.losses import Loss

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdapterLoss:
    """What one adapter's samples gave in a ``forward_backward``, over all data parallel ranks.

    Attributes:
        loss: normalised by this adapter's own weights (or preference pairs); the sum for a loss with ``reduction="sum"``.
        tokens: targets with a weight other than 0.
        total_tokens: input tokens, padding excluded.
        metrics: what the loss function reported.
        logprobs: fp32 [length] on the CPU for each of a request's samples, where :class:`megascend.AdapterQueue` was asked for
            them.
    """

    loss: float
    tokens: int
    total_tokens: int
    metrics: dict[str, float]
    logprobs: list[Tensor] | None = None


@dataclass(frozen=True)
class TokenCounts:
    """Sums over samples: target weights, preference pairs, targets with a weight other than 0, input tokens.

    For a loss with ``reduction="sum"`` each target with a weight counts 1 in ``weight``.
    """

    weight: float = 0.0
    pairs: int = 0
    trained: int = 0
    tokens: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            self.weight + other.weight,
            self.pairs + other.pairs,
            self.trained + other.trained,
            self.tokens + other.tokens,
        )


@dataclass
class ForwardBackwardResult:
    """Outcome of one ``forward_backward``, the same on every rank.

    The figures stay on the device until they are read, so that a training step waits for it only once; reading them is
    local and never a collective.

    Attributes:
        micro_batches: micro batches that each data parallel rank ran.
        logprobs: fp32 [length] on the CPU for each of this data parallel rank's samples, in their order: log-probabilities of
            the targets in the very pass that made the gradients; None if not asked for.
        values: the same of a model with a scalar head: fp32 [length], its value at every token.
    """

    micro_batches: int
    _counts: dict[str, TokenCounts]
    _loss: Loss
    _names: tuple[str, ...]
    _totals: Tensor  # [counts, names], sums of weighted values times _scale
    _scale: float = 1.0
    _warns: bool = False  # one rank does
    logprobs: list[Tensor] | None = field(default=None, repr=False)
    values: list[Tensor] | None = field(default=None, repr=False)
    _read: list[list[float]] | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        """Targets with a weight other than 0, over all data parallel ranks."""
        return sum(counts.trained for counts in self._counts.values())

    @property
    def total_tokens(self) -> int:
        """All input tokens over all data parallel ranks, padding excluded."""
        return sum(counts.tokens for counts in self._counts.values())

    @property
    def loss(self) -> float:
        """The token-weighted loss over the whole global batch; the sum for a loss with ``reduction="sum"``."""
        return self._averages()["loss"]

    @property
    def metrics(self) -> dict[str, float]:
        """What the loss function reported, averaged by weights (for a sum: over targets with a weight) or over pairs."""
        return {name: value for name, value in self._averages().items() if name != "loss"}

    @property
    def adapters(self) -> dict[str, AdapterLoss]:
        """Every adapter's own figures; empty when the model itself is trained."""
        found = {}
        for (name, counts), sums in zip(self._counts.items(), self._sums(), strict=True):
            if name:
                own = {key: self._average(key, value, counts) for key, value in zip(self._names, sums, strict=True)}
                found[name] = AdapterLoss(own.pop("loss"), counts.trained, counts.tokens, own)
        return found

    def _averages(self) -> dict[str, float]:
        whole = sum(self._counts.values(), TokenCounts())
        columns = zip(*self._sums(), strict=True)
        return {
            name: self._average(name, sum(column), whole) for name, column in zip(self._names, columns, strict=True)
        }

    def _average(self, name: str, total: float, counts: TokenCounts) -> float:
        if name == "loss" and self._loss.reduction == "sum":
            return total
        count = counts.pairs if self._loss.per == "pair" else counts.weight
        return total / count if count else math.nan

    def _sums(self) -> list[list[float]]:
        if self._read is None:
            self._read = [[total / self._scale for total in of_adapter] for of_adapter in self._totals.tolist()]
            if self._warns:
                self._warn_of_overflow(self._read)
        return self._read

    def _warn_of_overflow(self, sums: list[list[float]]) -> None:
        """Log a loss that is not finite: the gradient may be finite all the same, and if it is not, the step is skipped."""
        at = self._names.index("loss")
        losses = {name: of_adapter[at] for name, of_adapter in zip(self._counts, sums, strict=True)}
        for name, loss in losses.items():
            if not math.isfinite(loss):
                ratio = "exp(logprob - old_logprob) is from a difference of 88.7 on; ppo, cispo and gspo clip it"
                cause = f" ({ratio})" if "old_logprobs" in self._loss.requires else ""
                logger.warning(
                    "loss %r%s is %s: a token with a weight has a value beyond float32 (3.4e38) or not a number%s. If its "
                    "gradient is so too, all ranks skip the optimizer step",
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
        skipped_in_a_row: how many steps in a row were skipped up to now.
        loss_scale: fp16 loss scale used for this step, 1.0 otherwise.
        adapters: every stepped adapter's own result; empty when the model itself is trained. With several adapters the
            figures above speak of all: the norm over all their gradients, the largest learning rate and loss scale, skipped
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
        """The result of a step of several adapters."""
        each = adapters.values()
        return cls(
            grad_norm=math.sqrt(sum(one.grad_norm**2 for one in each)),
            lr=max(one.lr for one in each),
            skipped=any(one.skipped for one in each),
            skipped_in_a_row=max(one.skipped_in_a_row for one in each),
            loss_scale=max(one.loss_scale for one in each),
            adapters=dict(adapters),
        )


@dataclass(frozen=True)
class ForwardResult:
    """Outcome of one ``forward``: one CPU tensor a sample, in the caller's order, unpadded.

    Attributes:
        logprobs: fp32 [length] each, log-probability of every target.
        entropy: fp32 [length] each, entropy of the predicted distribution in nats, or None if not asked for.
        logits: fp32 [length, vocabulary] each, or None if not asked for.
    """

    logprobs: list[Tensor]
    entropy: list[Tensor] | None = None
    logits: list[Tensor] | None = None
