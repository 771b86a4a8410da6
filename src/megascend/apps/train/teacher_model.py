"""A teacher on the trainer's ranks: its last hidden states of samples, and losses over its whole distributions."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megascend.apps.train.swapped_weights import SwappedWeights, difference_of_models
from megascend.config import RunConfig, TrainerConfig
from megascend.config.registry import ENGINES
from megascend.config.rl import TRAINER, RlConfig
from megascend.engines.step.policy import policy_output
from megascend.engines.step.step import Step
from megascend.errors import ConfigError
from megascend.models.checkpoint_files.files import read_config
from megascend.models.checkpoint_files.info import ModelInfo, inspect_checkpoint, shape_of
from megascend.models.memory.sizes import ModelSizes, TeacherSizes
from megascend.training.batch.loss import Loss
from megascend.training.batch.losses import teacher_loss
from megascend.training.kernels.linear_divergence import DivergenceKind, TeacherDivergence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.apps.data.samples import SampleLimits
    from megascend.backend import Backend
    from megascend.engines.base import Engine, Output
    from megascend.training.batch.micro_batch import MicroBatch
    from megascend.training.batch.sample import Sample


@dataclass(frozen=True)
class TeacherOutput:
    """A teacher's output for one sample.

    Attributes:
        logprobs: fp32 [length], log-probabilities of the targets; with states at temperature 1 over the whole vocabulary, else of
            the distribution that a sample describes.
        states: [length, h], last hidden states in the teacher's precision, on the CPU; None: not requested.
    """

    logprobs: Tensor
    states: Tensor | None = None


class TeacherModel:
    """A teacher on the ranks, in the layout and in the precision of the student.

    A teacher of the student's architecture has its weights in host memory, and takes the student's place on the device for one
    forward pass a step; another one, and that of an adapter, is a second model on the device. Either way what is kept of a pass
    are hidden states: :meth:`loss` computes logits of both models from theirs, a chunk of tokens at a time. Each rank keeps a
    copy of the rows of the teacher's output layer that it needs.

    To be built before a checkpoint is loaded. Collective.

    Args:
        setting: name of the setting with ``directory``, for messages.

    Raises:
        CheckpointError: on every rank: the weights in ``directory`` cannot be read.
        ConfigError: the engine can hold neither; see :func:`check_teacher_model`.
    """

    def __init__(self, backend: Backend, directory: Path, setting: str) -> None:
        self._weights: SwappedWeights | None = None
        self._engine: Engine | None = None
        self._projection: Tensor | None = None
        self._cap: float | None = None
        engine = backend.engine
        if can_swap(directory, engine.model_dir, engine.info, frozen=engine.trainable.frozen):
            self._weights = SwappedWeights(backend)
            self._weights.read(directory, setting)
            self._step = Step(engine)
        else:
            self._engine = backend.frozen_engine(directory)
            self._step = Step(self._engine)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    @torch.no_grad()
    def outputs(self, samples: Sequence[Sample], *, states: bool = True) -> list[TeacherOutput]:
        """Compute the teacher's output for this rank's samples. Collective.

        Router replay is for the student: the teacher chooses experts itself.

        Args:
            states: with hidden states, which :meth:`loss` needs.
        """
        plain = [replace(sample, routed_experts=None, teacher_states=None, adapter=None) for sample in samples]
        if states:  # of whole distributions, which are compared at temperature 1
            plain = [replace(sample, temperature=1.0, allowed=None) for sample in plain]
        with contextlib.nullcontext() if self._weights is None else self._weights.in_place():
            return self._outputs(plain, ("logprobs", "states") if states else ("logprobs",))

    def _outputs(self, samples: Sequence[Sample], names: Sequence[str]) -> list[TeacherOutput]:
        def scores(batch: MicroBatch, output: Output) -> dict[str, Tensor | None]:
            logprobs, *_ = policy_output(batch, output).logprobs(False)
            if "states" not in names:
                return {"logprobs": logprobs}
            states, rows, self._cap = output.logit_factors()
            if self._projection is None:
                # A copy: the rows may be gathered for this pass only, or be the student's in the next moment.
                self._projection = rows.clone()
            # To the CPU at once: those of a step's micro batches together may need more memory than the device has left.
            return {"logprobs": logprobs, "states": states.to("cpu", copy=True)}

        tensors: dict[str, Any] = self._step.token_scores("teacher", samples, None, names, scores, reference=True)
        return [TeacherOutput(*values) for values in zip(*(tensors[name] for name in names), strict=True)]

    def loss(self, kind: DivergenceKind, beta: float) -> Loss:
        """Return the divergence as a loss of samples with ``teacher_states``; after the first :meth:`outputs`."""
        return teacher_loss(TeacherDivergence(kind, self._projection, beta, self._cap))


def can_swap(directory: Path, model: Path, info: ModelInfo, *, frozen: bool) -> bool:
    """Check whether a teacher's weights can be swapped into the student: same architecture, and no adapter is trained."""
    return not frozen and difference_of_models(directory, model, info, info.mtp) is None


def teacher_directory(config: TrainerConfig) -> tuple[Path, DivergenceKind | None] | None:
    """Return the checkpoint of a run's teacher on the trainer's ranks, and its divergence that is learned; None without one."""
    if isinstance(config, RunConfig) and config.distillation is not None and config.distillation.teacher is not None:
        return config.distillation.teacher, config.distillation.loss
    if isinstance(config, RlConfig) and config.teacher is not None and config.teacher.engine == TRAINER:
        assert config.teacher.model is not None
        return config.teacher.model, None if config.teacher.loss == "policy" else config.teacher.loss
    return None


def teacher_sizes(config: TrainerConfig, info: ModelInfo) -> TeacherSizes | None:
    """Return the memory estimate's description of a teacher on the trainer's ranks; None without one."""
    teacher = teacher_directory(config)
    if teacher is None:
        return None
    directory, loss = teacher
    swapped = can_swap(directory, config.model, info, frozen=config.lora is not None)
    checkpoint = inspect_checkpoint(directory)
    return TeacherSizes(checkpoint, ModelSizes.of(checkpoint, read_config(directory)), swapped, loss)


def check_teacher_model(
    config: TrainerConfig, directory: Path, setting: str, info: ModelInfo, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check that a teacher and the student have one vocabulary, and that their engine can hold the teacher. Local.

    Args:
        setting: name of the setting with ``directory``.
    """
    check_vocabulary(directory, setting, tokenizer)
    size, expected = shape_of(read_config(directory)).vocab_size, info.shape.vocab_size
    if size != expected:
        raise ConfigError(
            f"{setting}: {directory} has a vocabulary of {size} tokens, and {config.model} one of {expected}: whole "
            "distributions are compared token by token"
        )
    if ENGINES.require(config.engine).second_model:
        return
    adapter = config.lora is not None
    reason = "the model of an adapter" if adapter else difference_of_models(directory, config.model, info, config.mtp)
    if reason is not None:
        raise ConfigError(
            f"{setting}: engine {config.engine} holds one model to a process, which only a teacher of its architecture can "
            f"replace ({'lora is set' if adapter else reason}): use engine fsdp"
        )


def check_context(directory: Path, setting: str, limits: SampleLimits) -> None:
    """Raise ConfigError if samples may be longer than a teacher's context, beyond which its scores mean nothing."""
    context = shape_of(read_config(directory)).max_position
    if context is not None and limits.length > context:
        raise ConfigError(
            f"{setting}: {directory} has a context of {context} tokens, and samples may have {limits.length} ({limits.setting}): "
            f"set batching.max_length: {context} or less, or name another teacher"
        )


def check_vocabulary(directory: Path, setting: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if a teacher's directory has a tokenizer with another vocabulary: its scores would mean nothing."""
    from transformers import AutoTokenizer

    if not directory.is_dir():
        raise ConfigError(f"{setting}: {directory} is not a directory: name a Hugging Face checkpoint")
    teacher: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    sizes = len(teacher.get_vocab()), len(tokenizer.get_vocab())
    if teacher.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"{setting}: {directory} has another vocabulary than the model ({sizes[0]} tokens, the model {sizes[1]}); a teacher "
            "scores the model's own token ids"
        )
