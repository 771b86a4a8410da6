"""Settings of every engine: parallelism, optimizer, batching and LoRA adapters."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from megascend.config.rules import Rule
from megascend.config.section import Also, Beta, Count, Section, Seed, Share, Size, has_duplicates
from megascend.errors import ConfigError

Precision = Literal["fp32", "fp16", "bf16"]
PRECISIONS: dict[str, Precision] = {
    **{name: name for name in get_args(Precision)},
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
}
"""Precisions by their spellings, those of torch's dtypes included."""
PlatformName = Literal["auto", "cpu", "cuda", "npu"]
Affinity = Literal["none", "numa"]
ContextAlgorithm = Literal["ring", "all_gather", "ulysses"]
Mtp = Literal["train", "keep", "drop"]
VisionTower = Literal["frozen", "train"]
BaseWeights = Literal["unquantised", "fp8", "nf4"]

OptimizerKind = Literal["adamw", "muon"]
"""The settings of a kind other than ``adamw`` are the section of its name."""

RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"]

ProviderOptions = dict[str, bool | int | float | str | None]


def precision_name(value: Any) -> Any:
    """Return the precision of a spelling of it, such as ``torch.bfloat16``; other values unchanged."""
    return PRECISIONS.get(str(value).removeprefix("torch."), value)


AnyPrecision = Annotated[Precision, BeforeValidator(precision_name)]

PluginName = Annotated[str, Field(pattern=r"^([^\W\d]\w*(\.[^\W\d]\w*)*|.+\.py)$")]


class Parallel(Section):
    """Parallel sizes. The data parallel size is the world size divided by the others."""

    tensor: Annotated[Size, Also("tp", "tensor_parallel_size", "tensor_model_parallel_size")] = Field(
        1, description="tensor parallel size (TP)"
    )
    pipeline: Annotated[Size, Also("pp", "pipeline_parallel_size", "pipeline_model_parallel_size")] = Field(
        1, description="pipeline parallel size (PP)"
    )
    virtual_pipeline: Size = Field(1, description="model chunks per pipeline rank (VPP); above 1 needs pipeline > 1")
    pipeline_layout: str | None = Field(
        None,
        description="layers of each of the pipeline x virtual_pipeline chunks, in Megatron's notation, as Ett|(ttt|)*2tmL: E "
        "embedding, t layer, m head for multi-token prediction (mtp: train), L output layer; default: equal numbers of layers",
    )
    context: Annotated[Size, Also("cp", "context_parallel_size")] = Field(
        1, description="context parallel size (CP): the sequence is split over these ranks"
    )
    context_algorithm: ContextAlgorithm = Field(
        "ring",
        description="how CP ranks communicate: ring (keys and values are passed from rank to rank), all_gather (of keys and "
        "values) or ulysses (all-to-all over the heads)",
    )
    expert: Annotated[Size, Also("ep", "expert_parallel_size", "expert_model_parallel_size")] = Field(
        1, description="expert parallel size (EP), MoE models only"
    )
    expert_tensor: Size | None = Field(None, description="tensor parallel size inside an expert (ETP); default: tensor")
    sequence: Annotated[bool | None, Also("sequence_parallel")] = Field(
        None, description="sequence parallelism with TP; default: on for MoE with TP > 1, else off"
    )


class ParameterGroup(Section):
    """Optimizer settings of the weights that a pattern matches."""

    match: str = Field(
        min_length=1,
        description="pattern of names in the Hugging Face checkpoint, with * and ?: model.embed_tokens.*; of several groups that "
        "match a weight the first counts, and a group without any weight is an error",
    )
    lr_scale: float = Field(1.0, ge=0, description="factor of the learning rate; 0: these weights stay as they are")
    weight_decay: float | None = Field(
        None,
        ge=0,
        description="in place of optimizer.weight_decay; not applied to biases and one-dimensional weights either",
    )


class Muon(Section):
    """Muon (Jordan et al. 2024): momentum of matrices, orthogonalised by Newton-Schulz iterations."""

    momentum: Beta = Field(0.95, description="decay rate of the momentum")
    nesterov: bool = Field(True, description="add the gradient to the momentum once more (Nesterov)")
    steps: Size = Field(5, description="Newton-Schulz iterations, of the quintic 3.4445 x - 4.775 x^3 + 2.0315 x^5")
    update_scale: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="factor of the update of a matrix [rows, columns]: match_rms_adamw, 0.2 sqrt(max(rows, columns)), with which "
        "AdamW's learning rate fits (Moonlight); original, sqrt(max(1, rows / columns))",
    )


class Adam(Section):
    """AdamW as in Megatron: fp32 main parameters, global gradient-norm clipping; optionally Muon for the layers' matrices."""

    kind: Annotated[OptimizerKind, Also("optim")] = Field(
        "adamw",
        description="muon: Muon for the matrices of the decoder's layers and of their experts; AdamW for embeddings, output "
        "layer, norms, biases, routers and a vision tower",
    )
    lr: Annotated[float, Also("learning_rate")] = Field(1e-5, ge=0, description="peak learning rate")
    betas: Annotated[tuple[Beta, Beta], Also("adam_beta1", "adam_beta2")] = Field(
        (0.9, 0.999), description="decay rates of the two moments"
    )
    eps: Annotated[float, Also("adam_epsilon")] = Field(
        1e-8, gt=0, description="added to the denominator of the update"
    )
    weight_decay: float = Field(
        0.01, ge=0, description="decoupled weight decay; not applied to biases and one-dimensional weights"
    )
    max_grad_norm: Annotated[float, Also("clip_grad", "gradient_clipping")] = Field(
        1.0, ge=0, description="largest global gradient norm; larger gradients are scaled down to it. 0: no clipping"
    )
    groups: tuple[ParameterGroup, ...] = Field(
        (), description="other settings for some weights: match, lr_scale, weight_decay"
    )
    muon: Muon = Muon()
    moments: Literal["fp32", "8bit"] = Field(
        "fp32",
        description="AdamW's moments: 8bit, in blocks of 256 values with a common scale (Dettmers et al. 2022), a quarter of the "
        "memory; those of biases and one-dimensional weights stay fp32",
    )
    offload: bool | Share = Field(
        False,
        description="of engine megatron: keep fp32 main parameters and moments in host memory, page-locked on CUDA, and stream "
        "them through the device in the update; true: all, 0.5: half of them",
    )
    distributed: bool = Field(True, description="shard the optimizer state over data parallel ranks (ZeRO-1)")
    overlap_grad_reduce: bool = Field(
        False,
        description="reduce gradients while the backward pass still runs; allows one forward_backward per optimizer_step",
    )
    overlap_param_gather: bool = Field(
        False,
        description="gather updated parameters while the forward pass runs; needs distributed and overlap_grad_reduce",
    )

    rules = (
        Rule(
            "overlap_param_gather: Megatron-Core overlaps it with distributed and overlap_grad_reduce only; set "
            "both to true",
            lambda s: s.overlap_param_gather and not (s.distributed and s.overlap_grad_reduce),
        ),
        Rule(
            "groups: two of them have one pattern; leave one out",
            lambda s: has_duplicates([group.match for group in s.groups]),
        ),
        *(
            Rule(
                f"{name} with kind={{kind}}: its settings have no effect; set kind: {name}, or leave it out",
                lambda s, name=name: s.kind != name and s[name] != Adam.model_fields[name].default,
            )
            for name in get_args(OptimizerKind)
            if name != "adamw"
        ),
        Rule(
            "moments with kind={kind}: AdamW alone has them; leave it out",
            lambda s: s.kind != "adamw" and s.moments != "fp32",
        ),
        Rule(
            "offload with kind={kind} and moments={moments}: only AdamW's fp32 moments are offloaded; leave one "
            "of them out",
            lambda s: bool(s.offload) and (s.kind != "adamw" or s.moments != "fp32"),
        ),
    )

    @property
    def offloaded_share(self) -> float:
        """Share of the optimizer state in host memory."""
        return float(self.offload)

    @property
    def by_weight(self) -> bool:
        """True if settings depend on the names of the model's weights."""
        return self.kind != "adamw" or bool(self.groups)

    @property
    def kind_counter(self) -> dict[str, str]:
        """Entry of a checkpoint's counters that names an optimizer other than AdamW; none for AdamW, as in earlier versions."""
        return {} if self.kind == "adamw" else {"kind": self.kind}

    @property
    def fits_adapters(self) -> bool:
        """False with settings of the model's own weights, which adapters do not train."""
        return not (self.by_weight or self.moments != "fp32" or self.offload)


class Schedule(Section):
    """Learning-rate schedule. Step 0 is the first optimizer step; skipped steps advance it too."""

    kind: Annotated[Literal["constant", "linear", "cosine", "polynomial", "wsd"], Also("lr_scheduler_type")] = Field(
        "constant",
        description="shape of the decay from optimizer.lr to min_lr after the warm-up; constant: none; wsd: warm-up, stable, "
        "decay: none before the last decay_ratio of the steps",
    )
    warmup_steps: Annotated[Count, Also("num_warmup_steps", "lr_warmup_steps")] = Field(
        0, description="linear warm-up from 0 to lr over these steps"
    )
    warmup_ratio: Annotated[float, Also("lr_warmup_fraction")] = Field(
        0.0,
        ge=0,
        lt=1,
        description="the warm-up as a share of total_steps, rounded up to steps but for the last one; in place of warmup_steps",
    )
    total_steps: Count = Field(
        0, description="step at which the decay reaches min_lr; 0 in a run file: the last step of the run"
    )
    min_lr: Annotated[float, Also("lr_scheduler_kwargs")] = Field(
        0.0, ge=0, description="learning rate at the end of the decay"
    )
    power: float = Field(
        1.0, gt=0, description="of polynomial: exponent of the remaining share of the decay; 1: linear"
    )
    decay_ratio: float = Field(
        0.1, gt=0, le=1, description="of wsd: the decay as a share of total_steps, rounded up to steps"
    )
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = Field(
        "linear", description="of wsd: shape of the decay; 1-sqrt falls by the square root of the progress"
    )

    rules = (
        Rule(
            "warmup_ratio with warmup_steps={warmup_steps}: both set the warm-up; leave one out",
            lambda s: s.warmup_steps > 0 and s.warmup_ratio > 0,
        ),
        *(
            # A forgotten kind would leave the setting without effect.
            Rule(
                f"{name} with kind={{kind}}: it is a setting of kind {kind}; leave it out",
                lambda s, name=name, kind=kind: s.kind != kind and s[name] != Schedule.model_fields[name].default,
            )
            for name, kind in (("power", "polynomial"), ("decay_ratio", "wsd"), ("decay_shape", "wsd"))
        ),
        Rule(
            "total_steps with a warm-up of {warmup} steps: it leaves none for the decay; shorten the warm-up",
            lambda s: s.kind != "constant" and 0 < s.total_steps <= s.warmup,
        ),
        Rule(
            "total_steps with a warm-up of {warmup} steps and a decay of {decay}: together they are longer; "
            "lower decay_ratio or the warm-up",
            lambda s: s.kind == "wsd" and 0 < s.total_steps < s.warmup + s.decay,
        ),
    )

    @property
    def warmup(self) -> int:
        """Steps of the warm-up; a share of ``total_steps`` is rounded up, as in transformers, and leaves at least one step."""
        return self.warmup_steps or min(_share_of(self.warmup_ratio, self.total_steps), max(0, self.total_steps - 1))

    @property
    def decay(self) -> int:
        """Steps from ``lr`` to ``min_lr``."""
        return _share_of(self.decay_ratio, self.total_steps) if self.kind == "wsd" else self.total_steps - self.warmup

    @property
    def needs_total(self) -> bool:
        """True if the schedule depends on ``total_steps``."""
        return self.kind != "constant" or self.warmup_ratio > 0

    def ending_with(self, steps: int) -> Schedule:
        """Return this schedule; without ``total_steps`` it ends with a run of ``steps`` steps.

        Raises:
            ConfigError: the warm-up leaves no steps for the decay.
        """
        if self.total_steps or not self.needs_total:
            return self
        # Constructed again, not by model_copy(), which would skip the rules.
        return Schedule(**self.model_dump() | {"total_steps": steps})


def _share_of(ratio: float, steps: int) -> int:
    # 0.07 * 100 is 7.000000000000001, of which the ceiling would be 8.
    return math.ceil(round(ratio * steps, 9))


class Recompute(Section):
    """Activations that are dropped in the forward pass and recomputed in the backward pass."""

    granularity: Annotated[
        Literal["none", "full", "selective"], Also("gradient_checkpointing", "activation_checkpointing")
    ] = Field("none", description="recompute nothing, whole layers (full) or the modules listed in modules (selective)")
    layers: Size = Field(1, description="with full: layers per recomputed block")
    modules: tuple[RecomputeModule, ...] = Field(
        ("core_attn",), description="with selective: modules to recompute; mlp means dense MLPs"
    )


class Moe(Section):
    """Mixture-of-experts settings."""

    aux_loss: Literal["none", "megatron", "transformers"] = Field(
        "none",
        description="load-balancing loss as Megatron computes it (per layer, divided by the experts per token, summed) or as "
        "transformers does (all layers pooled); off by default, as when transformers fine-tunes such a model",
    )
    aux_loss_coefficient: float = Field(0.0, ge=0, description="weight of the load-balancing loss")
    bias_update_rate: float = Field(
        0.0,
        ge=0,
        description="change per step of the routers' correction bias (DeepSeek-V3, GLM-4.5, dots1), towards equal "
        "load of the experts; 0: the bias is constant, as in transformers",
    )
    experts: Literal["auto", "upstream", "grouped"] = Field(
        "auto",
        description="expert kernels of engine megatron: upstream (Transformer Engine, MindSpeed); grouped (CUDA in bf16: one "
        "grouped product for all experts of a rank, no host synchronisation); auto: grouped where the GPU supports it",
    )

    # Refused instead of guessed: the two formulas differ by a factor that depends on the number of layers.
    rules = (
        Rule(
            "aux_loss_coefficient with aux_loss=none: there are two formulas of the loss; set aux_loss to "
            "megatron or to transformers",
            lambda s: s.aux_loss == "none" and s.aux_loss_coefficient > 0,
        ),
        Rule(
            "aux_loss with aux_loss_coefficient=0: the loss has no weight; set aux_loss_coefficient",
            lambda s: s.aux_loss != "none" and s.aux_loss_coefficient == 0,
        ),
    )


class Fsdp(Section):
    """Sharding of a model by engine fsdp."""

    replicate: Size = Field(
        1, description="model replicas, each sharded over an equal number of ranks (HSDP); 1: shard over all ranks"
    )
    reshard_after_forward: bool = Field(
        True,
        description="free a layer's gathered parameters after its forward pass and gather them again for the backward pass; "
        "false: keep them until the call's last micro batch, which needs more memory",
    )
    offload: bool = Field(
        False, description="keep parameters, gradients and moments in host memory, where the optimizer runs"
    )
    compile: bool = Field(
        False,
        description="compile each layer with torch.compile: faster steps; the first ones take one to two minutes longer. Not "
        "with adapters or parallel.context",
    )


class CudaGraphs(Section):
    """CUDA graphs of micro batches: captured once for each of a few sizes, then replayed."""

    max_tokens: Size = Field(8192, description="largest micro batch that is captured, padding included")
    max_count: Size = Field(32, description="captured sizes to keep; the least recently used is dropped")


class Batching(Section):
    """Batching of samples into micro batches."""

    packing: Annotated[bool, Also("sample_packing")] = Field(
        True, description="concatenate samples (THD) instead of padding them"
    )
    micro_batch_tokens: Size | Literal["auto"] = Field(
        4096,
        description="token budget of one micro batch, padding included; auto (only in run files of `megascend train`): as many "
        "tokens as fit into device memory, measured when the run starts",
    )
    max_length: Annotated[
        Size | None,
        Also(
            "max_seq_length",
            "max_seq_len",
            "sequence_len",
            "seq_length",
            "cutoff_len",
            "model_max_length",
            "max_prompt_length",
        ),
    ] = Field(None, description="longest sample in tokens, at most the model's limit; default: that limit")
    share_prefixes: Size | Literal["auto", "off"] = Field(
        "auto",
        description="compute tokens that samples of one adapter begin with once for all of them: auto (prefixes of 64 tokens or "
        "more, if they are a tenth of a call's tokens), off, or the shortest prefix in tokens",
    )
    cuda_graphs: CudaGraphs | None = Field(
        None,
        description="capture micro batches as CUDA graphs and replay them (engine megatron on CUDA, one GPU per model)",
    )

    @field_validator("micro_batch_tokens", mode="wrap")
    @classmethod
    def _number_or_auto(cls, value: Any, validated: ValidatorFunctionWrapHandler) -> Any:
        """Replace pydantic's messages, one for each member of the union, by one."""
        try:
            return validated(value)
        except ValidationError:
            raise ValueError("must be auto, or a whole number of 1 or more") from None

    @property
    def budget(self) -> int:
        """Tokens of one micro batch, once they are known."""
        assert self.micro_batch_tokens != "auto", "not measured yet"
        return self.micro_batch_tokens

    @property
    def shortest_prefix(self) -> int | None:
        """Shortest prefix to share in tokens; None: as long as is worth it."""
        return self.share_prefixes if isinstance(self.share_prefixes, int) else None

    def with_budget(self, tokens: int) -> Batching:
        """Return these settings with another number of tokens."""
        return self.model_copy(update={"micro_batch_tokens": tokens})


def optimizer_of_adapters(setting: str, optimizer: Callable[[Any], Adam | None]) -> Rule[Any]:
    """Return the rule that adapters have no optimizer for the model's own weights."""
    return Rule(
        f"{setting}: adapters are trained by AdamW with one learning rate and fp32 moments on the device; "
        "leave kind, groups, moments and offload out",
        lambda s: (settings := optimizer(s)) is not None and not settings.fits_adapters,
    )


MEASURED_BUDGET = Rule[Any](
    "batching.micro_batch_tokens: only run files of `megascend train` have it measured; set a number, for example 4096",
    lambda s: s.batching.micro_batch_tokens == "auto",
)


class Lora(Section):
    """One LoRA adapter: ``W x`` becomes ``W x + scaling * B A x`` in every targeted layer (Hu et al., arXiv:2106.09685)."""

    rank: Annotated[Size, Also("r", "lora_r")] = Field(16, description="rows of A, columns of B")
    alpha: Annotated[float, Also("lora_alpha")] = Field(
        32.0, gt=0, description="numerator of the scaling: alpha / rank, or alpha / sqrt(rank) with rslora"
    )
    rslora: Annotated[bool, Also("use_rslora")] = Field(
        False, description="rank-stabilised scaling (Kalajdzievski, arXiv:2312.03732)"
    )
    dropout: Annotated[float, Also("lora_dropout")] = Field(
        0.0, ge=0, lt=1, description="dropout on the input of A, in training only"
    )
    targets: Annotated[Literal["all-linear"] | tuple[str, ...], Also("target_modules", "lora_target")] = Field(
        "all-linear",
        description="layers to adapt, by Hugging Face name or its last components (q_proj, mlp.down_proj, lm_head, "
        "embed_tokens); all-linear: every linear layer of attention, MLPs and experts, without lm_head and embed_tokens",
    )
    seed: Seed | None = Field(
        None, description="seed of A's initial values and of dropout; default: the backend's seed"
    )
    optimizer: Adam | None = Field(
        None, description="optimizer of this adapter; default: the backend's. Its state is small and not sharded"
    )
    schedule: Schedule | None = Field(
        None, description="schedule over this adapter's own steps; default: the backend's"
    )

    rules = (
        Rule(
            "targets: there is no name, or an empty one; name at least one layer",
            lambda s: not s.targets or not all(s.targets),
        ),
        optimizer_of_adapters("optimizer", lambda s: s.optimizer),
    )

    @property
    def scaling(self) -> float:
        """Factor of ``B A``."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class Adapters(Section):
    """Training of LoRA adapters on a frozen base model, and their limits."""

    max_count: Size = Field(64, description="largest number of adapters at a time")
    max_rank: Size = Field(128, description="largest rank of one adapter")
    targets: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear", description="layers that adapters may target, as in Lora; each adapter chooses among them"
    )
    base_weights: BaseWeights = Field(
        "unquantised",
        description="frozen weights of the layers' linear layers and experts: in the run's precision (unquantised), or as fp8 or "
        "4 bits (nf4) with a scale for each 128 or 64 values, dequantised in each product (engine megatron on CPU and CUDA)",
    )


class ModelSettings(Section):
    """Settings of a model on its ranks, whether it is trained or served."""

    model: Annotated[Path, Also("model_name_or_path", "base_model")] = Field(
        description="Hugging Face checkpoint directory (safetensors), or a name on the Hub: owner/name@revision"
    )
    platform: Annotated[PlatformName, Also("use_cpu")] = Field(
        "auto", description="device type; auto: the first of npu, cuda, cpu that works"
    )
    parallel: Parallel = Parallel()
    precision: Annotated[AnyPrecision, Also("bf16", "fp16", "bfloat16", "float16", "torch_dtype", "dtype")] = Field(
        "bf16",
        description="type of parameters, compute and exported weights; main parameters, gradients and moments are fp32",
    )
    batching: Batching = Batching()
    vision_tower: VisionTower = Field(
        "frozen",
        description="the vision tower of a model that takes images, with the layers that turn its features into those of the "
        "language model: keep its weights, or train them with the model; with LoRA: adapt only the language model, or the "
        "tower's linear layers too",
    )
    seed: Annotated[Seed, Also("data_seed", "random_seed")] = Field(
        1234, description="seed of dropout, new parameters, the data order and sampling"
    )
    timeout_s: Annotated[float, Also("ddp_timeout")] = Field(
        600, ge=1, le=366 * 24 * 3600, description="seconds after which a missing rank is an error on all others"
    )


class EngineSettings(ModelSettings):
    """Settings of a model in training that run files and the constructors of backends have."""

    fsdp: Fsdp = Fsdp()
    optimizer: Adam = Adam()
    schedule: Schedule = Schedule()
    recompute: Recompute = Recompute()
    moe: Moe = Moe()
    mtp: Mtp = Field(
        "keep",
        description="heads for multi-token prediction: train one with the model (engine megatron), keep them as they are (an "
        "export copies their tensors), or drop them (an export has none)",
    )
    mtp_loss_weight: float = Field(
        0.1, gt=0, description="weight of the loss of a head for multi-token prediction, with mtp: train"
    )
    provider: str | None = Field(
        None,
        description="provider that patches Megatron-Core for the platform: a registered name, or package.module:attribute; "
        "default: chosen by platform",
    )
    provider_options: ProviderOptions = Field(
        {},
        description="options of the provider; of provider mindspeed, MindSpeed's command-line arguments with underscores",
    )
    self_check: bool = Field(
        True,
        description="compare a small slice of the model with transformers before training; off: train what the engine computes",
    )


def learning_rate(schedule: Schedule, peak: float, step: int) -> float:
    """Compute the learning rate of optimizer step ``step`` (the first is 0).

    Warm-up is linear: step ``s`` of ``w`` warm-up steps has ``peak * (s + 1) / w``. The decay goes from ``peak`` to ``min_lr``,
    reached at ``total_steps``, and stays there.
    """
    if schedule.needs_total and not schedule.total_steps:
        part = "warmup_ratio" if schedule.kind == "constant" else schedule.kind
        raise ConfigError(f"schedule {part} needs total_steps, the step at which the schedule ends")
    if step < schedule.warmup:
        return peak * (step + 1) / schedule.warmup
    if schedule.kind == "constant":
        return peak
    progress = min(1.0, max(0.0, (step - (schedule.total_steps - schedule.decay)) / schedule.decay))
    shape = schedule.decay_shape if schedule.kind == "wsd" else schedule.kind
    match shape:
        case "cosine":
            remaining = (1 + math.cos(math.pi * progress)) / 2
        case "1-sqrt":
            remaining = 1 - math.sqrt(progress)
        case "polynomial":
            remaining = (1 - progress) ** schedule.power
        case _:
            remaining = 1 - progress
    return schedule.min_lr + (peak - schedule.min_lr) * remaining
