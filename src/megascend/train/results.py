"""What the backend's verbs return."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class ForwardBackwardResult:
    """Outcome of one ``forward_backward``, the same on every rank.

    The figures stay on the device until they are read, so that a training step waits for it only once; reading them is
    local and never a collective.

    Attributes:
        tokens: targets with a weight above 0, over all data parallel ranks.
        total_tokens: all input tokens over all data parallel ranks, padding excluded.
        micro_batches: micro batches that each data parallel rank ran.
    """

    tokens: int
    total_tokens: int
    micro_batches: int
    _names: tuple[str, ...]
    _values: Tensor
    _read: dict[str, float] | None = field(default=None, repr=False)

    @property
    def loss(self) -> float:
        """The token-weighted loss over the whole global batch."""
        return self._figures()["loss"]

    @property
    def metrics(self) -> dict[str, float]:
        """What the loss function reported, averaged the way the loss is."""
        return {name: value for name, value in self._figures().items() if name != "loss"}

    def _figures(self) -> dict[str, float]:
        if self._read is None:
            self._read = dict(zip(self._names, self._values.tolist(), strict=True))
        return self._read


@dataclass(frozen=True)
class StepResult:
    """Outcome of one ``optimizer_step``, the same on every rank.

    Attributes:
        grad_norm: global L2 norm before clipping; not finite if the step was skipped for that.
        lr: learning rate of this step.
        skipped: True if no rank changed any parameter.
        skipped_in_a_row: how many steps in a row were skipped up to now.
        loss_scale: fp16 loss scale used for this step, 1.0 otherwise.
    """

    grad_norm: float
    lr: float
    skipped: bool
    skipped_in_a_row: int = 0
    loss_scale: float = 1.0


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
