"""What a run learns from, and what it is measured by."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from megascend.config.section import Section, Size


class Data(Section):
    """Training data: JSONL, JSON, CSV, parquet or text files, a folder of these, or one of Hugging Face datasets."""

    path: Path
    split: str = Field("train", description="which split to read of a folder in the format of Hugging Face datasets")
    columns: dict[str, str] = Field(
        {},
        description="names of columns in the data, by the names used here: {messages: dialogue}; other columns are then not read",
    )
    on_too_long: Literal["error", "truncate", "skip"] = Field(
        "error",
        description="what becomes of a conversation, completion or pair above the limit; texts are cut into pieces",
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
        description="what a resumed run does whose samples are not those of its checkpoint (data, template, tokenizer, date): "
        "continue takes the samples as they are now, at the same position if there are as many, else with a new epoch",
    )
    train_on_prompt: bool = Field(False, description="chat data: also train on the user's turns")

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
"""Columns of data files that are read, in one form or another."""


class Validation(Section):
    """Samples that are not learned, whose loss is measured at intervals."""

    path: Path | None = Field(None, description="read as data.path is; or set fraction")
    fraction: float = Field(
        0.0, ge=0, lt=1, description="of the documents of data.path, drawn by the seed, that are held out instead"
    )
    every: Size = Field(100, description="steps from one measurement to the next; the last step has one in any case")

    @model_validator(mode="after")
    def _one_source(self) -> Validation:
        if (self.path is None) == (self.fraction == 0):
            found = "both are" if self.path is not None else "neither is"
            raise ValueError(f"validation: set either path or fraction; {found} set")
        return self


class Dpo(Section):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) on preference pairs."""

    beta: float = Field(0.1, gt=0, description="how strongly the model is kept near the one that training starts from")
