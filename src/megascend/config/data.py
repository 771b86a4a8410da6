"""Settings of training and validation data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from megascend.config.section import Count, Section, Size


class PictureLimits(Section):
    """Limits of one picture, and of the pictures of a sample.

    Attributes:
        setting: name of the section, for messages.
    """

    setting: ClassVar[str] = "data.pictures"

    max_bytes: Size = Field(20 * 2**20, description="largest file of a picture, in bytes")
    max_pixels: Size = Field(
        2**26,
        le=2**27,
        description="most pixels of a picture, width x height, before the model's processor makes it smaller",
    )
    max_count: Size = Field(32, description="most pictures of a conversation")


class Pictures(PictureLimits):
    """Limits of the pictures in the data, for models that take them."""

    folder: Path | None = Field(
        None, description="folder that all files of pictures must be in, links followed; unset: anywhere"
    )


class Data(Section):
    """Training data: JSONL, JSON, CSV, parquet or text files, a folder of these, or one of Hugging Face datasets."""

    path: Path = Field(description="file or folder with the training data; relative to the working directory")
    split: str | None = Field(
        "train", description="split of a folder, by the name that Hugging Face datasets gives it; all: every file"
    )
    config_name: str | None = Field(None, description="config of a folder whose dataset card (README.md) lists several")
    columns: dict[str, str] = Field(
        {},
        description="column names in the data, by standard name: {messages: dialogue}; other columns are then ignored",
    )
    on_too_long: Literal["error", "truncate", "skip"] = Field(
        "error",
        description="handling of a conversation, completion or pair longer than batching.max_length; texts are split instead",
    )
    chat_template: Path | None = Field(
        None,
        description="template file to use instead of the model's; it is exported with the model",
    )
    chat_template_options: dict[str, Any] = Field(
        {}, description="additional variables for the chat template: {enable_thinking: false}"
    )
    global_batch_size: Size = Field(8, description="samples per optimizer step, over all data parallel ranks")
    shuffle: bool = Field(True, description="draw a new random order of the samples for each epoch")
    on_changed: Literal["error", "continue"] = Field(
        "error",
        description="handling of a resumed run whose samples differ from its checkpoint's (other data, template, tokenizer "
        "or date): continue uses the current samples, from the same position if their number is unchanged, else from a new epoch",
    )
    pictures: Pictures = Pictures()
    train_on_prompt: bool = Field(False, description="also train on the user's turns of conversations")

    @model_validator(mode="after")
    def _split(self) -> Data:
        if not self.split:
            raise ValueError("data.split: name a split, or leave it out for 'train'")
        return self

    @model_validator(mode="after")
    def _columns(self) -> Data:
        unknown = sorted(self.columns.keys() - set(DATA_COLUMNS))
        if unknown:
            raise ValueError(
                f"data.columns: {', '.join(unknown)} is not a column that is read; these are: {', '.join(DATA_COLUMNS)}"
            )
        if len(set(self.columns.values())) != len(self.columns):
            raise ValueError("data.columns: one column of the data is given for two names")
        return self


DATA_COLUMNS = (
    "messages", "conversations", "system", "prompt", "completion", "label", "instruction", "input", "output", "history",
    "chosen", "rejected", "margin", "text", "token_ids", "prompt_length", "weights", "top_ids", "top_logprobs", "tools",
    "chat_template_kwargs", "images", "image",
)  # fmt: skip
"""Columns of data files that are read."""
PREFERENCE_LOSSES = ("dpo", "orpo", "simpo", "kto", "bradley_terry")
"""Losses with a section of a run file of their own."""


class Validation(Section):
    """Held-out samples, whose loss is measured at intervals."""

    path: Path | None = Field(
        None,
        description="file or folder with held-out samples, read like data.path; alternatively set split or fraction",
    )
    split: str | None = Field(
        None, description="split of the folder at path (default: validation); without path, of the folder at data.path"
    )
    fraction: float = Field(
        0.0, ge=0, lt=1, description="fraction of the documents of data.path to hold out, drawn with the seed"
    )
    every: Size = Field(100, description="interval of measurements in steps; the last step is always measured")
    at_start: bool = Field(False, description="also measure before the first step")
    keep_best: bool = Field(
        False,
        description="save a checkpoint after each measurement with the lowest loss so far, keep the best one beside "
        "checkpoint.keep_last others, and export it at the end in place of the last step",
    )
    patience: Count = Field(
        0, description="end the run after this many measurements in a row without an improvement; 0: train all steps"
    )
    min_delta: float = Field(0.0, ge=0, description="smallest decrease of the loss that counts as an improvement")

    @model_validator(mode="after")
    def _min_delta_has_a_use(self) -> Validation:
        if self.min_delta and not self.patience and not self.keep_best:
            raise ValueError("validation.min_delta is set, and neither validation.patience nor validation.keep_best")
        return self

    @model_validator(mode="after")
    def _one_source(self) -> Validation:
        if self.split == "":
            raise ValueError("validation.split: name a split, or leave it out")
        # Neither source, or both.
        if (self.path is None and self.split is None) == (self.fraction == 0):
            setting = "path" if self.path is not None else "split"
            problem = f"{setting} and fraction are both" if self.fraction else "none is"
            raise ValueError(f"validation: set path, split or fraction; {problem} set")
        return self

    def source(self, data: Data) -> tuple[Path, Data, str] | None:
        """Return path, data settings and setting name of separate validation data; None with ``fraction``."""
        if self.fraction:
            return None
        setting = "validation.split" if self.path is None else "validation.path"
        # The same settings as the training data, except for the split.
        return self.path or data.path, data.model_copy(update={"split": self.split}), setting


class Distillation(Section):
    """Learning a teacher's distributions: those that the data holds for each token, or those of a model."""

    teacher: Path | None = Field(
        None,
        description="checkpoint directory of a teacher with the model's tokenizer, which the trainer's ranks compute beside the "
        "model: its distributions over the whole vocabulary are learned; unset: the data holds distributions (top_ids)",
    )

    loss: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        "forward_kl",
        description="divergence from the teacher: KL(teacher || model), KL(model || teacher), or the generalised Jensen-Shannon "
        "divergence; of the data's distributions over the most likely tokens, with all others as one outcome",
    )
    beta: float = Field(0.5, gt=0, lt=1, description="weight of the teacher in the mixture of jsd")


class Dpo(Section):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) on preference pairs."""

    beta: float = Field(0.1, gt=0, description="strength of the penalty for moving away from the initial model")


class Orpo(Section):
    """Odds ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691) on preference pairs, without a reference."""

    beta: float = Field(
        0.1,
        gt=0,
        description="weight of the odds ratio's term beside the chosen response's cross entropy (lambda in the paper)",
    )


class Simpo(Section):
    """Simple preference optimisation (Meng et al. 2024, arXiv:2405.14734) on preference pairs, without a reference."""

    beta: float = Field(2.0, gt=0, description="factor of a response's mean log-probability in its reward")
    gamma: float = Field(1.0, ge=0, description="margin by which the chosen response's reward is to be larger")


class Kto(Section):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306) on single responses with a label."""

    beta: float = Field(0.1, gt=0, description="strength of the penalty for moving away from the initial model")
    desirable_weight: float = Field(1.0, gt=0, description="weight of the loss of desirable responses")
    undesirable_weight: float = Field(1.0, gt=0, description="weight of the loss of undesirable responses")


class BradleyTerry(Section):
    """A reward model (Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155) of preference pairs, with a scalar head."""

    center_coefficient: float = Field(
        0.0,
        ge=0,
        description="factor of (chosen + rejected)^2, which keeps rewards around 0 (Eisenstein et al., arXiv:2312.09244)",
    )
