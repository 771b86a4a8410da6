"""The sampling policy: the model's distribution, renormalised over the tokens that sampling allowed (top-k, top-p)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megascend.engines.base import Output
from megascend.training.batch.micro_batch import MicroBatch
from megascend.training.kernels.linear_divergence import TeacherDivergence


@dataclass(frozen=True)
class MaskedOutput:
    """Output whose log-probabilities and entropies are of the distribution over the allowed tokens.

    See :class:`megascend.engines.base.Output`.

    Attributes:
        output: the model's output, over its whole vocabulary.
        allowed: int64 [n, A], -1 at unused slots; a row without any: the whole vocabulary.
    """

    output: Output
    allowed: Tensor

    @property
    def fuses_loss(self) -> bool:
        return False

    @property
    def prediction(self) -> Output | None:
        return self.output.prediction

    def cross_entropy(self, coefficients: Tensor, loss_grad: float) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("fuses_loss is False")

    def logprobs(self, entropy: bool, candidates: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        assert candidates is None, "samples have candidates or a mask, not both"
        logprobs, entropies, selected = self.output.logprobs(entropy, self.allowed)
        assert selected is not None
        used = self.allowed >= 0
        masked = used.any(1)
        # The log of the allowed tokens' total probability. Rows of the whole vocabulary keep their slots, which are 0: with
        # minus infinity in all of them the gradient would be NaN.
        log_total = selected.masked_fill(~used & masked[:, None], -torch.inf).logsumexp(1)
        log_total = torch.where(masked, log_total, 0.0)
        if entropies is not None:
            policy_logprobs = selected - log_total[:, None]
            policy_entropies = -torch.where(used, policy_logprobs.exp() * policy_logprobs, 0.0).sum(1)
            entropies = torch.where(masked, policy_entropies, entropies)
        return logprobs - log_total, entropies, None

    def logits(self, rows: Tensor | None = None) -> Tensor:
        return self.output.logits(rows)

    def logit_factors(self) -> tuple[Tensor, Tensor, float | None]:
        return self.output.logit_factors()

    def divergence(self, divergence: TeacherDivergence, states: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("samples have a teacher's hidden states or a mask, not both")


def policy_output(batch: MicroBatch, output: Output) -> Output:
    """Return the output of the sampling policy: masked if the micro batch has allowed tokens."""
    return output if batch.allowed is None else MaskedOutput(output, batch.allowed)
