"""Objectives of supervised runs: tokens or preference pairs, each with its loss. Collective where a backend is used."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.functional import logsigmoid

from megascend.app.teacher_model import TeacherModel
from megascend.batch.losses import BUILT_IN, Loss, LossInputs, dpo, split_output
from megascend.batch.sample import Sample
from megascend.config import Distillation, RunConfig
from megascend.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megascend.backend import Backend
    from megascend.data.store import SampleSubset


class LearningObjective(Protocol):
    """Learning objective: turns samples into batches, and batches into a loss."""

    @property
    def loss(self) -> str | Loss:
        """The loss of ``forward_backward``."""
        ...

    def units(self, samples: SampleSubset) -> int:
        """Count the units (samples or pairs) of which batches are drawn."""
        ...

    def prepare(self, backend: Backend, samples: SampleSubset, units: Iterable[int], batch: int) -> None:
        """Compute what is needed of these units of ``samples`` before the first step; ``batch`` of them at a time."""
        ...

    def complete(self, backend: Backend, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Add to this rank's samples what the loss reads of another model; return them. Collective."""
        ...

    def trial(self, backend: Backend, samples: Sequence[Sample]) -> tuple[Sequence[Sample], str | Loss]:
        """Return this rank's samples and the loss of a step that takes as much memory as one that learns. Collective."""
        ...

    def members(self, units: Sequence[int]) -> list[tuple[int, int | None]]:
        """Return the numbers of the samples of some units, each with the number of its pair among those."""
        ...

    def batch(self, samples: SampleSubset, units: Sequence[int]) -> list[Sample]:
        """Return the samples of some units."""
        ...

    def measure(self, backend: Backend, samples: SampleSubset, adapter: str | None, batch: int) -> float:
        """Measure the loss on all of ``samples``, without learning; ``batch`` units at a time."""
        ...


def make_objective(config: RunConfig, samples: SampleSubset) -> LearningObjective:
    """Make the objective that the settings ask for."""
    if config.dpo is None and samples.has_pairs:
        raise ConfigError(f"{config.data.path} holds preference pairs: set dpo: {{beta: 0.1}} to learn from them")
    if config.dpo is not None and not samples.has_pairs:
        raise ConfigError(
            f"dpo is set, and {config.data.path} holds no preference pairs ('chosen' and 'rejected'): add them, or remove dpo"
        )
    if config.distillation is None and samples.has_candidates:
        raise ConfigError(
            f"{config.data.path} holds a teacher's distributions ('top_ids'): set distillation: {{loss: forward_kl}} to learn "
            "them, or choose the columns to read with data.columns: {token_ids: token_ids}"
        )
    if config.distillation is not None and config.distillation.teacher is not None:
        if samples.has_candidates:
            raise ConfigError(
                f"distillation.teacher: {config.distillation.teacher}, and {config.data.path} holds a teacher's distributions "
                "('top_ids') too: remove teacher, or choose the columns to read with data.columns: {token_ids: token_ids}"
            )
        return TeacherObjective(config.distillation)
    if config.distillation is not None:
        if not samples.has_candidates:
            raise ConfigError(
                f"distillation is set, and {config.data.path} holds no distributions of a teacher ('token_ids' with 'top_ids' "
                "and 'top_logprobs'): add them, name a teacher in distillation.teacher, or remove distillation"
            )
        return DistillationObjective(distillation_loss(config.distillation))
    return TokenObjective() if config.dpo is None else PreferenceObjective(config.dpo.beta)


def distillation_loss(settings: Distillation) -> Loss:
    """Return the loss of these settings."""
    loss = BUILT_IN[settings.loss]
    return loss.with_settings(beta=settings.beta) if settings.loss == "jsd" else loss


class TokenObjective:
    """Cross entropy, token by token."""

    loss: str | Loss = "cross_entropy"

    def units(self, samples: SampleSubset) -> int:
        return len(samples)

    def prepare(self, backend: Backend, samples: SampleSubset, units: Iterable[int], batch: int) -> None:
        return None

    def complete(self, backend: Backend, samples: Sequence[Sample]) -> Sequence[Sample]:
        return samples

    def trial(self, backend: Backend, samples: Sequence[Sample]) -> tuple[Sequence[Sample], str | Loss]:
        return samples, "cross_entropy"

    def members(self, units: Sequence[int]) -> list[tuple[int, int | None]]:
        return [(unit, None) for unit in units]

    def batch(self, samples: SampleSubset, units: Sequence[int]) -> list[Sample]:
        return [samples[unit] for unit in units]

    def measure(self, backend: Backend, samples: SampleSubset, adapter: str | None, batch: int) -> float:
        """Return the mean of :meth:`losses` over the weights of all samples."""
        total = weight = 0.0
        for start in range(0, len(samples), batch):
            shard = backend.shard(samples[start : start + batch])
            for sample, losses in zip(shard, self.losses(backend, shard, adapter), strict=True):
                total += weighted_sum(losses, sample)
                weight += float(sample.weights.double().sum())
        # The mean over tokens, not over ranks: ranks have different numbers of them.
        totals, weights = zip(*backend.gather_by_data_rank((total, weight)), strict=True)
        return sum(totals) / sum(weights)

    def losses(self, backend: Backend, samples: Sequence[Sample], adapter: str | None) -> list[torch.Tensor]:
        """Return the loss of every target, [length] for each sample, without gradients."""
        return [-logprobs for logprobs in backend.forward(samples, adapter=adapter).logprobs]


class DistillationObjective(TokenObjective):
    """Divergence from a teacher's distributions, token by token."""

    def __init__(self, loss: Loss) -> None:
        self.loss: Loss = loss

    def losses(self, backend: Backend, samples: Sequence[Sample], adapter: str | None) -> list[torch.Tensor]:
        scores = backend.forward(samples, adapter=adapter, candidates=True)
        assert scores.candidates is not None
        return [
            self._values(sample, logprobs, student)
            for sample, logprobs, student in zip(samples, scores.logprobs, scores.candidates, strict=True)
        ]

    def _values(self, sample: Sample, logprobs: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
        assert sample.candidates is not None
        inputs = LossInputs(
            sample.target_ids,
            sample.weights,
            torch.zeros_like(sample.target_ids),
            1,
            torch.zeros(0, 2, dtype=torch.int64),
            lambda values: values,
            candidate_ids=sample.candidates.ids,
            teacher_logprobs=sample.candidates.logprobs.double(),
            # Wider, if another sample of the micro batch has more candidates.
            candidate_logprobs=student[:, : sample.candidates.ids.shape[1]].double(),
        )
        return split_output(self.loss, self.loss(logprobs.double(), inputs), len(sample))[0]


class TeacherObjective(TokenObjective):
    """Divergence from a teacher on the trainer's ranks over the whole vocabulary, token by token.

    The teacher is built by the first :meth:`prepare`, and computes each batch before the step.
    """

    def __init__(self, settings: Distillation) -> None:
        self._settings = settings
        self._teacher: TeacherModel | None = None

    @property
    def loss(self) -> Loss:
        assert self._teacher is not None, "prepare() comes first"
        return self._teacher.loss(self._settings.loss, self._settings.beta)

    def prepare(self, backend: Backend, samples: SampleSubset, units: Iterable[int], batch: int) -> None:
        """Load the teacher. To be called before a checkpoint is loaded."""
        if self._teacher is None and self._settings.teacher is not None:
            self._teacher = TeacherModel(backend, self._settings.teacher, "distillation.teacher")

    def complete(self, backend: Backend, samples: Sequence[Sample]) -> Sequence[Sample]:
        assert self._teacher is not None
        outputs = self._teacher.outputs(samples)
        return [replace(sample, teacher_states=output.states) for sample, output in zip(samples, outputs, strict=True)]

    def trial(self, backend: Backend, samples: Sequence[Sample]) -> tuple[Sequence[Sample], str | Loss]:
        # First: the loss has the rows of the teacher's output layer, which the first pass copies.
        samples = self.complete(backend, samples)
        return samples, self.loss

    def losses(self, backend: Backend, samples: Sequence[Sample], adapter: str | None) -> list[torch.Tensor]:
        return backend.divergences(self.complete(backend, samples), self.loss, adapter)


class PreferenceObjective:
    """Direct preference optimisation. A unit is a pair: two neighbours, the chosen one first.

    The reference is the model that training starts from, without an adapter. The loss needs but the sum of its log-probabilities
    over each sample, which is computed once, before the first step.
    """

    def __init__(self, beta: float) -> None:
        self._beta = beta
        self.loss = Loss("dpo", functools.partial(dpo, beta=beta), per="pair", requires=("ref_logprobs",))
        self._reference: dict[tuple[str, int, bool], float] = {}

    def units(self, samples: SampleSubset) -> int:
        return len(samples) // 2

    def prepare(self, backend: Backend, samples: SampleSubset, units: Iterable[int], batch: int) -> None:
        """Sum the reference's log-probabilities. To be called before a checkpoint is loaded."""
        # Each pair once: a run of several epochs draws it again.
        numbers = sorted(set(units))
        for start in range(0, len(numbers), batch):
            shard = backend.shard(self._pairs(samples, numbers[start : start + batch]))
            reference = backend.forward(shard, reference=True).logprobs
            sums = {
                self._key(samples, sample): weighted_sum(logprobs, sample)
                for sample, logprobs in zip(shard, reference, strict=True)
            }
            # Every rank gets all sums: every step divides its batch among the ranks differently.
            for part in backend.gather_by_data_rank(sums):
                self._reference |= part

    def complete(self, backend: Backend, samples: Sequence[Sample]) -> Sequence[Sample]:
        return samples

    def trial(self, backend: Backend, samples: Sequence[Sample]) -> tuple[Sequence[Sample], str | Loss]:
        return samples, "cross_entropy"

    def members(self, units: Sequence[int]) -> list[tuple[int, int | None]]:
        return [(2 * unit + side, pair) for pair, unit in enumerate(units) for side in (0, 1)]

    def batch(self, samples: SampleSubset, units: Sequence[int]) -> list[Sample]:
        """Return samples whose reference log-probabilities are spread evenly over what is weighted: the loss looks at their sum.

        A batch that spans two epochs may hold a pair twice, so pairs are numbered by their place in it.
        """
        batch = self._pairs(samples, units)
        for index, sample in enumerate(batch):
            total = self._reference[self._key(samples, sample)]
            weight = float(sample.weights.double().sum())
            sample.ref_logprobs = torch.full((len(sample),), total / weight, dtype=torch.float32)
            sample.pair = index // 2
        return batch

    def measure(self, backend: Backend, samples: SampleSubset, adapter: str | None, batch: int) -> float:
        """Return the mean of ``-log sigmoid(beta * (margin of the chosen - margin of the rejected))`` over the pairs."""
        total = count = 0.0
        for start in range(0, self.units(samples), batch):
            units = range(start, min(start + batch, self.units(samples)))
            shard = backend.shard(self._pairs(samples, units))
            margins = [
                weighted_sum(logprobs, sample) - self._reference[self._key(samples, sample)]
                for sample, logprobs in zip(shard, backend.forward(shard, adapter=adapter).logprobs, strict=True)
            ]
            for chosen, rejected in zip(margins[::2], margins[1::2], strict=True):
                total -= float(logsigmoid(torch.tensor(self._beta * (chosen - rejected), dtype=torch.float64)))
                count += 1
        totals, counts = zip(*backend.gather_by_data_rank((total, count)), strict=True)
        return sum(totals) / sum(counts)

    @staticmethod
    def _pairs(samples: SampleSubset, units: Iterable[int]) -> list[Sample]:
        pairs = [samples[2 * unit + side] for unit in units for side in (0, 1)]
        for chosen, rejected in zip(pairs[::2], pairs[1::2], strict=True):
            # A loss over wrong pairs would train without any sign of it.
            if chosen.pair != rejected.pair or not chosen.chosen or rejected.chosen:
                raise DataError("samples of preference pairs are out of order")
        return pairs

    @staticmethod
    def _key(samples: SampleSubset, sample: Sample) -> tuple[str, int, bool]:
        return samples.fingerprint, int(str(sample.pair)), bool(sample.chosen)


def weighted_sum(values: torch.Tensor, sample: Sample) -> float:
    """Return ``sum(weight * value)`` over a sample, in float64."""
    weights = sample.weights.double()
    # where, not a product: 0 times a log-probability of -inf is NaN.
    return float(torch.where(weights > 0, weights * values.double().cpu(), 0.0).sum())
