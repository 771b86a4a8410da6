"""Settings of training and validation data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from megascend.config.section import Section, Size


class Data(Section):
    """Training data: JSONL, JSON, CSV, parquet or text files, a folder of these, or one of Hugging Face datasets."""

    path: Path
    split: str | None = Field(
        "train", description="which split to read of a folder, by the names that datasets gives them; all: every file"
    )
    config_name: str | None = Field(
        None, description="which config to read of a folder whose card (README.md) lists several"
    )
    columns: dict[str, str] = Field(
        {},
        description="names of columns in the data, by the names used here: {messages: dialogue}; other columns are then not read",
    )
    on_too_long: Literal["error", "truncate", "skip"] = Field(
        "error",
        description="handling of a conversation, completion or pair above the limit; texts are cut into pieces",
    )
    chat_template: Path | None = Field(
        None,
        description="a template file to use instead of the model's; the export carries it",
    )
    chat_template_options: dict[str, Any] = Field(
        {}, description="further variables of the chat template: {enable_thinking: false}"
    )
    global_batch_size: Size = Field(8, description="samples of one optimizer step over all data parallel ranks")
    shuffle: bool = True
    on_changed: Literal["error", "continue"] = Field(
        "error",
        description="handling of a resumed run whose samples are not those of its checkpoint (data, template, tokenizer, date): "
        "continue uses the current samples, at the same position if there are as many, else from a new epoch",
    )
    train_on_prompt: bool = Field(False, description="chat data: also train on the user's turns")

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
    "messages", "conversations", "system", "prompt", "completion", "instruction", "input", "output", "history",
    "chosen", "rejected", "text", "tools", "chat_template_kwargs",
)  # fmt: skip
"""Columns of data files that are read."""


class Validation(Section):
    """Held-out samples, whose loss is measured at intervals."""

    path: Path | None = Field(None, description="read like data.path; or set split or fraction")
    split: str | None = Field(
        None, description="which split to read of the folder at path, by default validation; without path, of data.path"
    )
    fraction: float = Field(
        0.0, ge=0, lt=1, description="fraction of the documents of data.path to hold out instead, drawn by the seed"
    )
    every: Size = Field(100, description="steps from one measurement to the next; the last step has one in any case")

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


class Dpo(Section):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) on preference pairs."""

    beta: float = Field(0.1, gt=0, description="strength of the penalty for leaving the initial model")
