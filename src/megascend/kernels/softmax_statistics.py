"""What the softmax of a chunk of logits comes down to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Statistics:
    """What the softmax of n rows comes down to; everything fp32 [n].

    Attributes:
        log_sum: log of the sum of exponentials over the whole vocabulary.
        target: logit of the target.
        entropy: in nats, or None if it was not asked for.
    """

    log_sum: Tensor
    target: Tensor
    entropy: Tensor | None

    @property
    def logprobs(self) -> Tensor:
        """Log-probability of the target."""
        return self.target - self.log_sum
