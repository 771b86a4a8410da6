"""Checks of samples and losses before a forward or backward pass. Local."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal

from torch import Tensor

from megascend.engines.base import Engine
from megascend.engines.common import router_replay
from megascend.errors import ConfigError, DataError
from megascend.training.batch import images
from megascend.training.batch.loss import MARGIN, Loss
from megascend.training.batch.losses import CLASSIFICATION
from megascend.training.batch.sample import IGNORED, Sample


def check_samples(samples: Sequence[Sample], engine: Engine) -> None:
    """Raise DataError for samples that the model cannot process."""
    for index, sample in enumerate(samples):
        if not isinstance(sample, Sample):  # Python does not check types, and token ids are an easy mistake
            raise DataError(
                f"sample {index} is of type {type(sample).__name__}; a megascend.Sample is expected, as from "
                "Sample.causal(token_ids)"
            )
    vocab_size = engine.info.shape.vocab_size
    replay = engine.router_replay
    router_replay.check(samples, None if replay is None else replay.layers, engine.replay_unsupported_reason)
    for index, sample in enumerate(samples):
        if len(sample) > engine.max_length:
            raise DataError(
                f"sample {index} has {len(sample)} tokens, over the limit of {engine.max_length} (the model's "
                f"max_position_embeddings is {engine.info.shape.max_position}; batching.max_length="
                f"{engine.batching.max_length}); shorten or split it"
            )
        for name in ("input_ids", "target_ids"):
            ids = getattr(sample, name)
            # On the host: on a GPU an index outside the embedding is an assertion that breaks the process's device.
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= vocab_size:
                ignored = name == "target_ids" and low == IGNORED
                raise DataError(
                    f"sample {index} has {name} {low if low < 0 else high}, outside the vocabulary [0, {vocab_size}); "
                    + ("set its weight to 0" if ignored else "does the tokenizer belong to this model?")
                )
        if sample.candidates is not None and int(sample.candidates.ids.max()) >= vocab_size:
            raise DataError(
                f"sample {index} has the candidate {int(sample.candidates.ids.max())}, outside the vocabulary [0, {vocab_size}); "
                "teacher and student must have one tokenizer"
            )
        check_sampling(sample, index, samples[0].temperature, vocab_size)
        if problem := images.problem(sample.input_ids, sample.images, engine.info.image_layout):
            raise DataError(f"sample {index} {problem}")


def check_sampling(sample: Sample, index: int, temperature: float, vocab_size: int) -> None:
    """Raise DataError for a sample whose temperature differs from the first one's, or whose mask excludes a target."""
    if sample.temperature != temperature:
        raise DataError(
            f"sample {index} has the temperature {sample.temperature:g}, and sample 0 {temperature:g}; one call has one"
        )
    if sample.teacher_states is not None and (sample.allowed is not None or sample.temperature != 1):
        raise DataError(
            f"sample {index} has teacher_states, which are compared over the whole vocabulary at temperature 1, and "
            f"{'allowed' if sample.allowed is not None else f'the temperature {sample.temperature:g}'}"
        )
    if sample.allowed is None:
        return
    if sample.candidates is not None:
        raise DataError(
            f"sample {index} has candidates and allowed; a teacher's candidates are of the whole vocabulary"
        )
    if int(sample.allowed.max()) >= vocab_size:
        raise DataError(
            f"sample {index} allows the token {int(sample.allowed.max())}, outside the vocabulary [0, {vocab_size})"
        )
    # A target that the mask excludes has log-probability minus infinity: the mask is not that of the sampled tokens.
    masked = (sample.allowed >= 0).any(1) & (sample.weights != 0)
    excluded = masked & (sample.allowed != sample.target_ids[:, None]).all(1)
    if bool(excluded.any()):
        position = int(excluded.nonzero()[0])
        raise DataError(
            f"sample {index}: the target {int(sample.target_ids[position])} at position {position} is not among its allowed "
            "tokens"
        )


def require_head(engine: Engine, of: Literal["logprobs", "values"], caller: str) -> None:
    """Raise ConfigError if the model's head does not compute the input of a call or a loss.

    Args:
        of: log-probabilities of targets, or a scalar head's values.
        caller: call or loss, for the message.
    """
    if of == "logprobs" and engine.info.scalar_head is not None:
        raise ConfigError(
            f"{caller} works on log-probabilities, and this model has a scalar head: use values(), or a loss of values such as "
            "bradley_terry or Loss(of='values')"
        )
    if of == "values" and engine.info.scalar_head is None:
        raise ConfigError(
            f"{caller} works on values, and this model has no scalar head: construct the backend with head='scalar', or one of "
            "the new ones (docs/losses.md)"
        )


def check_mtp_loss(engine: Engine, loss: Loss) -> None:
    """Raise ConfigError for a loss per sample or pair if a head for multi-token prediction is trained."""
    if engine.mtp_loss_weight and loss.per != "token":
        unit = "preference pair" if loss.per == "pair" else "sample"
        raise ConfigError(
            f"mtp: train with the loss {loss.name!r}, which is one per {unit}: the head would learn rejected samples' weighted "
            "targets too; set mtp: keep"
        )


def check_pairs(pairs: Sequence[Hashable | None], names: Sequence[str]) -> None:
    """Raise DataError if a preference pair has samples of two adapters: neither could be trained on one sample."""
    owners: dict[Hashable, str] = {}
    for pair, name in zip(pairs, names, strict=True):
        owner = owners.setdefault(pair, name)
        if pair is not None and owner != name:
            raise DataError(
                f"pair {pair!r} has samples of adapters {owner!r} and {name!r}; give every adapter's pairs values of their own"
            )


def check_requirements(samples: Sequence[Sample], requires: Sequence[str], call: str) -> None:
    """Raise DataError if a sample lacks a field that a loss or a call requires."""
    for index, sample in enumerate(samples):
        missing = [name for name in requires if name not in sample.loss_fields]
        if missing:
            raise DataError(f"{call} needs {', '.join(missing)}, which sample {index} does not have")


def check_labels(samples: Sequence[Sample], loss: Loss, outputs: int) -> None:
    """Raise DataError for labels that cannot be compared with the ``outputs`` values of a head, or with each other."""
    if "label" not in loss.requires:
        return
    single, classifies = loss.name == "single_label_classification", loss.function in CLASSIFICATION
    first: Any = samples[0].label if samples else None
    for index, sample in enumerate(samples):
        label = sample.label
        if isinstance(label, Tensor) != isinstance(first, Tensor) or (
            isinstance(label, Tensor) and label.shape != first.shape
        ):
            raise DataError(f"the samples 0 and {index} have labels of different kinds: {first} and {label}")
        if not classifies:
            continue
        if single and (not isinstance(label, int) or not 0 <= label < outputs):
            # On the host: on a GPU an index outside the logits is an assertion that breaks the process's device.
            raise DataError(
                f"sample {index} has the label {label}, and the loss {loss.name!r} takes an integer from 0 to {outputs - 1}: "
                f"the model has {outputs} labels"
            )
        if not single and (not isinstance(label, Tensor) or len(label) != outputs):
            raise DataError(
                f"sample {index} has the label {label}, and the loss {loss.name!r} takes {outputs} floats, one for each label of "
                "the model"
            )


def check_fields(samples: Sequence[Sample], loss: Loss) -> None:
    """Raise DataError if a sample has weights that the loss does not allow, or candidates that do not fit its weights."""
    for index, sample in enumerate(samples):
        if loss.reduction == "mean" and bool((sample.weights < 0).any()):
            raise DataError(
                f"sample {index} has a weight of {float(sample.weights.min())}, and the loss {loss.name!r} is divided by the "
                "sum of weights; use a loss with reduction='sum' for negative weights"
            )
        if loss.of == "values" and loss.per != "token" and not float(sample.weights[-1]):
            raise DataError(
                f"sample {index} has weight 0 at its last token, where the loss {loss.name!r} reads its score; set it to 1"
            )
        if loss.of == "values" and loss.per == "pair" and (MARGIN in sample.extra) != (MARGIN in samples[0].extra):
            # Fields of a micro batch are those that all of its samples have: the others' margins would be ignored.
            raise DataError(
                f"only one of the samples 0 and {index} has extra[{MARGIN!r}]; give each sample of a call one, or none"
            )
        rows = None if loss.divergence is None else loss.divergence.weight
        if rows is not None and sample.teacher_states.shape[1] != rows.shape[1]:
            raise DataError(
                f"sample {index} has teacher_states of {sample.teacher_states.shape[1]} numbers a token, and the teacher's "
                f"output layer in the loss {loss.name!r} takes {rows.shape[1]}"
            )
        if "candidates" in loss.requires and sample.candidates is not None:
            without_candidates = (sample.weights != 0) & (sample.candidates.ids < 0).all(1)
            if bool(without_candidates.any()):
                position = int(without_candidates.nonzero()[0])
                raise DataError(
                    f"sample {index} has no candidate at position {position}, whose target has a weight in the "
                    f"loss {loss.name!r}; set the weight to 0 there"
                )
