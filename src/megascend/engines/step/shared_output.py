"""Output of a micro batch in which common prefixes are computed once, as that of all its samples' tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from megascend.engines.base import Output, RowOutput, ScalarOutput
from megascend.training.batch.micro_batch import SharedRows
from megascend.training.kernels.linear_divergence import TeacherDivergence


@dataclass(frozen=True)
class SharedOutput:
    """Output for every token of the samples; see :class:`megascend.engines.base.Output`.

    Attributes:
        output: of the rows that the model computed.
        shared: the tokens' rows.
    """

    output: RowOutput
    shared: SharedRows

    @cached_property
    def _head(self) -> Output:
        return self.output.select(self.shared.rows, self.shared.batch.targets[self.shared.tokens])

    @property
    def fuses_loss(self) -> bool:
        return self.output.fuses_loss

    @property
    def prediction(self) -> None:
        """None: samples share no prefixes if a head for multi-token prediction is trained."""

    def cross_entropy(self, coefficients: Tensor, loss_grad: float) -> tuple[Tensor, Tensor]:
        sums = coefficients.new_zeros(len(self.shared.rows)).index_add_(0, self.shared.index, coefficients)
        total, logprobs = self._head.cross_entropy(sums, loss_grad)
        return total, logprobs[self.shared.index]

    def logprobs(self, entropy: bool, candidates: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        # Tokens with candidates have head rows of their own.
        of_rows = None if candidates is None else candidates[self.shared.tokens]
        logprobs, entropies, selected = self._head.logprobs(entropy, of_rows)
        index = self.shared.index
        return (
            logprobs[index],
            None if entropies is None else entropies[index],
            None if selected is None else selected[index],
        )

    def logits(self, rows: Tensor | None = None) -> Tensor:
        index = self.shared.rows[self.shared.index].cpu()
        distinct, position = (index if rows is None else index[rows.cpu()]).unique(return_inverse=True)
        return self.output.logits(distinct)[position]

    def logit_factors(self) -> tuple[Tensor, Tensor, float | None]:
        hidden, weight, cap = self.output.logit_factors()
        return hidden[self.shared.rows[self.shared.index]], weight, cap

    def divergence(self, divergence: TeacherDivergence, states: Tensor) -> tuple[Tensor, Tensor]:
        # Tokens with a teacher's states have head rows of their own, so index is their order.
        return self._head.divergence(divergence, states)


def token_output(output: RowOutput | ScalarOutput, shared: SharedRows) -> SharedOutput | ScalarOutput:
    """Return the output of the samples' tokens from that of the rows that the model computed."""
    if isinstance(output, ScalarOutput):
        return ScalarOutput(output.values[shared.rows[shared.index]])
    return SharedOutput(output, shared)
