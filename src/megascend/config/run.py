"""Settings of ``megascend train``, and those shared with ``megascend rl``."""

from __future__ import annotations

import math
import re
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

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
from megascend.config.registry import losses_of_data
from megascend.config.rules import Rule
from megascend.config.run_file import read_settings
from megascend.config.section import Also, Count, Seconds, Section, Size, explain, has_duplicates
from megascend.config.training import (
    Adam,
    Adapters,
    Affinity,
    BaseWeights,
    EngineSettings,
    Lora,
    PluginName,
    Schedule,
    optimizer_of_adapters,
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

    rules = (
        # Answers are logged by their prompt: a second one would replace the first.
        Rule(
            "prompts: one appears twice, and answers are logged by their prompt; leave one out",
            lambda s: has_duplicates(s.prompts),
        ),
        Rule(
            "chat with a prompt that is a conversation: it needs the chat template; set true",
            lambda s: not s.chat and not all(isinstance(prompt, str) for prompt in s.prompts),
        ),
    )


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
    remote: str | None = Field(
        None,
        pattern=r"^\w[\w+.-]*://.+",
        description="folder in object storage (s3://BUCKET/FOLDER, gs://) to which complete checkpoints and the export are "
        "copied in the background; --resume auto continues from there where OUTPUT has no checkpoint",
    )


class TrainerConfig(EngineSettings):
    """Settings shared by ``megascend train`` and ``megascend rl``."""

    counterparts: ClassVar[dict[str, str]] = {
        "head": "a setting of backends; set loss to bradley_terry or classification (docs/losses.md, Reward models and critics)"
    }
    """Settings of other programs that are asked for here, and what to set in their place."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_settings_of_others(cls, values: Any) -> Any:
        # As unknown keys they would get the advice to check their spelling.
        for name, remedy in cls.counterparts.items():
            if isinstance(values, dict) and name in values:
                raise ValueError(f"{name}: {remedy}")
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
    callbacks: tuple[str, ...] = Field(
        (),
        description="subclasses of megascend.Callback, as path/to/file.py:Class or package.module:Class, that rank 0 calls "
        "between steps; they may ask to save or to stop",
    )
    engine: Annotated[str, Also("deepspeed", "zero_stage", "fsdp_config")] = Field(
        "megatron",
        description="megatron (Megatron-Core), fsdp (transformers' models under FSDP2), single (transformers in one process), "
        "or the name of an engine that a plug-in registers",
    )
    tf32: bool = Field(False, description="CUDA only: multiply fp32 matrices in TensorFloat-32 (10 bits of mantissa)")
    checkpoint: Checkpoint = Checkpoint()
    lora: Annotated[Lora | None, Also("use_peft", "peft_config")] = Field(
        None, description="freeze the model and train one LoRA adapter; default: train all parameters"
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

    rules = (
        Rule(
            "trackers: one of them is listed twice; leave one out",
            lambda s: has_duplicates(
                [name for entry in s.trackers for name in ([entry] if isinstance(entry, str) else entry)]
            ),
        ),
        Rule(
            "push with export=false: it uploads what export writes; set export: true, or leave push out",
            lambda s: s.push is not None and not s.export,
        ),
        optimizer_of_adapters("optimizer with lora", lambda s: s.optimizer if s.lora is not None else None),
        Rule(
            "base_weights with no lora: all parameters are trained, and only frozen ones can be quantised; set "
            "lora, or leave base_weights out",
            lambda s: s.base_weights != "unquantised" and s.lora is None,
        ),
        Rule(
            "schedule.min_lr with optimizer.lr={optimizer.lr:g}: the learning rate falls to it from "
            "optimizer.lr; lower it",
            lambda s: _rises(s.schedule, s.optimizer),
        ),
        Rule(
            "lora with a schedule.min_lr above optimizer.lr: the learning rate falls from optimizer.lr to "
            "min_lr; lower min_lr",
            # An adapter may override either of the two, and inherits the other.
            lambda s: s.lora is not None and _rises(s.lora.schedule or s.schedule, s.lora.optimizer or s.optimizer),
        ),
    )

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


def _rises(schedule: Schedule, optimizer: Adam) -> bool:
    return schedule.kind != "constant" and schedule.min_lr > optimizer.lr


class RunConfig(TrainerConfig):
    """Settings of ``megascend train``, from its YAML file."""

    steps: Annotated[Count, Also("max_steps", "train_iters")] = Field(
        100, description="optimizer steps; 0: as many as epochs take"
    )
    epochs: Annotated[float | None, Also("num_train_epochs", "num_epochs")] = Field(
        None, gt=0, description="passes over the data, in place of steps; the last step is filled from a further one"
    )
    data: Data = Field(description="training data")
    validation: Validation | None = Field(
        None, description="measure the loss on held-out samples, and tasks of lm-eval-harness, at intervals"
    )
    loss: str | None = Field(
        None,
        description=f"loss by name: {', '.join(losses_of_data())}, one that a plug-in registers, or a function of yours as "
        "path/to/file.py:function or package.module:function; default: that of the section below that is set, else cross_entropy",
    )
    loss_settings: dict[str, float] = Field(
        {}, description="keyword arguments of the function of a loss that has no section below"
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

    # Its other sections would each be called unknown beside it, and data missing.
    counterparts = TrainerConfig.counterparts | {
        "rollout": "for megascend rl only, which trains on what the model samples"
    }

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if values.get("epochs") is not None:
            values = {"steps": 0} | values  # the default of steps would conflict with epochs
        # `loss: orpo` is `orpo: {}`, the section with its defaults.
        loss = values.get("loss")
        if loss in (*PREFERENCE_LOSSES, "classification") and values.get(loss) is None:
            values = values | {loss: {}}
        return values

    @model_validator(mode="after")
    def _schedules_fit_the_steps(self) -> RunConfig:
        if self.steps:  # with epochs the number of steps is only known later
            self.ending_with(self.steps)
        return self

    rules = (
        *TrainerConfig.rules,
        Rule(
            "steps with epochs={epochs}: a run ends after steps or after epochs; set one of them",
            lambda s: (s.steps == 0) == (s.epochs is None),
        ),
        Rule(
            "epochs with data.streaming: a stream does not know its number of samples; set steps",
            lambda s: s.data.streaming and s.epochs is not None,
        ),
        Rule(
            "validation.fraction with data.streaming: it draws from all documents; set validation.path, or "
            "validation.split",
            lambda s: s.data.streaming and s.validation is not None and s.validation.fraction > 0,
        ),
        Rule(
            "batching.micro_batch_tokens with data.streaming: it measures with the longest samples; set a "
            "number, such as 4096",
            lambda s: s.data.streaming and s.batching.micro_batch_tokens == "auto",
        ),
        Rule(
            "data.streaming with dpo or kto: the reference's scores are computed before the first step; set false, or "
            "use orpo or simpo",
            lambda s: s.data.streaming and (s.dpo or s.kto) is not None,
        ),
        Rule(
            "loss with {objectives}: a run has one loss; leave out the others",
            lambda s: len(s.objectives) > 1 or (s.loss is not None and s.objectives not in ([], [s.loss])),
        ),
        Rule(
            "loss_settings with a loss that has a section, or cross_entropy: they are of the other losses; set those of the "
            "section",
            lambda s: bool(s.loss_settings and (s.objectives or s.loss in (None, "cross_entropy"))),
        ),
        Rule(
            "validation.metric with no classification: it is a metric of classifiers; set classification, or "
            "another metric",
            lambda s: s.validation is not None and s.validation.needs_labels and s.classification is None,
        ),
        Rule(
            "validation.metric with {classification.problem_type}: it is a metric of "
            "other classifiers; set loss, or a metric of these (docs/preferences.md)",
            lambda s: (
                s.validation is not None
                and s.validation.needs_labels
                and s.validation.metric not in LABEL_METRICS[s.classification.problem_type]
            ),
        ),
        Rule(
            "generation with bradley_terry or classification: the model has no answers; leave it out",
            lambda s: s.head != "lm" and s.generation is not None,
        ),
        Rule(
            "validation.tasks with bradley_terry or classification: the model has no answers; leave it out",
            lambda s: s.head != "lm" and s.validation is not None and s.validation.tasks is not None,
        ),
        Rule(
            "data.train_on_prompt with classification: a classifier learns labels; leave it out",
            lambda s: s.classification is not None and s.data.train_on_prompt,
        ),
    )

    @property
    def objectives(self) -> list[str]:
        """Return the names of the losses whose sections are set."""
        names = (*PREFERENCE_LOSSES, "classification", "distillation")
        return [name for name in names if getattr(self, name) is not None]

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

    def last_step(self, samples: int) -> str | None:
        """Describe how the last step of ``epochs`` over a number of samples is filled; None if it ends with a pass."""
        if self.epochs is None:
            return None
        size = self.data.global_batch_size
        further = int(self.steps * size - Fraction(str(self.epochs)) * samples)
        length = f"epochs: {self.epochs:g} over {samples:,} samples are {self.steps:,} steps of {size}"
        return f"{length}; the last one takes {further} from a further pass" if further else None


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
