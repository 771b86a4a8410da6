"""Settings of training and validation data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator

from megascend.config.rules import Rule
from megascend.config.section import Also, Count, Section, Size, has_duplicates


class ImageLimits(Section):
    """Limits of one image, and of the images of a sample.

    Attributes:
        setting: name of the section, for messages.
    """

    setting: ClassVar[str] = "data.images"

    max_bytes: Size = Field(20 * 2**20, description="largest file of an image, in bytes")
    max_pixels: Size = Field(
        2**26,
        le=2**27,
        description="most pixels of an image, width x height, before the model's processor makes it smaller",
    )
    max_count: Size = Field(32, description="most images of a conversation")


class DataImages(ImageLimits):
    """Limits of the images in the data, for models that take them."""

    folder: Path | None = Field(
        None, description="folder that all files of images must be in, links followed; unset: anywhere"
    )


DATA_COLUMNS = (
    "messages", "conversations", "system", "prompt", "completion", "label", "instruction", "input", "output", "history",
    "chosen", "rejected", "margin", "text", "token_ids", "prompt_length", "weights", "top_ids", "top_logprobs", "tools",
    "chat_template_kwargs", "images", "image",
)  # fmt: skip
"""Columns of data files that are read."""
COLUMN_RULES: tuple[Rule[Any], ...] = (
    Rule(
        "columns: {columns} names a column that is not read; write a name of docs/data.md first, and yours second",
        lambda s: not {*(s.columns or ())} <= {*DATA_COLUMNS},
    ),
    Rule(
        "columns: one column of the data has two names; leave one out",
        lambda s: has_duplicates([*(s.columns or {}).values()]),
    ),
)


class MixedSource(Section):
    """One of several sources of training data, and its share of the samples."""

    path: Path = Field(description="file or folder, read like data.path")
    weight: float | None = Field(
        None,
        gt=0,
        description="part of the samples, relative to the other weights; set it for all sources or for none. Unset: the number "
        "of the source's samples, so that an epoch has each sample once",
    )
    split: str | None = Field(None, description="as data.split, for this source")
    config_name: str | None = Field(None, description="as data.config_name, for this source")
    columns: dict[str, str] | None = Field(None, description="as data.columns, for this source")

    rules = COLUMN_RULES


class Data(Section):
    """Training data: JSONL, JSON, CSV, parquet or text files, a folder of these, or one of Hugging Face datasets."""

    # For editors; the message is that of the check below.
    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["path"]}, {"required": ["sources"]}]})

    path: Annotated[Path | None, Also("dataset", "dataset_name", "dataset_path", "train_file", "train_files")] = Field(
        None,
        description="file or folder with the training data; relative to the working directory; or a data set's name on the Hub. "
        "Alternatively set sources",
    )
    sources: tuple[MixedSource, ...] = Field(
        (),
        description="several files or folders in place of path, mixed by their weights: [{path: a.jsonl, weight: 3}, ...]",
    )
    split: Annotated[str | None, Also("dataset_split")] = Field(
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
        None, description="template file to use instead of the model's; it is exported with the model"
    )
    chat_template_options: dict[str, Any] = Field(
        {}, description="additional variables for the chat template: {enable_thinking: false}"
    )
    global_batch_size: Annotated[
        Size, Also("per_device_train_batch_size", "train_batch_size", "micro_batch_size", "gradient_accumulation_steps")
    ] = Field(8, description="samples per optimizer step, over all data parallel ranks")
    shuffle: bool = Field(True, description="draw a new random order of the samples for each epoch")
    streaming: bool = Field(
        False, description="read and tokenise records as steps need them, at constant memory; needs steps, not epochs"
    )
    shuffle_buffer: Size = Field(
        1000, description="records that a stream reads ahead and draws in a random order, of each source; with shuffle"
    )
    max_bad_records: Count = Field(
        0, description="records of a stream that may be skipped because they cannot be trained on; one more is an error"
    )
    prepared: Path | None = Field(
        None,
        description="folder that `megascend prepare --output` has written: samples are read from it and nothing is tokenised; "
        "the data themselves may be missing",
    )
    on_changed: Literal["error", "continue"] = Field(
        "error",
        description="handling of a resumed run whose samples differ from its checkpoint's (other data, template, tokenizer "
        "or date): continue uses the current samples, from the same position if their number is unchanged, else from a new epoch",
    )
    images: DataImages = DataImages()
    train_on_prompt: Annotated[bool, Also("assistant_only_loss", "train_on_inputs")] = Field(
        False, description="also train on the user's turns of conversations"
    )

    rules = (
        *COLUMN_RULES,
        Rule(
            "split: it names none; name a split, or leave it out for train",
            lambda s: not s.split,
        ),
        Rule(
            "path: the data are those of a path, or of several sources; set one of the two",
            lambda s: (s.path is None) == (not s.sources),
        ),
        Rule(
            "sources: some have a weight and others have none; set all weights, or none to read each sample once "
            "an epoch",
            lambda s: len({source.weight is None for source in s.sources}) > 1,
        ),
        *(
            Rule(
                f"{name} with streaming=false: it is a setting of streams; set streaming: true, or leave it out",
                lambda s, name=name: not s.streaming and s[name] != Data.model_fields[name].default,
            )
            for name in ("shuffle_buffer", "max_bad_records")
        ),
        Rule(
            "streaming with prepared: prepared samples are not tokenised again; leave one of them out",
            lambda s: s.streaming and s.prepared is not None,
        ),
        Rule(
            "streaming with sources with no weights: a stream does not know their numbers of samples; set their "
            "weights",
            lambda s: s.streaming and len(s.sources) > 1 and s.sources[0].weight is None,
        ),
        Rule(
            "on_too_long with streaming: a stream reads no data before the run starts; set truncate or skip",
            lambda s: s.streaming and s.on_too_long == "error",
        ),
    )

    @property
    def title(self) -> str:
        """Name the data in a message: the path, or those of all sources."""
        return str(self.path) if self.path is not None else ", ".join(str(source.path) for source in self.sources)

    def training_sources(self) -> list[DataSource]:
        """Return the sources to read: the path, or each of ``sources``."""
        if self.path is not None:
            return [DataSource(self.path, self, "data.path")]
        return [
            DataSource(
                source.path,
                self.model_copy(
                    update={
                        "path": source.path,
                        "sources": (),
                        # A source without a split or columns has those of the section.
                        **{
                            name: value
                            for name in ("split", "config_name", "columns")
                            if (value := getattr(source, name)) is not None
                        },
                    }
                ),
                f"data.sources[{number}]",
                source.weight,
            )
            for number, source in enumerate(self.sources)
        ]


@dataclass(frozen=True)
class DataSource:
    """A file or folder that a run reads.

    Attributes:
        data: settings with which it is read.
        setting: setting that names it, for messages.
        weight: part of the samples; None: their number.
    """

    path: Path
    data: Data
    setting: str
    weight: float | None = None


ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
"""transformers' names for what a sequence classifier learns, and of the losses that it learns it with."""
LABEL_METRICS: dict[ProblemType, tuple[str, ...]] = {
    "single_label_classification": ("accuracy", "macro_f1"),
    "multi_label_classification": ("accuracy", "exact_match", "macro_f1"),
    "regression": (),
}
"""Metrics of held-out samples of a classifier of which higher is better."""
PREFERENCE_LOSSES = ("dpo", "orpo", "simpo", "kto", "bradley_terry")
"""Losses with a section of a run file of their own."""


class ValidationTasks(Section):
    """Tasks of lm-eval-harness, measured at intervals (extra ``eval``)."""

    names: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        min_length=1,
        description="tasks, groups or tags of lm-eval-harness by name, or YAML files of tasks; their data are files, or what the "
        "cache of datasets has: nothing is downloaded",
    )
    interval: Size | None = Field(
        None, description="steps from one measurement to the next, and the last step; default: validation.every"
    )
    fewshot: Count | None = Field(None, description="examples before each question; default: the task's number")
    limit: Size | None = Field(None, description="documents of each task, the first ones; default: all")
    chat_template: bool = Field(
        False, description="render questions as conversations with the chat template, examples as earlier turns"
    )


class Validation(Section):
    """Held-out samples, whose loss is measured at intervals, and tasks of lm-eval-harness."""

    path: Annotated[Path | None, Also("validation_file", "val_files", "eval_file", "eval_dataset")] = Field(
        None,
        description="file or folder with held-out samples, read like data.path; alternatively set split or fraction",
    )
    split: str | None = Field(
        None, description="split of the folder at path (default: validation); without path, of the folder at data.path"
    )
    fraction: Annotated[float, Also("val_set_size", "test_size")] = Field(
        0.0, ge=0, lt=1, description="fraction of the documents of data.path to hold out, drawn with the seed"
    )
    tasks: ValidationTasks | None = Field(
        None, description="also, or without held-out samples only, measure tasks of lm-eval-harness"
    )
    every: Annotated[Size, Also("eval_steps", "eval_strategy")] = Field(
        100, description="interval of measurements in steps; the last step is always measured"
    )
    at_start: bool = Field(False, description="also measure before the first step")
    metric: str = Field(
        "loss",
        description="what keep_best, patience and min_delta compare: loss; of classification also accuracy, macro_f1, or "
        "exact_match of several labels; or a metric of tasks as TASK/METRIC, such as arc_easy/acc_norm, or TASK/METRIC/FILTER",
    )
    keep_best: bool = Field(
        False,
        description="save a checkpoint after each measurement with the best metric so far (the lowest loss), keep the best one "
        "beside checkpoint.keep_last others, and export it at the end in place of the last step",
    )
    patience: Count = Field(
        0, description="end the run after this many measurements in a row without an improvement; 0: train all steps"
    )
    min_delta: float = Field(0.0, ge=0, description="smallest change of the metric that counts as an improvement")

    rules = (
        Rule(
            "min_delta with no patience and keep_best: nothing compares with it; set one of these, or leave it out",
            lambda s: s.min_delta > 0 and not s.patience and not s.keep_best,
        ),
        Rule(
            "split: it names none; name a split, or leave it out",
            lambda s: s.split == "",
        ),
        Rule(
            "fraction with path or split: held-out samples have one source; leave one of them out",
            lambda s: s.fraction > 0 and (s.path is not None or s.split is not None),
        ),
        Rule(
            "path with no split, fraction and tasks: nothing is measured; set one of them",
            lambda s: not s.holds_out and s.tasks is None,
        ),
        Rule(
            "metric with no held-out samples: it is measured on these; set path, split or fraction, or "
            "TASK/METRIC of tasks",
            lambda s: not s.holds_out and (s.needs_labels or (s.metric == "loss" and bool(s.keep_best or s.patience))),
        ),
        Rule(
            "metric with no tasks: it is a metric of tasks; set tasks, or loss",
            lambda s: s.metric != "loss" and not s.needs_labels and s.tasks is None,
        ),
        Rule(
            "metric: it names no task; write TASK/METRIC, such as arc_easy/acc_norm",
            lambda s: s.metric != "loss" and not s.needs_labels and "/" not in s.metric,
        ),
    )

    @property
    def needs_labels(self) -> bool:
        """True if the metric is one of classifiers."""
        return self.metric in {name for names in LABEL_METRICS.values() for name in names}

    @property
    def holds_out(self) -> bool:
        """True if there are held-out samples, beside tasks or without them."""
        return self.path is not None or self.split is not None or self.fraction > 0

    @property
    def tasks_interval(self) -> int:
        """Steps from one measurement of the tasks to the next; 0 without tasks."""
        return 0 if self.tasks is None else self.tasks.interval or self.every

    def sources(self, data: Data) -> list[DataSource]:
        """Return the separate validation data, of each training source with ``split`` alone; none with ``fraction``."""
        if self.path is None and self.split is None:
            return []
        # The same settings as the training data, except for the split. All of it is read before the run.
        defaults = {
            name: Data.model_fields[name].default for name in ("streaming", "shuffle_buffer", "max_bad_records")
        }
        split = {"split": self.split, **defaults}
        if self.path is not None:
            settings = data.model_copy(update={"path": self.path, "sources": (), **split})
            return [DataSource(self.path, settings, "validation.path")]
        return [
            DataSource(
                source.path,
                source.data.model_copy(update=split),
                f"validation.split of {source.setting}" if data.sources else "validation.split",
            )
            for source in data.training_sources()
        ]


class Distillation(Section):
    """Learning a teacher's distributions: those that the data holds for each token, or those of a model."""

    teacher: Path | None = Field(
        None,
        description="checkpoint directory, or name on the Hub, of a teacher with the model's tokenizer, which the trainer's "
        "ranks compute beside the model: its distributions over the whole vocabulary are learned; unset: the data holds "
        "distributions (top_ids)",
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


def default_labels(count: int) -> tuple[str, ...]:
    """Return the names that transformers gives to labels without names."""
    return tuple(f"LABEL_{label}" for label in range(count))


class Classification(Section):
    """A sequence classifier (transformers' ``...ForSequenceClassification``) of texts or conversations with a ``label``."""

    problem_type: ProblemType = Field(
        "single_label_classification",
        description="what a label is, by transformers' names: one label a sample (cross entropy), any number of labels (binary "
        "cross entropy of each), or numbers (mean squared error)",
    )
    labels: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        None,
        min_length=1,
        description="names of the labels in the order of their ids, exported as id2label; default: those of the model's head, or "
        "LABEL_0, LABEL_1 ...",
    )
    num_labels: Size | None = Field(
        None,
        description="number of labels, in place of names; default: the model's, and 1 for a new head of regression",
    )

    @field_validator("labels", mode="before")
    @classmethod
    def _names_are_strings(cls, value: Any) -> Any:
        # YAML reads yes, no, 1 and null as other values: the message of pydantic would not say so.
        unquoted = [entry for entry in value if not isinstance(entry, str)] if isinstance(value, list | tuple) else []
        if unquoted:
            raise ValueError(f"a name is text, and YAML reads {unquoted[0]!r} here: write names in quotes")
        return value

    rules = (
        Rule(
            "num_labels with labels: their number is another one; leave num_labels out",
            lambda s: s.labels is not None and s.num_labels not in (None, len(s.labels)),
        ),
        Rule(
            "labels: one is listed twice; leave one out",
            lambda s: has_duplicates(s.labels or ()),
        ),
        Rule(
            "problem_type with one label: it chooses among two or more; set multi_label_classification",
            lambda s: (
                s.problem_type == "single_label_classification" and s.label_names is not None and len(s.label_names) < 2
            ),
        ),
    )

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """Return the names of the labels; None if only the model's head can tell them."""
        if self.labels is not None:
            return self.labels
        if self.num_labels is None:
            return None
        return default_labels(self.num_labels)
