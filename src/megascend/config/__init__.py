"""Typed settings of a run. Parsing and checking them needs neither torch nor Megatron.

The same sections serve the Python API (``MegatronBackend(parallel=Parallel(tensor=2))``) and the YAML file of
``megascend train``. Unknown keys are errors, as are values that no run could use; what depends on the model or on the
number of processes is checked later, by :mod:`megascend.topology.topology`.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from typing_extensions import Self, TypedDict

from megascend.config.explain import explain
from megascend.errors import ConfigError

Precision = Literal["fp32", "fp16", "bf16"]
PlatformName = Literal["auto", "cpu", "cuda", "npu"]
Affinity = Literal["none", "numa"]
ContextAlgorithm = Literal["ring", "all_gather", "ulysses"]

RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"]

ProviderOptions = dict[str, bool | int | float | str | None]

ModuleName = Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*$")]

Size = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[int, Field(ge=1, le=366 * 24 * 3600)]
"""Of waiting: torch's clocks overflow far above a year."""
Seed = Annotated[int, Field(ge=0, lt=2**62)]
"""torch takes 63 bits, and Megatron adds some thousands for each rank."""


class _RaisesConfigError(type(BaseModel)):
    """Turns pydantic's error into ours where a user constructs a section; nested sections keep their key path."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            raise ConfigError(explain(error, cls.__name__)) from None


class Section(BaseModel, metaclass=_RaisesConfigError):
    """Base of all settings: immutable, strict about names, and one error class for whatever is wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_it_is_meant(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic takes for something else: true for 1, nothing for the present directory."""
        wanted = str(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and "bool" not in wanted and ("int" in wanted or "float" in wanted):
            raise ValueError("a number is expected here, not true or false")
        if value == "" and "Path" in wanted:
            raise ValueError("a path is expected here, not an empty string")
        return value


class Parallel(Section):
    """How the ranks divide the work. Data parallelism takes what the others leave of the world size."""

    tensor: Size = Field(1, description="tensor parallel size (TP)")
    pipeline: Size = Field(1, description="pipeline parallel size (PP)")
    virtual_pipeline: Size = Field(1, description="model chunks per pipeline rank (VPP); above 1 needs pipeline > 1")
    context: Size = Field(1, description="context parallel size (CP): the sequence is split over these ranks")
    context_algorithm: ContextAlgorithm = Field(
        "ring",
        description="how CP ranks meet: ring (keys and values travel from rank to rank), all_gather (of keys and values) "
        "or ulysses (all-to-all over the heads)",
    )
    expert: Size = Field(1, description="expert parallel size (EP), MoE models only")
    expert_tensor: Size | None = Field(None, description="tensor parallel size inside an expert (ETP); default: tensor")
    sequence: bool | None = Field(
        None, description="sequence parallelism beside TP; default: on for MoE with TP > 1, else off"
    )


class Adam(Section):
    """AdamW as Megatron runs it: fp32 main parameters, global gradient-norm clipping."""

    lr: float = Field(1e-5, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0, description="not applied to biases and one-dimensional weights")
    max_grad_norm: float = Field(1.0, ge=0, description="0 switches clipping off; the norm is reported either way")
    distributed: bool = Field(True, description="shard the optimizer state over data parallel ranks (ZeRO-1)")
    overlap_grad_reduce: bool = Field(False, description="reduce gradients while the backward pass still runs")
    overlap_param_gather: bool = Field(False, description="gather updated parameters while the forward pass runs")

    @model_validator(mode="after")
    def _overlaps(self) -> Adam:
        if self.overlap_param_gather and not (self.distributed and self.overlap_grad_reduce):
            raise ValueError("overlap_param_gather needs distributed: true and overlap_grad_reduce: true")
        return self


class Schedule(Section):
    """Learning-rate schedule. Step 0 is the first optimizer step; skipped steps advance it too."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = Field(0, description="linear warm-up from 0 to lr over these steps")
    total_steps: Count = Field(
        0, description="step at which linear and cosine reach min_lr; 0 in a run file: the last step of the run"
    )
    min_lr: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _total(self) -> Schedule:
        if self.kind != "constant" and 0 < self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule {self.kind} needs total_steps > warmup_steps, got {self.total_steps} and {self.warmup_steps}"
            )
        return self

    def ending_with(self, steps: int) -> Schedule:
        """This schedule; one that names no end ends with a run of ``steps`` steps.

        Raises:
            ConfigError: the warm-up takes all of them.
        """
        if self.kind == "constant" or self.total_steps:
            return self
        if self.warmup_steps >= steps:
            raise ConfigError(
                f"schedule.warmup_steps: {self.warmup_steps} takes all of the {steps} steps of the run (steps, or what epochs "
                f"take), and kind: {self.kind} needs some after them: lower it"
            )
        return Schedule(**self.model_dump() | {"total_steps": steps})


class Recompute(Section):
    """Which activations are dropped in the forward pass and computed again in the backward pass."""

    granularity: Literal["none", "full", "selective"] = "none"
    layers: Size = Field(1, description="full: layers in one recomputed block")
    modules: tuple[RecomputeModule, ...] = Field(
        ("core_attn",),
        description="selective: any of core_attn, layernorm, mlp (dense ones), moe, moe_act, shared_experts, mla_up_proj",
    )


class Moe(Section):
    """Mixture of experts."""

    aux_loss: Literal["none", "megatron", "transformers"] = Field(
        "none",
        description="load-balancing loss, by whose formula: megatron (each layer by itself, divided by the experts of a token, "
        "summed) or transformers (all layers pooled); off by default, as when transformers fine-tunes such a model",
    )
    aux_loss_coefficient: float = Field(0.0, ge=0, description="what it is multiplied by")
    bias_update_rate: float = Field(
        0.0,
        ge=0,
        description="how far the routers' correction bias (DeepSeek-V3, GLM-4.5, dots1) moves in a step towards an equal load; "
        "0: not at all, as in transformers",
    )
    experts: Literal["upstream", "grouped"] = Field(
        "upstream",
        description="engine megatron: who computes experts: upstream (Transformer Engine, MindSpeed) or grouped (CUDA in bf16: "
        "all experts of a rank in one product, tokens permuted without a wait for the device)",
    )

    @model_validator(mode="after")
    def _formula(self) -> Moe:
        if self.aux_loss == "none" and self.aux_loss_coefficient > 0:
            raise ValueError(
                f"aux_loss_coefficient={self.aux_loss_coefficient:g} does not say which formula it is of: set moe.aux_loss to "
                "megatron (what megascend 0.1 always used) or to transformers (router_aux_loss_coef of a model's config)"
            )
        if self.aux_loss != "none" and self.aux_loss_coefficient == 0:
            raise ValueError(f"aux_loss: {self.aux_loss} needs aux_loss_coefficient above 0")
        return self


class Fsdp(Section):
    """How engine fsdp spreads a model over its ranks."""

    replicate: Size = Field(
        1, description="copies of the model, each spread over an equal number of ranks (HSDP); 1: one, over all of them"
    )
    reshard_after_forward: bool = Field(
        True,
        description="free a layer's gathered parameters after its forward pass and gather them again for the backward pass",
    )
    offload: bool = Field(
        False, description="parameters, gradients and moments stay in host memory, where the optimizer steps"
    )
    compile: bool = Field(
        False,
        description="torch.compile for each layer: faster steps, after a minute or two of compiling in the first ones",
    )


class Batching(Section):
    """How samples become micro batches."""

    packing: bool = Field(True, description="concatenate samples (THD) instead of padding them")
    micro_batch_tokens: Size | Literal["auto"] = Field(
        4096,
        description="token budget of one micro batch, padding included; auto in a run file of `megascend train`: as many as "
        "the device's memory has room for, measured when the run starts",
    )
    max_length: Size | None = Field(None, description="longest sample allowed; default: what the model allows")

    @field_validator("micro_batch_tokens", mode="wrap")
    @classmethod
    def _number_or_auto(cls, value: Any, validated: ValidatorFunctionWrapHandler) -> Any:
        """One message instead of one for each kind of value."""
        try:
            return validated(value)
        except ValidationError:
            raise ValueError("must be auto, or a whole number of 1 or more") from None

    @property
    def budget(self) -> int:
        """Tokens of one micro batch.

        Raises:
            ConfigError: they are to be found first.
        """
        if self.micro_batch_tokens == "auto":
            raise ConfigError(
                "batching.micro_batch_tokens: auto is for run files of `megascend train`, which measures; set a number, for "
                "example 4096"
            )
        return self.micro_batch_tokens

    def with_budget(self, tokens: int) -> Batching:
        """These settings with another number of tokens."""
        return self.model_copy(update={"micro_batch_tokens": tokens})


class Lora(Section):
    """One LoRA adapter: ``W x`` becomes ``W x + scaling * B A x`` in every targeted layer (Hu et al., arXiv:2106.09685)."""

    rank: Size = Field(16, description="rows of A, columns of B")
    alpha: float = Field(32.0, gt=0, description="scaling is alpha / rank, or alpha / sqrt(rank) with rslora")
    rslora: bool = Field(False, description="rank-stabilised scaling (Kalajdzievski, arXiv:2312.03732)")
    dropout: float = Field(0.0, ge=0, lt=1, description="of the layer's input on its way to A, while training")
    targets: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description="Hugging Face names of the layers, whole or their ends (q_proj, mlp.down_proj, lm_head, embed_tokens); "
        "all-linear: every linear layer of attention, MLPs and experts, not the other two",
    )
    seed: Seed | None = Field(None, description="of A's first values and of dropout; default: the backend's")
    optimizer: Adam | None = Field(
        None, description="of this adapter alone; default: the backend's. Its state is small and not sharded"
    )
    schedule: Schedule | None = Field(None, description="over this adapter's own steps; default: the backend's")

    @model_validator(mode="after")
    def _targets(self) -> Lora:
        if not self.targets or not all(self.targets):
            raise ValueError("lora.targets must name at least one layer, and no empty name")
        return self

    @property
    def scaling(self) -> float:
        """Factor of ``B A``."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class CudaGraphs(Section):
    """Steps of adapters as CUDA graphs: the kernels of a micro batch are captured once for each of a few sizes, then replayed."""

    max_tokens: Size = Field(8192, description="largest micro batch that is captured, padding included")
    max_count: Size = Field(32, description="captures kept; the one used longest ago makes room")


class Adapters(Section):
    """Train LoRA adapters on a frozen base model, and what any of them may ask for."""

    max_count: Size = Field(64, description="adapters at one time")
    max_rank: Size = Field(128, description="largest rank of one adapter")
    targets: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear", description="layers that adapters may target, as in Lora; each adapter chooses among them"
    )
    cuda_graphs: CudaGraphs | None = Field(
        None, description="replay captured steps (MegatronBackend on CUDA, one GPU for a model); default: off"
    )


class Data(Section):
    """Training data: JSONL, JSON, CSV, parquet or text files, a folder of these, or one of Hugging Face datasets."""

    path: Path
    split: str = Field("train", description="which split to read of a folder in the format of Hugging Face datasets")
    columns: dict[str, str] = Field(
        {},
        description="what the data call a column, by the name it has here: {messages: dialogue}; others are then not read",
    )
    on_too_long: Literal["error", "truncate", "skip"] = Field(
        "error",
        description="what becomes of a conversation, completion or pair above the limit; texts are cut into pieces",
    )
    chat_template: Path | None = Field(
        None,
        description="a template file to use instead of the model's, for training alone: the export keeps the model's",
    )
    chat_template_options: dict[str, Any] = Field(
        {}, description="further variables of the chat template: {enable_thinking: false}"
    )
    global_batch_size: Size = Field(8, description="samples of one optimizer step over all data parallel ranks")
    shuffle: bool = True
    train_on_prompt: bool = Field(False, description="chat data: also learn the user's turns")

    @model_validator(mode="after")
    def _columns(self) -> Data:
        unknown = sorted(self.columns.keys() - set(DATA_COLUMNS))
        if unknown:
            raise ValueError(
                f"data.columns: {', '.join(unknown)} is no column that is read; there are {', '.join(DATA_COLUMNS)}"
            )
        if len(set(self.columns.values())) != len(self.columns):
            raise ValueError("data.columns: one column of the data cannot be two")
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

    beta: float = Field(0.1, gt=0, description="how strongly the model is held to the one that training starts from")


class PromptMessage(TypedDict):
    """A message of a conversation whose next turn the model is asked for."""

    role: str
    content: str


Prompt = Annotated[str, Field(min_length=1)] | Annotated[tuple[PromptMessage, ...], Field(min_length=1)]


class Generation(Section):
    """Prompts that the model answers at intervals, to be read."""

    prompts: tuple[Prompt, ...] = Field(
        min_length=1, description="each a text, or a conversation: [{role: system, content: ...}, {role: user, ...}]"
    )
    every: Size = Field(100, description="steps from one time to the next; the last step is one in any case")
    max_tokens: Size = Field(64, description="longest answer; each token takes a forward pass")
    temperature: float = Field(0.0, ge=0, description="0: the likeliest token")
    seed: Count = Field(
        0, description="of answers at a temperature above 0: the same ones whenever the model is the same"
    )
    chat: bool = Field(
        True, description="a text is the user's turn, written by the chat template; false: it is continued as it is"
    )

    @model_validator(mode="after")
    def _prompts(self) -> Generation:
        if any(self.prompts.count(prompt) > 1 for prompt in self.prompts):
            raise ValueError("generation.prompts: a prompt is there twice")
        if not self.chat and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise ValueError(
                "generation.chat: false continues texts; a prompt that is a conversation needs the template"
            )
        return self


class Profile(Section):
    """A trace of some steps, by torch.profiler."""

    after: Count = Field(3, description="steps of this process before those that are recorded")
    steps: Size = Field(3, description="how many are recorded")
    ranks: Literal["first", "all"] = Field("first", description="which ranks record: rank 0 alone, or all of them")
    max_mib: Size = Field(
        256, description="largest trace of a rank before it is compressed; fewer steps are recorded if need be"
    )


class Checkpoint(Section):
    """When a run saves what it needs to resume, to OUTPUT/checkpoints, and what becomes of it."""

    every: Count = Field(
        0, description="steps from one to the next, and one at the end; 0: only when a signal stops the run"
    )
    keep_last: Size = Field(2, description="how many of the newest stay")
    keep_every: Count = Field(0, description="those whose step is a multiple of this stay for good; 0: none")
    asynchronous: bool = Field(True, description="write while training continues, which stands still for a copy only")
    hf: bool = Field(False, description="also export the model into each, for transformers; not in the background")
    timeout_s: Seconds = Field(1800, description="seconds after which one that is waited for counts as failed")
    on_failure: Literal["stop", "continue"] = Field(
        "stop",
        description="what happens when a checkpoint cannot be written: the run ends, or continues and tries again",
    )


RENAMED = {"mindspeed": "provider_options"}
"""Keys of run files of 0.1 that have another name now; they still load."""


def renamed_keys(values: dict[str, Any]) -> dict[str, Any]:
    """A run's settings with keys of 0.1 under their present names. Pure.

    Raises:
        ConfigError: a setting is there under both names.
    """
    both = [old for old, new in RENAMED.items() if old in values and new in values]
    if both:
        raise ConfigError(f"{both[0]} is now called {RENAMED[both[0]]}, and both are set: leave {both[0]} out")
    return {RENAMED.get(key, key): value for key, value in values.items()}


class TrainerConfig(Section):
    """What the run files of ``megascend train`` and ``megascend rl`` have in common."""

    @model_validator(mode="before")
    @classmethod
    def _keys_of_earlier_versions(cls, values: Any) -> Any:
        for old in RENAMED.keys() & values.keys() if isinstance(values, dict) else ():
            warnings.warn(f"the setting {old} is now called {RENAMED[old]}", FutureWarning, stacklevel=2)
        return renamed_keys(values) if isinstance(values, dict) else values

    model: Path = Field(description="Hugging Face checkpoint directory")
    output: Path = Field(description="run directory: metrics.jsonl, plot, TensorBoard log, export")
    steps: Size = Field(100, description="optimizer steps")
    platform: PlatformName = "auto"
    affinity: Affinity = Field(
        "none", description="numa: every process stays on the CPUs of one NUMA node, its device's where that is known"
    )
    plugins: tuple[ModuleName, ...] = Field(
        (), description="modules that every rank imports first: they register engines, losses, architectures, providers"
    )
    engine: str = Field(
        "megatron",
        description="what trains: megatron, fsdp (transformers' models under FSDP2), single (transformers in one process), "
        "or one that a plug-in registers",
    )
    precision: Precision = "bf16"
    tf32: bool = Field(
        False, description="CUDA only: products of fp32 matrices in TensorFloat-32, with 10 bits of mantissa"
    )
    seed: Seed = 1234
    parallel: Parallel = Parallel()
    fsdp: Fsdp = Fsdp()
    optimizer: Adam = Adam()
    schedule: Schedule = Schedule()
    recompute: Recompute = Recompute()
    moe: Moe = Moe()
    batching: Batching = Batching()
    checkpoint: Checkpoint = Checkpoint()
    lora: Lora | None = Field(
        None,
        description="freeze the model and train one LoRA adapter; default: all of the model's parameters are trained",
    )
    provider: str | None = Field(
        None,
        description="what patches Megatron-Core for the platform, by its registered name or as package.module:attribute; "
        "default: the platform's own",
    )
    provider_options: ProviderOptions = Field(
        {}, description="settings of the provider's own, by name (NPU: arguments of its command line, with underscores)"
    )
    trackers: tuple[str | dict[str, dict[str, Any]], ...] = Field(
        (),
        description="where figures go beside metrics.jsonl: tensorboard, wandb, swanlab, trackio, mlflow, or what a plug-in "
        "registers; by name, or as NAME: {options of its own}",
    )
    tensorboard: bool = Field(False, description="the same as tensorboard among the trackers")
    plot: bool = Field(
        True, description="draw loss, learning rate, gradient norm and throughput to metrics.png at the end"
    )
    export: bool = Field(
        True, description="at the end write the trained model to OUTPUT/hf, or the adapter to OUTPUT/adapter"
    )
    max_skipped_steps: Size = Field(
        10, description="stop after this many non-finite steps in a row; the last batch is kept in OUTPUT/non_finite"
    )
    timeout_s: Seconds = Field(600, description="seconds after which a missing rank is an error")
    self_check: bool = Field(
        True,
        description="hold a small slice of the model against transformers before training; once for a configuration",
    )

    @property
    def tracker_options(self) -> dict[str, dict[str, Any]]:
        """Options of every tracker, by name."""
        named = [{entry: {}} if isinstance(entry, str) else entry for entry in self.trackers]
        found = {name: options for entry in named for name, options in entry.items()}
        return {"tensorboard": {}} | found if self.tensorboard else found

    @model_validator(mode="after")
    def _trackers(self) -> Self:
        names = [name for entry in self.trackers for name in ([entry] if isinstance(entry, str) else entry)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"trackers: {', '.join(twice)} is there twice")
        return self

    @model_validator(mode="after")
    def _falling(self) -> Self:
        lora = self.lora
        pairs = [("", self.optimizer, self.schedule)]
        if lora is not None and (lora.optimizer or lora.schedule):
            pairs.append(("lora.", lora.optimizer or self.optimizer, lora.schedule or self.schedule))
        for where, optimizer, schedule in pairs:
            if schedule.kind != "constant" and schedule.min_lr > optimizer.lr:
                raise ValueError(
                    f"{where}schedule.min_lr: {schedule.min_lr:g} is above {where}optimizer.lr: {optimizer.lr:g}, from which the "
                    "learning rate falls to it"
                )
        return self

    def schedule_remarks(self) -> list[str]:
        """What is odd about the schedule for a run of ``steps`` steps."""
        schedule, steps = self.schedule, self.steps
        if self.lora is not None and self.lora.schedule is not None:
            schedule = self.lora.schedule
        if schedule.warmup_steps >= steps > 0:
            return [
                f"schedule.warmup_steps: {schedule.warmup_steps} is not less than steps: {steps}, so that the learning rate "
                "never reaches optimizer.lr"
            ]
        if schedule.kind == "constant" or not 0 < schedule.total_steps < steps:
            return []
        return [
            f"steps: {steps} goes beyond schedule.total_steps: {schedule.total_steps}: the last {steps - schedule.total_steps} "
            f"steps have the learning rate schedule.min_lr: {schedule.min_lr:g}; leave total_steps out to have the schedule end "
            "with the run"
        ]

    def ending_with(self, steps: int) -> Self:
        """These settings, with schedules that name no end ending with a run of ``steps`` steps.

        Raises:
            ConfigError: the warm-up of one takes all of them.
        """
        changed: dict[str, Any] = {"schedule": self.schedule.ending_with(steps)}
        if self.lora is not None and self.lora.schedule is not None:
            changed["lora"] = self.lora.model_copy(update={"schedule": self.lora.schedule.ending_with(steps)})
        return self.model_copy(update=changed)


class RunConfig(TrainerConfig):
    """Everything ``megascend train`` reads from its YAML file."""

    steps: Count = Field(100, description="optimizer steps; 0: as many as epochs take")
    epochs: float | None = Field(None, gt=0, description="how often to go through the data, instead of steps")
    data: Data
    validation: Validation | None = Field(None, description="measure the loss on samples that are not learned")
    dpo: Dpo | None = Field(
        None, description="learn from preference pairs; default: from what the data say, token by token"
    )
    generation: Generation | None = Field(None, description="have the model answer prompts at intervals")
    profile: Profile | None = Field(None, description="write a trace of some steps to OUTPUT/profile")

    @model_validator(mode="before")
    @classmethod
    def _epochs_decide(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("epochs") is not None:
            return {"steps": 0} | values
        return values

    @model_validator(mode="after")
    def _length(self) -> RunConfig:
        if self.steps == 0 and self.epochs is None:
            raise ValueError("steps must be 1 or more, or epochs set (got 0)")
        if self.steps and self.epochs is not None:
            raise ValueError(f"steps={self.steps} and epochs={self.epochs:g}: set one of them")
        if self.steps:
            self.ending_with(self.steps)
        return self

    def data_paths(self) -> dict[str, Path | None]:
        """What the run reads beside the model, by its setting."""
        return {"data.path": self.data.path, "validation.path": self.validation.path if self.validation else None}

    @property
    def validation_every(self) -> int:
        """Steps from one measurement of the validation loss to the next; 0 without a validation set."""
        return 0 if self.validation is None else self.validation.every

    def of_length(self, samples: int) -> RunConfig:
        """These settings for so many samples: with ``epochs``, the steps that they take, the last one complete.

        Raises:
            ConfigError: the warm-up of a schedule takes all steps.
        """
        if self.epochs is None:
            return self.ending_with(self.steps)
        steps = max(1, math.ceil(self.epochs * samples / self.data.global_batch_size))
        return self.ending_with(steps).model_copy(update={"steps": steps})


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML run file of ``megascend train`` and apply ``a.b=value`` overrides (values are YAML too).

    Relative ``model``, ``output`` and ``data.path`` are taken from the directory the command runs in.

    Raises:
        ConfigError: the file is missing or not a mapping, a key is unknown, or a value is out of range.
    """
    return parsed(RunConfig, read_settings(path, overrides), path)


Parsed = TypeVar("Parsed", bound=Section)


def parsed(kind: type[Parsed], values: dict[str, Any], path: str | Path) -> Parsed:
    """The settings ``values`` of a run file, checked.

    Raises:
        ConfigError: they are not what ``kind`` has; the message names the file, and every key.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, str(path))) from None


def read_settings(path: str | Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """The settings in a YAML file with ``a.b=value`` overrides applied, not checked.

    Raises:
        ConfigError: the file is missing or not a mapping, or an override is malformed.
    """
    from megascend.config.run_file import apply_overrides, read_yaml

    values = read_yaml(Path(path))
    apply_overrides(values, overrides or [])
    return values
