"""Settings of ``megascend train``, and those shared with ``megascend rl``."""

from __future__ import annotations

import math
import re
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator
from typing_extensions import Self

from megascend.config.data import (
    LABEL_METRICS,
    PREFERENCE_LOSSES,
    BradleyTerry,
    Classification,
    Data,
    DataSource,
    Distillation,
    Dpo,
    Kto,
    Orpo,
    Simpo,
    Validation,
)
from megascend.config.run_file import read_settings
from megascend.config.section import Also, Count, Seconds, Section, Size, explain
from megascend.config.training import (
    Adapters,
    Affinity,
    BaseWeights,
    EngineSettings,
    Lora,
    PluginName,
)
from megascend.errors import HIDDEN, ConfigError, hidden_entries

Prompt = Annotated[str, Field(min_length=1)] | Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
"""A text, or the messages of a conversation that the model continues with its turn."""


class Generation(Section):
    """Prompts that the model answers at intervals, for inspection."""

    prompts: tuple[Prompt, ...] = Field(
        min_length=1,
        description="list of prompts: texts, or conversations such as [{role: system, content: ...}, {role: user, ...}], whose "
        "content may be a list with images: [{type: image, image: cat.png}, {type: text, text: ...}]",
    )
    every: Size = Field(100, description="interval in steps; also after the last step")
    max_tokens: Size = Field(64, description="longest answer in tokens")
    temperature: float = Field(0.0, ge=0, description="sampling temperature; 0: always the most likely token")
    seed: Count = Field(0, description="seed for sampling at a temperature above 0")
    chat: bool = Field(
        True, description="render a text as the user's turn with the chat template; false: continue it as it is"
    )

    @model_validator(mode="after")
    def _prompts_are_distinct(self) -> Generation:
        # Answers are logged by their prompt: a second one would replace the first.
        if any(self.prompts.count(prompt) > 1 for prompt in self.prompts):
            raise ValueError("generation.prompts: a prompt appears twice")
        if not self.chat and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise ValueError(
                "generation.chat: false continues texts; a prompt that is a conversation needs the template"
            )
        return self


class Profile(Section):
    """Profiler trace of some steps, by torch.profiler."""

    after: Count = Field(3, description="steps to skip before recording")
    steps: Size = Field(3, description="steps to record")
    ranks: Literal["first", "all"] = Field("first", description="ranks that record: rank 0, or all")
    max_mib: Size = Field(
        256,
        description="size limit of a rank's trace before compression, in MiB; fewer steps are recorded if necessary",
    )


class Push(Section):
    """Upload of the exported model or adapter to the Hugging Face Hub at the end of a run."""

    repository: Annotated[str, Also("push_to_hub", "hub_model_id")] = Field(
        description="model on the Hub, as NAMESPACE/NAME; created when the run starts, if it does not exist"
    )
    private: Annotated[bool, Also("hub_private_repo")] = Field(
        True, description="create it as a private one; one that exists stays as it is"
    )

    @field_validator("repository")
    @classmethod
    def _repository_has_a_namespace(cls, value: str) -> str:
        if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", value, re.ASCII):
            raise ValueError(f"{value!r} is not the name of a model on the Hub, NAMESPACE/NAME")
        return value


class Checkpoint(Section):
    """Saving and retention of checkpoints, in OUTPUT/checkpoints."""

    every: Annotated[Count, Also("save_steps", "save_strategy", "save_freq")] = Field(
        0, description="interval of saves in steps; the last step is saved too. 0: only when a signal stops the run"
    )
    keep_last: Annotated[Size, Also("save_total_limit")] = Field(2, description="number of newest checkpoints to keep")
    keep_every: Count = Field(0, description="also keep checkpoints whose step is a multiple of this; 0: none")
    asynchronous: bool = Field(
        True, description="write in the background; training pauses only while the state is copied to host memory"
    )
    hf: bool = Field(
        False,
        description="also export the model in Hugging Face format into each checkpoint; training waits for the export",
    )
    timeout_s: Seconds = Field(1800, description="seconds after which a save fails")
    on_failure: Literal["stop", "continue"] = Field(
        "stop",
        description="when a checkpoint cannot be written: end the run, or continue and try again at the next save",
    )


class TrainerConfig(EngineSettings):
    """Settings shared by ``megascend train`` and ``megascend rl``."""

    @model_validator(mode="before")
    @classmethod
    def _no_head(cls, values: Any) -> Any:
        # Named explicitly: as an unknown key it would get the advice to check its spelling.
        if isinstance(values, dict) and "head" in values:
            raise ValueError(
                f"head: {values['head']!r:.200} is a setting of backends, not of run files: set loss to bradley_terry or "
                "classification (docs/data.md, Reward models and critics)"
            )
        return values

    output: Annotated[Path, Also("output_dir", "save_dir")] = Field(
        description="run directory for metrics, checkpoints, plot and export"
    )
    steps: Annotated[Size, Also("max_steps", "train_iters")] = Field(100, description="optimizer steps")
    affinity: Affinity = Field(
        "none", description="numa: bind each process to the CPUs of one NUMA node, that of its device if known"
    )
    plugins: tuple[PluginName, ...] = Field(
        (),
        description="modules, or files as ./mine.py, that every rank imports first, to register engines, losses, architectures, "
        "providers or trackers",
    )
    engine: Annotated[str, Also("deepspeed", "zero_stage", "fsdp_config")] = Field(
        "megatron",
        description="megatron (Megatron-Core), fsdp (transformers' models under FSDP2), single (transformers in one process), "
        "or the name of an engine that a plug-in registers",
    )
    tf32: bool = Field(False, description="CUDA only: multiply fp32 matrices in TensorFloat-32 (10 bits of mantissa)")
    checkpoint: Checkpoint = Checkpoint()
    lora: Annotated[Lora | None, Also("use_peft", "peft_config")] = Field(
        None,
        description="freeze the model and train one LoRA adapter; default: train all parameters",
    )
    base_weights: Annotated[BaseWeights, Also("load_in_4bit", "load_in_8bit")] = Field(
        "unquantised", description=f"with lora, the {Adapters.model_fields['base_weights'].description}"
    )
    template_date: date | None = Field(
        None,
        description="date for chat templates that print today's date; default: the day on which the run first started, also "
        "when it is resumed",
    )
    trackers: Annotated[tuple[str | dict[str, dict[str, Any]], ...], Also("report_to", "wandb", "use_wandb")] = Field(
        (),
        description="experiment trackers beside metrics.jsonl, by name or as {NAME: {options}}: tensorboard, wandb, "
        "swanlab, trackio, mlflow, or one that a plug-in registers",
    )
    tensorboard: bool = Field(False, description="short for adding tensorboard to trackers")
    plot: bool = Field(
        True, description="draw metrics.png at the end (needs the extra track; left out without it, unless set)"
    )
    export: bool = Field(
        True, description="at the end, write the trained model to OUTPUT/hf, or the adapter to OUTPUT/adapter"
    )
    push: Push | None = Field(
        None,
        description="upload the export to the Hugging Face Hub; the token is that of HF_TOKEN, or of `hf auth login`",
    )
    profile: Profile | None = Field(None, description="record a profiler trace of some steps in OUTPUT/profile")
    max_skipped_steps: Size = Field(
        10,
        description="end the run when more than this many consecutive steps have non-finite gradients; the last batch is kept in "
        "OUTPUT/non_finite",
    )

    def data_paths(self) -> dict[str, Path | None]:
        """Return the data files that the run reads, by their setting."""
        return {}

    @property
    def head(self) -> Literal["lm", "reward_model"] | Classification:
        """Kind of the model's last layer; see :data:`megascend.models.checkpoint_files.scalar_head.HeadKind`."""
        return "lm"

    @property
    def tracker_options(self) -> dict[str, dict[str, Any]]:
        """Options of every tracker, by name."""
        entries = [{entry: {}} if isinstance(entry, str) else entry for entry in self.trackers]
        options_by_name = {name: options for entry in entries for name, options in entry.items()}
        return {"tensorboard": {}} | options_by_name if self.tensorboard else options_by_name

    @model_validator(mode="after")
    def _trackers_are_distinct(self) -> Self:
        # An entry is a name, or a mapping of names to options.
        names = [name for entry in self.trackers for name in ([entry] if isinstance(entry, str) else entry)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"trackers: {', '.join(twice)} is listed twice")
        return self

    @model_validator(mode="after")
    def _pushes_an_export(self) -> Self:
        if self.push is not None and not self.export:
            raise ValueError(
                "push uploads what export writes, and export is false: set export: true, or leave push out"
            )
        return self

    @model_validator(mode="after")
    def _adamw_for_adapters(self) -> Self:
        if self.lora is not None:
            self.optimizer.check_for_adapters()
        return self

    @model_validator(mode="after")
    def _quantised_if_frozen(self) -> Self:
        if self.base_weights != "unquantised" and self.lora is None:
            raise ValueError(
                f"base_weights: {self.base_weights} is for a frozen model, and without lora all parameters are trained: set "
                "lora, or leave base_weights out"
            )
        return self

    @model_validator(mode="after")
    def _min_lr_below_lr(self) -> Self:
        lora = self.lora
        # An adapter may override either of the two, and inherits the other.
        pairs = [("", self.optimizer, self.schedule)]
        if lora is not None and (lora.optimizer or lora.schedule):
            pairs.append(("lora.", lora.optimizer or self.optimizer, lora.schedule or self.schedule))
        for prefix, optimizer, schedule in pairs:
            if schedule.kind != "constant" and schedule.min_lr > optimizer.lr:
                raise ValueError(
                    f"{prefix}schedule.min_lr: {schedule.min_lr:g} is above {prefix}optimizer.lr: {optimizer.lr:g}, from which "
                    "the learning rate falls to it"
                )
        return self

    def schedule_remarks(self) -> list[str]:
        """Return remarks on a schedule that does not fit a run of ``steps`` steps."""
        schedule, steps = self.schedule, self.steps
        if self.lora is not None and self.lora.schedule is not None:
            schedule = self.lora.schedule
        if schedule.warmup >= steps > 0:
            return [
                f"schedule.warmup_steps: {schedule.warmup} is not less than steps: {steps}, so that the learning rate "
                "never reaches optimizer.lr"
            ]
        if schedule.kind == "constant" or not 0 < schedule.total_steps < steps:
            return []
        return [
            f"steps: {steps} goes beyond schedule.total_steps: {schedule.total_steps}: the last {steps - schedule.total_steps} "
            f"steps have the learning rate schedule.min_lr: {schedule.min_lr:g}; leave total_steps out to have the schedule end "
            "with the run"
        ]

    def template_remarks(self) -> list[str]:
        """Return remarks on the chat template's fixed date."""
        if self.template_date is None:
            return []
        return [f"chat template: the date that it writes is {self.template_date} (template_date), also when resumed"]

    def ending_with(self, steps: int) -> Self:
        """Return these settings, with schedules without ``total_steps`` ending after ``steps`` steps."""
        changed: dict[str, Any] = {"schedule": self.schedule.ending_with(steps)}
        if self.lora is not None and self.lora.schedule is not None:
            changed["lora"] = self.lora.model_copy(update={"schedule": self.lora.schedule.ending_with(steps)})
        return self.model_copy(update=changed)


class RunConfig(TrainerConfig):
    """Settings of ``megascend train``, from its YAML file."""

    steps: Annotated[Count, Also("max_steps", "train_iters")] = Field(
        100, description="optimizer steps; 0: as many as epochs take"
    )
    epochs: Annotated[float | None, Also("num_train_epochs", "num_epochs")] = Field(
        None, gt=0, description="passes over the data, in place of steps"
    )
    data: Data = Field(description="training data")
    validation: Validation | None = Field(
        None, description="measure the loss on held-out samples, and tasks of lm-eval-harness, at intervals"
    )
    loss: str | None = Field(
        None,
        description="loss by name: cross_entropy, dpo, orpo, simpo, kto, bradley_terry, classification, one that a "
        "plug-in registers, or a function of yours as path/to/file.py:function or package.module:function; default: that of the "
        "section below that is set, else cross_entropy",
    )
    loss_settings: dict[str, float] = Field(
        {}, description="keyword arguments of a loss that is a function of yours or of a plug-in"
    )
    dpo: Dpo | None = Field(None, description="train on preference pairs with DPO")
    orpo: Orpo | None = Field(None, description="train on preference pairs with ORPO")
    simpo: Simpo | None = Field(None, description="train on preference pairs with SimPO")
    kto: Kto | None = Field(None, description="train on responses labelled desirable or undesirable with KTO")
    bradley_terry: BradleyTerry | None = Field(None, description="train a reward model on preference pairs")
    classification: Classification | None = Field(
        None, description="train a sequence classifier on texts, completions or conversations with a label"
    )
    distillation: Distillation | None = Field(
        None, description="learn the distributions of a teacher that are stored with the data's tokens"
    )
    generation: Generation | None = Field(None, description="let the model answer prompts at intervals")

    def template_remarks(self) -> list[str]:
        """Return remarks on the chat template, its export and its date."""
        if self.data.chat_template is None:
            return super().template_remarks()
        folder = self.output / ("hf" if self.lora is None else "adapter")
        carried = f"the export ({folder}) carries it" if self.export else "nothing is exported (export: false)"
        return [
            f"chat template: {self.data.chat_template} in place of the model's; {carried}",
            *super().template_remarks(),
        ]

    @model_validator(mode="before")
    @classmethod
    def _settings_of_rl(cls, values: Any) -> Any:
        # Its other sections would each be called unknown beside it, and data missing.
        if isinstance(values, dict) and "rollout" in values:
            raise ValueError(
                "rollout: for megascend rl only, which trains on what the model samples; megascend train trains on data"
            )
        return values

    @model_validator(mode="before")
    @classmethod
    def _epochs_decide(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("epochs") is not None:
            return {"steps": 0} | values  # the default of steps would conflict with epochs
        return values

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> RunConfig:
        if self.steps == 0 and self.epochs is None:
            raise ValueError("steps must be 1 or more, or epochs set (got 0)")
        if self.steps and self.epochs is not None:
            raise ValueError(f"steps={self.steps} and epochs={self.epochs:g}: set one of them")
        if self.steps:
            # Raises if the warm-up takes all steps; with epochs the number of steps is only known later.
            self.ending_with(self.steps)
        return self

    @model_validator(mode="after")
    def _streams_have_no_end(self) -> RunConfig:
        if not self.data.streaming:
            return self
        prefix = "data.streaming: true, and "
        if self.epochs is not None:
            raise ValueError(
                f"{prefix}epochs: {self.epochs:g} needs the number of samples, which a stream does not know: set steps"
            )
        if self.validation is not None and self.validation.fraction:
            raise ValueError(
                f"{prefix}validation.fraction draws from all documents: set validation.path, or validation.split"
            )
        if self.batching.micro_batch_tokens == "auto":
            raise ValueError(
                f"{prefix}batching.micro_batch_tokens: auto measures with the longest samples: set a number, such as 4096"
            )
        if self.dpo is not None or self.kto is not None:
            name = "dpo" if self.dpo is not None else "kto"
            raise ValueError(
                f"{prefix}{name} compares with a reference whose scores are computed before the first step: use orpo or simpo, "
                "or set data.streaming: false"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _named_section(cls, values: Any) -> Any:
        # `loss: orpo` is `orpo: {}`, the section with its defaults.
        sections = (*PREFERENCE_LOSSES, "classification")
        if isinstance(values, dict) and values.get("loss") in sections and values.get(values["loss"]) is None:
            return values | {values["loss"]: {}}
        return values

    @model_validator(mode="after")
    def _one_objective(self) -> RunConfig:
        sections = [
            name for name in (*PREFERENCE_LOSSES, "classification", "distillation") if getattr(self, name) is not None
        ]
        if len(sections) > 1:
            raise ValueError(f"{' and '.join(sections)} are both set: a run has one loss")
        if self.loss is not None and sections not in ([], [self.loss]):
            raise ValueError(f"loss: {self.loss} and {sections[0]} are both set: a run has one loss")
        if self.loss_settings and (sections or self.loss in (None, "cross_entropy")):
            remedy = f"set them in {sections[0]}" if sections else "the loss is cross_entropy, which has none"
            raise ValueError(f"loss_settings are of a loss that is a function of yours or of a plug-in: {remedy}")
        return self

    @model_validator(mode="after")
    def _metric_of_labels(self) -> RunConfig:
        if self.validation is None or not self.validation.needs_labels:
            return self
        setting = f"validation.metric: {self.validation.metric}"
        if self.classification is None:
            raise ValueError(f"{setting} is a metric of classifiers, and classification is not set")
        problem_type = self.classification.problem_type
        if self.validation.metric not in LABEL_METRICS[problem_type]:
            raise ValueError(f"{setting}, and {problem_type} has {', '.join(('loss', *LABEL_METRICS[problem_type]))}")
        return self

    @model_validator(mode="after")
    def _language_model_for_answers(self) -> RunConfig:
        if self.head == "lm":
            return self
        name, model = "classification", "a classifier gives labels"
        if self.bradley_terry is not None:
            name, model = "bradley_terry", "a reward model gives scores"
        if self.generation is not None:
            raise ValueError(f"generation and {name} are both set: {model}, not answers")
        if self.validation is not None and self.validation.tasks is not None:
            raise ValueError(f"validation.tasks and {name} are both set: {model}, not answers")
        if self.classification is not None and self.data.train_on_prompt:
            raise ValueError(
                "data.train_on_prompt: true has no meaning for a classifier, which learns labels: leave it out"
            )
        return self

    @property
    def head(self) -> Literal["lm", "reward_model"] | Classification:
        """Kind of the model's last layer, which the loss decides."""
        if self.classification is not None:
            return self.classification
        return "lm" if self.bradley_terry is None else "reward_model"

    @property
    def preference(self) -> tuple[str, Section] | None:
        """Name and settings of the preference loss; None for another one."""
        sections = [(name, getattr(self, name)) for name in PREFERENCE_LOSSES]
        return next(((name, section) for name, section in sections if section is not None), None)

    def data_paths(self) -> dict[str, Path | None]:
        """Return the data files that the run reads, by their setting."""
        return {
            **{source.setting: source.path for source in self.data.training_sources()},
            "validation.path": self.validation.path if self.validation else None,
            "distillation.teacher": self.distillation.teacher if self.distillation else None,
        }

    def data_sources(self) -> list[DataSource]:
        """Return the training data and separate validation data."""
        return [*self.data.training_sources(), *(self.validation.sources(self.data) if self.validation else [])]

    def for_samples(self, samples: int) -> RunConfig:
        """Return these settings for a number of samples: with ``epochs``, ``steps`` is their number of steps, rounded up.

        Raises:
            ConfigError: the warm-up of a schedule takes all steps.
        """
        if self.epochs is None:
            return self.ending_with(self.steps)
        # Rounded up: the last step may begin one more epoch.
        # In decimals: 0.07 * 100 is 7.000000000000001, of which the ceiling would be 8.
        steps = max(1, math.ceil(Fraction(str(self.epochs)) * samples / self.data.global_batch_size))
        return self.ending_with(steps).model_copy(update={"steps": steps})


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML run file of ``megascend train`` and apply ``a.b=value`` overrides (values are YAML too).

    Relative ``model``, ``output`` and ``data.path`` are taken from the directory the command runs in.

    Raises:
        ConfigError: the file is missing or not a mapping, a key is unknown, or a value is out of range.
    """
    return parsed(RunConfig, read_settings(path, overrides, RunConfig), path)


Parsed = TypeVar("Parsed", bound=Section)


def parsed(kind: type[Parsed], values: dict[str, Any], path: str | Path) -> Parsed:
    """Check the settings ``values`` of a run file; modules beside it can be imported afterwards."""
    from megascend.config.plugins import check_loss, check_names, import_from

    for key in hidden_entries(values):
        raise ConfigError(f"{path}: {key} was saved without its password ({HIDDEN}): write it again")
    folder = Path(path).parent
    if Path(path).is_file():
        import_from(folder)
    if isinstance(modules := values.get("plugins"), list):
        beside = [isinstance(name, str) and name.endswith(".py") and not Path(name).exists() for name in modules]
        names = [str(folder / name) if moved else name for name, moved in zip(modules, beside, strict=True)]
        values = values | {"plugins": names}
    try:
        settings = kind.model_validate(values)
    except ValidationError as error:
        # from None: pydantic's own message would repeat everything in other words.
        raise ConfigError(explain(error, str(path), kind)) from None
    # With plug-ins the names are checked after their import, which registers further ones.
    plugins = bool(getattr(settings, "plugins", ()))
    try:
        if not plugins:
            check_names(settings)
        if isinstance(settings, RunConfig) and settings.loss is not None:
            check_loss(settings.loss, plugins=plugins)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return settings
