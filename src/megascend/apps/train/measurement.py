"""The loss of held-out samples: its values without gradients, their sums over ranks, and their means."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megascend.config.data import ProblemType
from megascend.training.batch.loss import Loss, LossInputs, split_output
from megascend.training.batch.losses import predictions
from megascend.training.batch.micro_batch import label_tensor
from megascend.training.batch.sample import Sample

if TYPE_CHECKING:
    from megascend.backend import Backend

LOSS = "loss"
"""Name of a loss among its metrics, as :class:`megascend.training.batch.loss_call.LossEvaluation` has it."""


@dataclass(frozen=True)
class Measurement:
    """Sums over held-out samples.

    Attributes:
        total: sum of the loss.
        count: what divides it: the sum of weights, or the number of samples or pairs.
        totals: sums of a loss's metrics over the pairs or samples, if it is one of them.
        outcomes: true positives, false positives and false negatives of each label of a classifier.
    """

    total: float
    count: float
    totals: Mapping[str, float] = field(default_factory=dict)
    outcomes: tuple[tuple[float, ...], ...] = ()

    @property
    def loss(self) -> float:
        return self.total / self.count

    @property
    def metrics(self) -> dict[str, float]:
        """Means of the metrics, and a classifier's macro F1."""
        metrics = {name: total / self.count for name, total in self.totals.items()}
        # A label that neither occurs nor is predicted has no F1.
        scores = [
            2 * true / (2 * true + wrong + missed) for true, wrong, missed in self.outcomes if true + wrong + missed
        ]
        return metrics | ({"macro_f1": sum(scores) / len(scores)} if scores else {})

    def __add__(self, other: Measurement) -> Measurement:
        totals = {name: total + other.totals[name] for name, total in self.totals.items()}
        # float32 counts to 2^24.
        first, second = (torch.tensor(rows, dtype=torch.float64) for rows in (self.outcomes, other.outcomes))
        return Measurement(
            self.total + other.total, self.count + other.count, totals, tuple(map(tuple, (first + second).tolist()))
        )


class MetricSums:
    """Sums of a loss and its metrics over this rank's samples or pairs, and of what divides them."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._count = 0.0
        self._outcomes: torch.Tensor | None = None

    def add(self, loss: torch.Tensor | float, metrics: Mapping[str, torch.Tensor], weight: float = 1.0) -> None:
        for name, value in {**metrics, LOSS: loss}.items():
            self._sums[name] += float(value)
        self._count += weight

    def add_outcomes(self, outcomes: torch.Tensor) -> None:
        self._outcomes = outcomes if self._outcomes is None else self._outcomes + outcomes

    def gather(self, backend: Backend) -> Measurement:
        """Return the sums over all ranks. Collective."""
        # Sums: the mean is over tokens or samples, not over ranks or sources, which have different numbers of them.
        table = [] if self._outcomes is None else self._outcomes.tolist()
        parts, counts, tables = zip(*backend.gather_by_data_rank((dict(self._sums), self._count, table)), strict=True)
        # A rank without samples has no sums; the names are the same on all others.
        names = list(dict.fromkeys(name for part in parts for name in part))
        totals = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
        outcomes = [torch.tensor(table, dtype=torch.float64) for table in tables if table]
        rows = torch.stack(outcomes).sum(0).tolist() if outcomes else []
        return Measurement(totals.pop(LOSS), sum(counts), totals, tuple(map(tuple, rows)))


def loss_values(
    loss: Loss,
    samples: Sequence[Sample],
    scores: Sequence[torch.Tensor],
    entropies: Sequence[torch.Tensor] | None = None,
    candidates: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the values and metrics of a loss without gradients, in float64: of each token, each sample, or the pair.

    Args:
        samples: a few, chosen and rejected one of a pair.
        scores: log-probabilities of each sample's targets [length] from the model, or values; ``entropies`` likewise.
        candidates: log-probabilities [length, K or more] of each sample's candidates.
    """

    def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.double().cpu() for part in parts])

    fields: dict[str, Any] = {}
    for name in ("ref_logprobs", "old_logprobs", "advantages"):
        if all(getattr(sample, name) is not None for sample in samples):
            fields[name] = joined([getattr(sample, name) for sample in samples])
    if candidates is not None:
        teacher = [sample.candidates for sample in samples if sample.candidates is not None]
        fields["candidate_ids"] = torch.cat([entry.ids for entry in teacher])
        fields["teacher_logprobs"] = joined([entry.logprobs for entry in teacher])
        # Wider, if another sample of the micro batch has more candidates.
        fields["candidate_logprobs"] = joined(
            [part[:, : entry.ids.shape[1]] for part, entry in zip(candidates, teacher, strict=True)]
        )
    if loss.of == "values":
        fields["last"] = torch.tensor([len(sample) for sample in samples]).cumsum(0) - 1
        names = set.intersection(*(set(sample.extra) for sample in samples))
        fields["extra"] = {name: joined([sample.extra[name] for sample in samples]) for name in names}
    inputs = LossInputs(
        torch.cat([sample.target_ids for sample in samples]),
        joined([sample.weights for sample in samples]),
        torch.cat([torch.full_like(sample.target_ids, number) for number, sample in enumerate(samples)]),
        len(samples),
        torch.tensor([[0, 1]] if loss.per == "pair" else []).reshape(-1, 2).long(),
        lambda values: values,
        entropy=None if entropies is None else joined(entropies),
        labels=label_tensor(samples) if "label" in loss.requires else None,
        **fields,
    )
    count = {"token": len(inputs.targets), "sample": len(samples), "pair": 1}[loss.per]
    return split_output(loss, loss(joined(scores), inputs), count)


def label_outcomes(problem_type: ProblemType, logits: torch.Tensor, sample: Sample) -> torch.Tensor:
    """Return true positives, false positives and false negatives of each label, float64 [labels, 3], of ``logits`` [labels]."""
    predicted = predictions(problem_type, logits)
    if problem_type == "single_label_classification":
        labels = torch.arange(len(logits))
        predicted, actual = labels == predicted, labels == sample.label
    else:
        actual = sample.label > 0.5
    return torch.stack([predicted & actual, predicted & ~actual, ~predicted & actual], 1).double()


def weighted_sum(values: torch.Tensor, sample: Sample) -> float:
    """Return ``sum(weight * value)`` over a sample, in float64."""
    weights = sample.weights.double()
    # where, not a product: 0 times a log-probability of -inf is NaN.
    return float(torch.where(weights > 0, weights * values.double().cpu(), 0.0).sum())
