"""Objectives of supervised runs: tokens, preference pairs or labelled samples, each with its loss.

Collective where a backend is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from megascend.apps.train.measurement import Measurement, MetricSums, label_outcomes, loss_values, weighted_sum
from megascend.apps.train.teacher_model import TeacherModel
from megascend.config import Distillation, RunConfig
from megascend.config.data import ProblemType
from megascend.config.plugins import load_object
from megascend.config.registry import LossUnit
from megascend.errors import ConfigError, DataError
from megascend.training.batch.loss import MARGIN, Loss
from megascend.training.batch.losses import BUILT_IN, resolve
from megascend.training.batch.sample import Sample

if TYPE_CHECKING:
    from megascend.apps.data.store import Samples
    from megascend.backend import Backend


@dataclass(frozen=True)
class Scoring:
    """How held-out samples are scored.

    Attributes:
        batch_size: units (samples or pairs) of a batch.
        before_batch: called on every rank before each batch; may raise, on all of them.
    """

    adapter: str | None
    batch_size: int
    before_batch: Callable[[], None] = lambda: None

    def batches(self, units: int) -> Iterator[range]:
        for start in range(0, units, self.batch_size):
            self.before_batch()
            yield range(start, min(start + self.batch_size, units))


class LearningObjective(ABC):
    """Learning objective: turns samples into batches, and batches into a loss."""

    trial_loss: ClassVar[Loss] = BUILT_IN["cross_entropy"]
    """Loss of a trial step: it takes as much memory as the objective's, and accepts any samples."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss

    @property
    def loss(self) -> Loss:
        """The loss of ``forward_backward``."""
        return self._loss

    @property
    def has_reference(self) -> bool:
        """True if the loss compares with the model that training starts from."""
        return False

    @abstractmethod
    def units(self, samples: Samples) -> int:
        """Count the units (samples or pairs) of which batches are drawn."""

    @abstractmethod
    def members(self, units: Sequence[int]) -> list[tuple[int, int | None]]:
        """Return the sample numbers of some units, each with the number of its pair among those units, or None."""

    @abstractmethod
    def batch(self, samples: Samples, units: Sequence[int]) -> list[Sample]:
        """Return the samples of some units."""

    def prepare(self, backend: Backend, samples: Samples, units: Iterable[int], batch_size: int) -> None:
        """Compute the reference's scores of these units, ``batch_size`` at a time, before a checkpoint is loaded."""
        raise NotImplementedError

    def complete(self, backend: Backend, samples: Sequence[Sample], adapter: str | None) -> Sequence[Sample]:
        """Add results of another forward pass to this rank's samples or to the loss; return the samples. Collective.

        Args:
            adapter: adapter that is trained; None: the model.
        """
        return samples

    def trial(self, backend: Backend, samples: Sequence[Sample]) -> tuple[Sequence[Sample], Loss]:
        """Return this rank's samples and the loss of a trial step, which takes as much memory as a training step. Collective."""
        return samples, self.trial_loss

    @abstractmethod
    def measure(self, backend: Backend, samples: Samples, scoring: Scoring) -> Measurement:
        """Sum the loss over all of ``samples``, without learning. Collective."""


def make_objective(config: RunConfig, samples: Samples) -> LearningObjective:
    settings = config.distillation
    if settings is not None and settings.teacher is not None:
        _check_kind(config, samples, "token", "distillation")
        if samples.has_candidates:
            raise ConfigError(
                f"distillation.teacher: {settings.teacher}, and {config.data.title} holds a teacher's distributions ('top_ids') "
                "too: remove teacher, or set data.columns: {token_ids: token_ids}"
            )
        # Until the model is built, and with it the teacher's: only then is there a TeacherObjective.
        return TokenObjective(BUILT_IN[settings.loss])
    if config.classification is not None:
        return ClassificationObjective(config.classification.problem_type)
    setting, loss = run_loss(config, samples)
    needs_labels = loss.per == "sample" and (samples.has_labels or "label" in loss.requires)
    _check_kind(config, samples, "sample" if needs_labels else "pair" if loss.per == "pair" else "token", setting)
    _check_fields(config, samples, setting, loss)
    if loss.of == "values":
        # Fields that all samples have reach a loss; one that it requires is checked on every sample.
        return RewardObjective(replace(loss, requires=(MARGIN,)) if samples.has_margins else loss)
    if samples.has_pairs:
        return PreferenceObjective(loss)
    if samples.has_labels:
        return LabelledObjective(loss)
    return TokenObjective(loss)


def run_loss(config: RunConfig, samples: Samples) -> tuple[str, Loss]:
    """Return the setting that chooses the loss of a run, for messages, and the loss."""
    if config.distillation is not None:
        loss = BUILT_IN[config.distillation.loss]
        beta = config.distillation.beta
        return "distillation is set", loss.with_settings(beta=beta) if loss.name == "jsd" else loss
    if config.preference is not None:
        name, section = config.preference
        return f"{name} is set", BUILT_IN[name].with_settings(**section.model_dump())
    name = config.loss or "cross_entropy"
    if ":" not in name:
        loss = resolve(name)
    else:
        loss = load_object(name, "loss", lambda value: isinstance(value, Loss) or callable(value))
    if not isinstance(loss, Loss):
        # A plain function has one value for each unit of the data.
        per: LossUnit = "pair" if samples.has_pairs else "sample" if samples.has_labels else "token"
        loss = replace(resolve(loss), per=per, requires=("label",) if per == "sample" else ())
    try:
        loss = loss.with_settings(**config.loss_settings)
    except ConfigError as error:
        raise ConfigError(f"loss_settings: {error}") from None
    return f"loss: {name}" if config.loss is not None else "no loss is set", loss


KINDS: dict[LossUnit, str] = {
    "token": "texts, conversations or completions without a label",
    "pair": "preference pairs ('chosen' and 'rejected')",
    "sample": "completions with a 'label'",
}
"""Data that losses of each unit learn from."""


def _check_kind(config: RunConfig, samples: Samples, needs: LossUnit, setting: str) -> None:
    kind: LossUnit = "pair" if samples.has_pairs else "sample" if samples.has_labels else "token"
    if kind == needs:
        return
    if setting == "no loss is set":
        remedy, leave = "dpo: {beta: 0.1} (or orpo, simpo, bradley_terry)", ""
        if kind == "sample":
            remedy = "kto: {beta: 0.1}"
            leave = ", or choose the columns to read with data.columns: {prompt: prompt, completion: completion}"
        raise ConfigError(f"{config.data.title} holds {KINDS[kind]}: set {remedy} to learn from them{leave}")
    raise ConfigError(
        f"{setting}, which learns from {KINDS[needs]}, and {config.data.title} holds {KINDS[kind]}: change the data or the loss"
    )


def _check_fields(config: RunConfig, samples: Samples, setting: str, loss: Loss) -> None:
    """Raise ConfigError if a field that the loss requires is missing, or if the loss ignores a field of the data."""
    available = {"ref_logprobs"} if samples.members > 1 else set()
    available |= {"label"} if samples.has_labels else set()
    available |= {"candidates"} if samples.has_candidates else set()
    if "candidates" in loss.requires and not samples.has_candidates:
        raise ConfigError(
            f"{setting}, and {config.data.title} holds no distributions of a teacher ('token_ids', 'top_ids', 'top_logprobs'): "
            "add them, or set distillation.teacher"
        )
    if "ref_logprobs" in loss.requires and config.data.streaming:
        raise ConfigError(
            f"{setting}, which compares with a reference whose scores are computed before the first step: set data.streaming: "
            "false, or choose another loss"
        )
    if samples.has_candidates and "candidates" not in loss.requires:
        raise ConfigError(
            f"{config.data.title} holds a teacher's distributions ('top_ids'): set distillation: {{loss: forward_kl}}, or leave "
            "them out with data.columns: {token_ids: token_ids}"
        )
    if missing := [name for name in loss.requires if name not in available]:
        raise ConfigError(
            f"{setting}: the loss requires {', '.join(missing)}, which the samples of {config.data.title} do not have; they "
            f"have: {', '.join(sorted(available)) or 'no further fields'}"
        )
    if loss.of == "values" and config.head == "lm":
        raise ConfigError(
            f"{setting}: a loss of a scalar head's values; run files support bradley_terry and classification, set one of them "
            "(docs/losses.md, Reward models and critics)"
        )


SQUARED_VALUES = Loss(
    "squared values", lambda values, inputs: values.square().view(len(values), -1).sum(1), of="values"
)
"""Loss of trials on models with a scalar head."""


class TokenObjective(LearningObjective):
    """A loss of texts, conversations and completions: one value per token, or per sample."""

    def units(self, samples: Samples) -> int:
        return len(samples)

    def members(self, units: Sequence[int]) -> list[tuple[int, int | None]]:
        return [(unit, None) for unit in units]

    def batch(self, samples: Samples, units: Sequence[int]) -> list[Sample]:
        return [samples[unit] for unit in units]

    def measure(self, backend: Backend, samples: Samples, scoring: Scoring) -> Measurement:
        """Return the weighted sum of :meth:`losses` and the sum of weights, or the number of samples."""
        sums = MetricSums()
        for batch in scoring.batches(len(samples)):
            shard = backend.shard(samples[batch.start : batch.stop])
            for sample, losses in zip(shard, self.losses(backend, shard, scoring.adapter), strict=True):
                if self._loss.per == "sample":
                    sums.add(losses.sum(), {})
                else:
                    sums.add(weighted_sum(losses, sample), {}, weight=float(sample.weights.double().sum()))
        return sums.gather(backend)

    def losses(self, backend: Backend, samples: Sequence[Sample], adapter: str | None) -> list[torch.Tensor]:
        """Return the loss of every target [length], or of the sample [1], for each sample, without gradients."""
        candidates = "candidates" in self._loss.requires
        scores = backend.forward(samples, entropy=self._loss.entropy, adapter=adapter, candidates=candidates)
        return [
            loss_values(
                self._loss,
                [sample],
                [scores.logprobs[number]],
                None if scores.entropy is None else [scores.entropy[number]],
                None if scores.candidates is None else [scores.candidates[number]],
            )[0]
            for number, sample in enumerate(samples)
        ]


class TeacherObjective(TokenObjective):
    """Divergence from a teacher on the trainer's ranks over the whole vocabulary, token by token.

    The teacher computes each batch before the step.
    """

    def __init__(self, settings: Distillation, teacher: TeacherModel) -> None:
        super().__init__(BUILT_IN[settings.loss])
        self._settings, self._teacher = settings, teacher

    @property
    def loss(self) -> Loss:
        """The divergence, with the rows of the teacher's output layer, which its first pass copies."""
        return self._teacher.loss(self._settings.loss, self._settings.beta)

    def complete(self, backend: Backend, samples: Sequence[Sample], adapter: str | None) -> Sequence[Sample]:
        outputs = self._teacher.outputs(samples)
        return [replace(sample, teacher_states=output.states) for sample, output in zip(samples, outputs, strict=True)]

    def trial(self, backend: Backend, samples: Sequence[Sample]) -> tuple[Sequence[Sample], Loss]:
        samples = self.complete(backend, samples, None)  # before the loss, which needs a pass of the teacher
        return samples, self.loss

    def losses(self, backend: Backend, samples: Sequence[Sample], adapter: str | None) -> list[torch.Tensor]:
        return backend.divergences(self.complete(backend, samples, adapter), self.loss, adapter)


class PreferenceObjective(LearningObjective):
    """A loss of preference pairs. A unit is a pair: two neighbours, the chosen one first.

    The reference of a loss that requires one is the model that training starts from, without an adapter. Only the sum of its
    log-probabilities over each sample is needed, which is computed once, before the first step.
    """

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self._reference: dict[tuple[str, int, bool], float] = {}

    @property
    def has_reference(self) -> bool:
        return "ref_logprobs" in self._loss.requires

    def units(self, samples: Samples) -> int:
        return len(samples) // 2

    def prepare(self, backend: Backend, samples: Samples, units: Iterable[int], batch_size: int) -> None:
        # Each pair once: a run of several epochs draws it again.
        numbers = sorted(set(units))
        for start in range(0, len(numbers), batch_size):
            shard = backend.shard(self._members(samples, numbers[start : start + batch_size]))
            reference = backend.forward(shard, reference=True).logprobs
            sums = {
                self._key(samples, sample): weighted_sum(logprobs, sample)
                for sample, logprobs in zip(shard, reference, strict=True)
            }
            # Every rank gets all sums, because each step divides its batch differently over the ranks.
            for part in backend.gather_by_data_rank(sums):
                self._reference |= part

    def members(self, units: Sequence[int]) -> list[tuple[int, int | None]]:
        return [(2 * unit + side, pair) for pair, unit in enumerate(units) for side in (0, 1)]

    def batch(self, samples: Samples, units: Sequence[int]) -> list[Sample]:
        """Return the samples of pairs. A batch that spans two epochs may hold a pair twice, so pairs are numbered by position."""
        batch = self._members(samples, units)
        for index, sample in enumerate(batch):
            self._add_reference(samples, sample)
            sample.pair = index // 2
        return batch

    def measure(self, backend: Backend, samples: Samples, scoring: Scoring) -> Measurement:
        sums = MetricSums()
        for units in scoring.batches(self.units(samples)):
            # Pairs stay together and in order.
            shard = backend.shard(self._members(samples, units))
            scores, entropies = self._scores(backend, shard, scoring.adapter)
            for sample in shard:
                self._add_reference(samples, sample)
            for first in range(0, len(shard), 2):
                pair = slice(first, first + 2)
                sums.add(
                    *loss_values(self._loss, shard[pair], scores[pair], None if entropies is None else entropies[pair])
                )
        return sums.gather(backend)

    def _scores(
        self, backend: Backend, samples: Sequence[Sample], adapter: str | None
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor] | None]:
        """Return the loss's inputs for each sample, with entropies if it needs them, without gradients."""
        scores = backend.forward(samples, entropy=self._loss.entropy, adapter=adapter)
        return scores.logprobs, scores.entropy

    def _members(self, samples: Samples, units: Iterable[int]) -> list[Sample]:
        pairs = [samples[2 * unit + side] for unit in units for side in (0, 1)]
        for chosen, rejected in zip(pairs[::2], pairs[1::2], strict=True):
            # A loss over wrong pairs would train without any sign of it.
            if chosen.pair != rejected.pair or not chosen.chosen or rejected.chosen:
                raise DataError("samples of preference pairs are out of order")
        return pairs

    def _add_reference(self, samples: Samples, sample: Sample) -> None:
        """Spread the reference's sum evenly over the tokens with a weight, if the loss requires it; it reads only the sum."""
        if self.has_reference:
            total, weight = self._reference[self._key(samples, sample)], float(sample.weights.double().sum())
            sample.ref_logprobs = torch.full((len(sample),), total / weight, dtype=torch.float32)

    @staticmethod
    def _key(samples: Samples, sample: Sample) -> tuple[str, int, bool]:
        """Return the key of a sample: its data, its unit, and whether it is the unit's first one."""
        return samples.fingerprint, int(str(sample.pair)), bool(sample.chosen) or sample.label is not None


class ClassificationObjective(TokenObjective):
    """A loss of labelled samples by the values of a classifier's head at their last token."""

    trial_loss = SQUARED_VALUES

    def __init__(self, problem_type: ProblemType) -> None:
        super().__init__(BUILT_IN[problem_type])
        self._problem_type: ProblemType = problem_type

    def measure(self, backend: Backend, samples: Samples, scoring: Scoring) -> Measurement:
        """Return the sums of the loss and its metrics over the samples, their number, and the outcomes of each label."""
        sums = MetricSums()
        for batch in scoring.batches(len(samples)):
            shard = backend.shard(samples[batch.start : batch.stop])
            for sample, values in zip(shard, backend.values(shard, scoring.adapter), strict=True):
                sums.add(*loss_values(self._loss, [sample], [values]))
                if self._problem_type != "regression":
                    sums.add_outcomes(label_outcomes(self._problem_type, values[-1].view(-1), sample))
        return sums.gather(backend)


class RewardObjective(PreferenceObjective):
    """A loss of preference pairs by the values of a scalar head."""

    trial_loss = SQUARED_VALUES

    def _scores(
        self, backend: Backend, samples: Sequence[Sample], adapter: str | None
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor] | None]:
        return backend.values(samples, adapter), None


class LabelledObjective(PreferenceObjective):
    """A loss of labelled samples, such as KTO. A unit has two neighbours: the sample, and its prompt with another's completion.

    Of the latter, the mean log-ratio of policy and reference over the global batch estimates their divergence, which is KTO's
    reference point (at least 0) and has no gradient. So it depends neither on micro batches nor on the layout.
    """

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self._mismatched: list[Sample] = []
        self._kl = 0.0

    @property
    def loss(self) -> Loss:
        return self._with_kl(self._kl)

    @property
    def _has_kl(self) -> bool:
        return self.has_reference and "kl" in self._loss.effective_settings()

    def _with_kl(self, kl: float) -> Loss:
        return self._loss.with_settings(kl=kl) if self._has_kl else self._loss

    def complete(self, backend: Backend, samples: Sequence[Sample], adapter: str | None) -> Sequence[Sample]:
        if self._has_kl:
            self._kl = self._divergence(backend, self._log_ratios(backend, self._mismatched, adapter))
        return samples

    def members(self, units: Sequence[int]) -> list[tuple[int, int | None]]:
        return [(2 * unit, None) for unit in units]

    def batch(self, samples: Samples, units: Sequence[int]) -> list[Sample]:
        """Return the labelled samples of units; keep the others for :meth:`complete`."""
        batch = self._members(samples, units)
        for sample in batch:
            self._add_reference(samples, sample)
            # No two samples have to stay together.
            sample.pair = None
        self._mismatched = batch[1::2]
        return batch[::2]

    def measure(self, backend: Backend, samples: Samples, scoring: Scoring) -> Measurement:
        """Return the sum of the loss over the samples, with the reference point of all of them, and their number."""
        labelled: list[tuple[Sample, torch.Tensor, torch.Tensor | None]] = []
        ratios: list[float] = []
        for units in scoring.batches(self.units(samples)):
            members = self._members(samples, units)
            for sample in members:
                self._add_reference(samples, sample)
                sample.pair = None
            if self._has_kl:
                ratios += self._log_ratios(backend, members[1::2], scoring.adapter)
            shard = backend.shard(members[::2])
            scores = backend.forward(shard, entropy=self._loss.entropy, adapter=scoring.adapter)
            entropies = scores.entropy or [None] * len(shard)
            labelled += zip(shard, scores.logprobs, entropies, strict=True)
        loss = self._with_kl(self._divergence(backend, ratios)) if self._has_kl else self._loss
        sums = MetricSums()
        for sample, logprobs, entropy in labelled:
            losses, _ = loss_values(loss, [sample], [logprobs], None if entropy is None else [entropy])
            sums.add(losses.sum(), {})
        return sums.gather(backend)

    def _log_ratios(self, backend: Backend, samples: Sequence[Sample], adapter: str | None) -> list[float]:
        """Return this rank's share of the log-ratios of policy and reference, summed over each sample."""
        shard = backend.shard(samples)
        return [
            weighted_sum(logprobs, sample) - weighted_sum(sample.ref_logprobs, sample)
            for sample, logprobs in zip(shard, backend.forward(shard, adapter=adapter).logprobs, strict=True)
        ]

    @staticmethod
    def _divergence(backend: Backend, ratios: list[float]) -> float:
        """Return the mean over all ranks, at least 0, as a divergence is."""
        gathered = [ratio for part in backend.gather_by_data_rank(ratios) for ratio in part]
        return max(0.0, sum(gathered) / len(gathered))

    def _members(self, samples: Samples, units: Iterable[int]) -> list[Sample]:
        members = [samples[2 * unit + side] for unit in units for side in (0, 1)]
        for sample, mismatched in zip(members[::2], members[1::2], strict=True):
            if sample.pair != mismatched.pair or sample.label is None or mismatched.label is not None:
                raise DataError("labelled samples are out of order")
        return members
