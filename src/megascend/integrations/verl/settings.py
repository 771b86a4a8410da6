"""Translate verl's settings to megascend's, or raise ConfigError naming the unsupported ones. Pure: no torch, no verl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megascend.config import Adam, Lora, Moe, Parallel, Precision, Recompute
from megascend.config.training import PRECISIONS, precision_name
from megascend.errors import ConfigError
from megascend.integrations.verl import settings_table as table
from megascend.integrations.verl.settings_table import Rule

TARGETS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
}
"""Megatron layer names to Hugging Face names; other names are assumed to be Hugging Face names already."""

STATE = frozenset({"model", "optimizer", "extra"})
"""Parts that verl names in ``save_contents`` and ``load_contents``, and that megascend's checkpoints always have."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the backend and of the engine.

    Attributes:
        value_model: True for a critic.
        forward_only: no optimizer and no gradients.
        lora: settings of the adapter; None: full fine-tuning.
        adapter_path: initial weights of the adapter, or None.
        merge: weight syncs send the adapter merged into the model.
        hf_model: checkpoints include a Hugging Face directory.
        async_save: save without waiting for completion.
    """

    parallel: Parallel
    precision: Precision
    packing: bool
    seed: int
    adam: Adam
    recompute: Recompute
    moe: Moe
    value_model: bool
    forward_only: bool
    lora: Lora | None
    adapter_path: str | None
    merge: bool
    hf_model: bool
    async_save: bool


def translate(
    model: Mapping[str, Any],
    engine: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None,
    checkpoint: Mapping[str, Any] | None,
    platform: str,
) -> EngineSettings:
    """Translate verl's four configurations; a forward-only engine has no ``optimizer``."""
    # All problems are collected, so that a user sees them in one error.
    optimizer, checkpoint = optimizer or {}, checkpoint or {}
    problems = [*_problems(model, engine, optimizer, checkpoint), *_offload(engine, platform)]
    if problems:
        raise ConfigError("verl's settings, with the engine megascend:\n- " + "\n- ".join(problems))
    transformer, ddp = _part(engine, "override_transformer_config"), _part(engine, "override_ddp_config")
    lora = _part(model, "lora")
    return EngineSettings(
        parallel=_parallel(engine, transformer),
        precision=_precision(engine, transformer),
        packing=bool(engine.get("use_remove_padding", True)),
        seed=int(engine.get("seed", 42)),
        adam=_adam(engine, optimizer, ddp),
        recompute=_recompute(transformer),
        moe=_moe(transformer),
        value_model=_is_value_model(model),
        forward_only=bool(engine.get("forward_only", False)),
        lora=_lora(lora),
        adapter_path=lora.get("adapter_path"),
        merge=bool(lora.get("merge", False)),
        hf_model="hf_model" in (checkpoint.get("save_contents") or ()),
        async_save=bool(checkpoint.get("async_save", False)),
    )


def check(prefix: str, rules: Mapping[str, Rule], values: Mapping[str, Any]) -> list[str]:
    """List the problems of ``values``, whose names begin with ``prefix``: without a rule, or refused by it."""
    problems = []
    for name in values:
        rule, value = rules.get(name), _plain(values[name])
        # Most likely a setting of a newer verl: ignoring it could change the training silently.
        if rule is None:
            problems.append(f"{prefix}.{name}={value!r}: megascend has no rule for it (integration for verl 0.9.1)")
        elif rule.only is not None and value not in rule.only:
            allowed = " or ".join(repr(allowed_value) for allowed_value in rule.only)
            problems.append(f"{prefix}.{name}={value!r}: {rule.reason}; it must be {allowed}")
    return problems


def _problems(
    model: Mapping[str, Any], engine: Mapping[str, Any], optimizer: Mapping[str, Any], checkpoint: Mapping[str, Any]
) -> Iterable[str]:
    sections = (
        ("engine", table.ENGINE, engine),
        ("engine.router_replay", table.ROUTER_REPLAY, _part(engine, "router_replay")),
        ("engine.qat", table.QAT, _part(engine, "qat")),
        ("engine.override_ddp_config", table.DDP, _part(engine, "override_ddp_config")),
        ("engine.override_transformer_config", table.TRANSFORMER, _part(engine, "override_transformer_config")),
        ("optim", table.OPTIMIZER, optimizer),
        ("optim.override_optimizer_config", table.OVERRIDE_OPTIMIZER, _part(optimizer, "override_optimizer_config")),
        ("model", table.MODEL, model),
        ("model.override_config", table.OVERRIDE_MODEL, _part(model, "override_config")),
        ("model.tiled_mlp", table.TILED_MLP, _part(model, "tiled_mlp")),
        ("model.mtp", table.MTP, _part(model, "mtp")),
        ("model.lora", table.LORA, _part(model, "lora")),
        ("checkpoint", table.CHECKPOINT, checkpoint),
    )
    for prefix, rules, values in sections:
        yield from check(prefix, rules, values)
    if model.get("hf_config_path") not in (None, model.get("path")):
        yield f"model.hf_config_path={model['hf_config_path']!r}: the configuration must be the one in model.path"
    if _is_value_model(model) and _part(model, "lora").get("rank"):
        rank = _part(model, "lora")["rank"]
        yield f"model.lora.rank={rank}: a critic's head is trained, and LoRA here leaves all but the adapter frozen; it must be 0"
    if _is_value_model(model) and engine.get("forward_only"):
        yield "engine.forward_only=True: a critic is trained; it must be False for model.model_type=value_model"
    for name in ("save_contents", "load_contents"):
        contents = set(checkpoint.get(name) or STATE)
        if not contents >= STATE or contents - STATE - {"hf_model"}:
            yield (
                f"checkpoint.{name}={sorted(contents)}: a checkpoint cannot be partial: it must be model, optimizer and extra, "
                "with or without hf_model"
            )
    # verl's engine.dtype cannot be fp32, so params_dtype takes precedence.
    dtype = _part(engine, "override_transformer_config").get("params_dtype") or engine.get("dtype", "bfloat16")
    if str(dtype).removeprefix("torch.") not in PRECISIONS:
        yield f"engine.override_transformer_config.params_dtype={dtype!r}: it must be one of {', '.join(PRECISIONS)}"


def _offload(engine: Mapping[str, Any], platform: str) -> Iterable[str]:
    for name in ("param_offload", "optimizer_offload"):
        if engine.get(name) and platform != "cpu":
            yield f"engine.{name}=True: on {platform} model and optimizer stay on the device; it must be False"


def _is_value_model(model: Mapping[str, Any]) -> bool:
    return model.get("model_type") == "value_model"


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return values.get(name) or {}


def _plain(value: Any) -> Any:
    """Convert lists and dictionaries, such as OmegaConf's, to Python's."""
    # By name: this module imports neither OmegaConf nor verl.
    if isinstance(value, Mapping) and type(value).__name__ in ("dict", "DictConfig"):
        return dict(value)
    return list(value) if type(value).__name__ in ("tuple", "ListConfig") else value


def _parallel(engine: Mapping[str, Any], transformer: Mapping[str, Any]) -> Parallel:
    tensor = engine.get("tensor_model_parallel_size", 1)
    return Parallel(
        tensor=tensor,
        pipeline=engine.get("pipeline_model_parallel_size", 1),
        virtual_pipeline=engine.get("virtual_pipeline_model_parallel_size") or 1,
        pipeline_layout=transformer.get("pipeline_model_parallel_layout"),
        context=engine.get("context_parallel_size", 1),
        expert=engine.get("expert_model_parallel_size", 1),
        expert_tensor=engine.get("expert_tensor_parallel_size"),
        # verl's default is True whatever the size; without tensor parallelism None leaves the choice to megascend.
        sequence=bool(engine.get("sequence_parallel", True)) if tensor > 1 else None,
    )


def _precision(engine: Mapping[str, Any], transformer: Mapping[str, Any]) -> Precision:
    dtype = transformer.get("params_dtype") or engine.get("dtype", "bfloat16")
    return precision_name(dtype)


def _adam(engine: Mapping[str, Any], optimizer: Mapping[str, Any], ddp: Mapping[str, Any]) -> Adam:
    override = _part(optimizer, "override_optimizer_config")
    return Adam(
        lr=optimizer.get("lr", 0.0),
        betas=tuple(optimizer.get("betas", (0.9, 0.999))),  # type: ignore[arg-type]
        eps=override.get("adam_eps", 1e-8),
        weight_decay=optimizer.get("weight_decay", 0.0),
        max_grad_norm=optimizer.get("clip_grad") or 0.0,
        distributed=bool(engine.get("use_distributed_optimizer", True)),
        overlap_grad_reduce=bool(ddp.get("overlap_grad_reduce", False)),
        overlap_param_gather=bool(ddp.get("overlap_param_gather", False)),
    )


def _recompute(transformer: Mapping[str, Any]) -> Recompute:
    granularity = transformer.get("recompute_granularity") or "none"
    return Recompute(
        granularity=granularity,
        layers=transformer.get("recompute_num_layers") or 1,
        modules=tuple(transformer.get("recompute_modules") or ("core_attn",)),
    )


def _moe(transformer: Mapping[str, Any]) -> Moe:
    coefficient = transformer.get("moe_aux_loss_coeff") or 0.0
    if transformer.get("moe_router_load_balancing_type") == "none":
        coefficient = 0.0
    return Moe(
        # Megatron's formula, as in verl's own engine; megascend's other one is transformers'.
        aux_loss="megatron" if coefficient else "none",
        aux_loss_coefficient=coefficient,
        bias_update_rate=transformer.get("moe_router_bias_update_rate") or 0.0,
    )


def _lora(lora: Mapping[str, Any]) -> Lora | None:
    if not lora.get("rank"):
        return None
    names = lora.get("target_modules") or list(TARGETS)[:1]
    if isinstance(names, str):
        targets: Any = names if names == "all-linear" else (names,)
    else:
        targets = tuple(dict.fromkeys(target for name in names for target in TARGETS.get(name, (name,))))
    return Lora(rank=lora["rank"], alpha=lora.get("alpha", 32), dropout=lora.get("dropout", 0.0), targets=targets)
