"""Table of rules for verl's settings (verl 0.9.1). Pure data.

Every field of verl's dataclasses, and every known key of its free-form dictionaries, has a rule. Settings without one are
refused, so that those of a newer verl are not silently ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VENDOR = "megascend"
"""Value of ``VERL_ENGINE_VENDOR`` that selects megascend's engine."""
ROLLOUT_NAME = "megascend"
"""Value of ``actor_rollout_ref.rollout.name`` that selects megascend's rollout."""


@dataclass(frozen=True)
class Rule:
    """Rule for one setting.

    Attributes:
        reason: megascend's setting, or the reason why it has no effect or is refused.
        only: allowed values; None: any.
    """

    reason: str
    only: tuple[Any, ...] | None = None


mapped = no_effect = Rule
"""Rules of a setting that maps to megascend's setting of that name, and of one that is accepted and ignored for a reason."""


def only(*values: Any, reason: str) -> Rule:
    """Return the rule of a setting that is refused unless it is one of ``values``."""
    return Rule(reason, values)


READ_BY_VERL = no_effect("verl reads it itself")
# Hydra's _target_ key.
SHAPE = "verl's names of Hydra"
BY_BATCH = mapped("token budget of a micro batch, read from each batch, into which verl writes it")
MUON = no_effect("of Muon, which optimizer: adam does not run")
CHOSEN = no_effect("megascend chooses what the platform has")

ENGINE: dict[str, Rule] = {
    "_target_": no_effect(SHAPE),
    "strategy": only("megatron", reason="the engine is registered for it"),
    "param_offload": mapped("refused on cuda and npu; on a CPU the device is the host"),
    "optimizer_offload": mapped("refused on cuda and npu; on a CPU the device is the host"),
    "forward_only": mapped("a frozen model without an optimizer"),
    "dtype": mapped("precision"),
    **dict.fromkeys(("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu"), BY_BATCH),
    **dict.fromkeys(("infer_max_token_len_per_gpu", "infer_micro_batch_size_per_gpu"), BY_BATCH),
    "use_fused_kernels": no_effect("projection and softmax are always computed chunk by chunk, without whole logits"),
    "use_remove_padding": mapped("batching.packing"),
    "seed": mapped("seed"),
    "full_determinism": only(False, reason="torch's deterministic algorithms are not switched on"),
    "router_replay": mapped("Sample.routed_experts, with mode R3"),
    "tensor_model_parallel_size": mapped("parallel.tensor"),
    "expert_model_parallel_size": mapped("parallel.expert"),
    "expert_tensor_parallel_size": mapped("parallel.expert_tensor"),
    "pipeline_model_parallel_size": mapped("parallel.pipeline"),
    "virtual_pipeline_model_parallel_size": mapped("parallel.virtual_pipeline"),
    "context_parallel_size": mapped("parallel.context"),
    "dynamic_context_parallel": only(False, reason="context parallel groups have one size"),
    "max_seqlen_per_dp_cp_rank": only(None, reason="of dynamic_context_parallel"),
    "entropy_from_logits_with_chunking": no_effect("entropies are always computed chunk by chunk"),
    "entropy_from_logits_chunk_size": no_effect("entropies are always computed chunk by chunk"),
    "sequence_parallel": mapped("parallel.sequence"),
    "use_distributed_optimizer": mapped("optimizer.distributed"),
    "pad_bshd_to_minibatch_max": no_effect(
        "of a layout that is not used: micro batches are padded to their own longest"
    ),
    "pad_to_length": only(False, reason="packed micro batches are not rounded up"),
    "pad_to_length_bucket": no_effect("of pad_to_length"),
    "use_dist_checkpointing": only(False, reason="the model is read from its Hugging Face directory"),
    "dist_checkpointing_path": only(None, "", reason="of use_dist_checkpointing"),
    "dist_checkpointing_prefix": only("", None, reason="of use_dist_checkpointing"),
    "dist_ckpt_optim_fully_reshardable": no_effect("megascend's checkpoints can always be loaded in another layout"),
    "distrib_optim_fully_reshardable_mem_efficient": no_effect("of dist_ckpt_optim_fully_reshardable"),
    "override_ddp_config": mapped("key by key"),
    "override_transformer_config": mapped("key by key"),
    "override_mcore_model_config": only({}, reason="the model is mcore-bridge's own for its config.json"),
    "use_mbridge": only(True, reason="the model is always read from its Hugging Face directory"),
    "vanilla_mbridge": only(False, reason="the bridge is mcore-bridge"),
    "use_megatron_fsdp": only(False, reason="Megatron-FSDP is not supported"),
    "qat": mapped("refused unless it is off"),
}

DDP: dict[str, Rule] = {
    "overlap_grad_reduce": mapped("optimizer.overlap_grad_reduce"),
    "overlap_param_gather": mapped("optimizer.overlap_param_gather"),
    "grad_reduce_in_fp32": only(True, reason="gradients are always reduced in fp32"),
}

TRANSFORMER: dict[str, Rule] = {
    "params_dtype": mapped("precision, over engine.dtype, which has no name for fp32"),
    "pipeline_model_parallel_layout": mapped("parallel.pipeline_layout"),
    "recompute_granularity": mapped("recompute.granularity"),
    "recompute_modules": mapped("recompute.modules"),
    "recompute_method": only(None, "uniform", reason="recompute.layers are blocks of one size"),
    "recompute_num_layers": mapped("recompute.layers"),
    "attention_backend": only(None, "auto", "flash", "fused", reason="megascend chooses among the fast ones"),
    "moe_aux_loss_coeff": mapped("moe.aux_loss_coefficient, by Megatron's formula"),
    "moe_router_load_balancing_type": only("none", "aux_loss", None, reason="no other formula is supported"),
    "moe_router_bias_update_rate": mapped("moe.bias_update_rate"),
    **dict.fromkeys(("moe_permute_fusion", "moe_grouped_gemm", "apply_rope_fusion", "masked_softmax_fusion"), CHOSEN),
    **dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion", "gradient_accumulation_fusion"), CHOSEN),
    **dict.fromkeys(("deallocate_pipeline_outputs", "persist_layer_norm"), CHOSEN),
    "moe_token_dispatcher_type": only("alltoall", None, reason="experts are dispatched by all-to-all"),
}

ROUTER_REPLAY: dict[str, Rule] = {
    "_target_": no_effect(SHAPE),
    "mode": only("disabled", "R3", reason="R2, which replays the trainer's own choices, is not supported"),
    "record_file": only(None, reason="choices are taken from the batch"),
    "replay_file": only(None, reason="choices are taken from the batch"),
}

QAT: dict[str, Rule] = {
    "_target_": no_effect(SHAPE),
    "enable": only(False, reason="quantisation-aware training is not supported"),
    **dict.fromkeys(("mode", "group_size", "ignore_patterns"), no_effect("of qat.enable")),
    **dict.fromkeys(("activation_observer", "quantization_config_path"), no_effect("of qat.enable")),
}

_SCHEDULE = mapped("verl's own scheduler, whose rate each step is given")
_FP32 = only("fp32", "float32", "32", reason="gradients and moments are fp32")

OPTIMIZER: dict[str, Rule] = {
    "_target_": no_effect(SHAPE),
    "optimizer": only("adam", reason="the optimizer is AdamW"),
    "lr": mapped("optimizer.lr"),
    "betas": mapped("optimizer.betas"),
    "weight_decay": mapped("optimizer.weight_decay"),
    "clip_grad": mapped("optimizer.max_grad_norm"),
    "grad_clip": no_effect("verl writes it into clip_grad"),
    **dict.fromkeys(("lr_warmup_steps_ratio", "lr_warmup_steps", "lr_warmup_init", "total_training_steps"), _SCHEDULE),
    **dict.fromkeys(
        ("lr_decay_steps", "lr_decay_style", "min_lr", "lr_wsd_decay_style", "lr_wsd_decay_steps"), _SCHEDULE
    ),
    "weight_decay_incr_style": only("constant", reason="weight decay stays as it is"),
    "use_checkpoint_opt_param_scheduler": only(False, reason="a resumed run takes its schedule from its settings"),
    "use_precision_aware_optimizer": only(False, reason="gradients and moments are fp32"),
    **dict.fromkeys(("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), _FP32),
    **dict.fromkeys(("use_layer_wise_distributed_optimizer", "use_layer_wise_param_layout"), MUON),
    **dict.fromkeys(
        ("muon_momentum", "muon_nesterov", "muon_split_qkv", "muon_scale_mode", "muon_coefficient_type"), MUON
    ),
    **dict.fromkeys(("muon_num_ns_steps", "muon_tp_mode", "muon_fp32_matmul_prec", "muon_extra_scale_factor"), MUON),
    **dict.fromkeys(("muon_scalar_optimizer", "muon_match_adamw_update_rms"), MUON),
    "override_optimizer_config": mapped("key by key"),
}

OVERRIDE_OPTIMIZER: dict[str, Rule] = {"adam_eps": mapped("optimizer.eps")}

_PEFT_OF_FSDP = "of verl's FSDP engines; below engine=megatron it is model.lora"

MODEL: dict[str, Rule] = {
    "_target_": no_effect(SHAPE),
    "path": mapped("model, by verl's local copy of it"),
    "local_path": mapped("model"),
    "hf_config_path": mapped("refused unless it is model.path"),
    **dict.fromkeys(("local_hf_config_path", "hf_config", "generation_config", "architectures"), READ_BY_VERL),
    **dict.fromkeys(
        ("tokenizer_path", "local_tokenizer_path", "load_tokenizer", "tokenizer", "processor"), READ_BY_VERL
    ),
    **dict.fromkeys(("use_shm", "custom_chat_template", "external_lib"), READ_BY_VERL),
    "share_embeddings_and_output_weights": READ_BY_VERL,
    "model_type": only("language_model", "value_model", reason="other models are not supported"),
    "trust_remote_code": only(False, reason="no code of a checkpoint is run"),
    "override_config": mapped("refused but for attn_implementation, which is verl's FSDP engines'"),
    "enable_gradient_checkpointing": no_effect(
        "verl's Megatron engine does not read it either: engine.override_transformer_config.recompute_granularity"
    ),
    "enable_activation_offload": only(False, reason="activations stay on the device"),
    "use_remove_padding": no_effect("verl writes it into engine.use_remove_padding"),
    "lora_rank": only(0, reason=_PEFT_OF_FSDP),
    "lora_alpha": no_effect("of lora_rank"),
    "target_modules": no_effect("of lora_rank"),
    "target_parameters": only(None, reason=_PEFT_OF_FSDP),
    "exclude_modules": only(None, reason=_PEFT_OF_FSDP),
    "lora": mapped("key by key"),
    "lora_adapter_path": only(None, reason="use model.lora.adapter_path"),
    "use_liger": only(False, reason="of verl's FSDP engines"),
    "use_fused_kernels": no_effect("verl writes it into engine.use_fused_kernels"),
    "fused_kernel_options": no_effect("of use_fused_kernels"),
    "tiled_mlp": mapped("refused unless it is off"),
    "mtp": mapped("refused unless it is off"),
}

TILED_MLP: dict[str, Rule] = {
    "enabled": only(False, reason="MLPs are not tiled"),
    "num_shards": no_effect("of tiled_mlp.enabled"),
}

_OF_MTP = no_effect("of mtp.enable")

MTP: dict[str, Rule] = {
    "_target_": no_effect(SHAPE),
    "enable": only(False, reason="multi-token prediction is not supported"),
    "enable_train": only(False, reason="multi-token prediction is not supported"),
    "enable_rollout": READ_BY_VERL,
    **dict.fromkeys(("detach_encoder", "mtp_loss_scaling_factor", "method", "num_speculative_tokens"), _OF_MTP),
    **dict.fromkeys(("speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk"), _OF_MTP),
    "speculative_num_draft_tokens": _OF_MTP,
}

OVERRIDE_MODEL: dict[str, Rule] = {
    "attn_implementation": no_effect("of verl's FSDP engines"),
    "model_config": only({}, reason="the model is mcore-bridge's own for its config.json"),
}

LORA: dict[str, Rule] = {
    "type": only("lora", "canonical_lora", reason="adapters are peft's LoRA: q, k and v have an A each"),
    "rank": mapped("lora.rank"),
    "alpha": mapped("lora.alpha"),
    "dropout": mapped("lora.dropout"),
    "target_modules": mapped("lora.targets, by their Hugging Face names"),
    "merge": mapped("whether a weight sync sends W + scaling * B A, or the adapter alone"),
    "exclude_modules": only([], None, reason="name the layers in target_modules"),
    "dropout_position": only("pre", reason="dropout is of the layer's input on its way to A"),
    "lora_A_init_method": no_effect("A starts as peft's does (Kaiming, uniform)"),
    "lora_B_init_method": only("zero", reason="an adapter starts without effect"),
    "a2a_experimental": only(False, reason="not supported"),
    "dtype": only(None, "float32", "fp32", reason="adapters are fp32"),
    "adapter_path": mapped("load_adapter"),
    "freeze_vision_model": READ_BY_VERL,
    "freeze_vision_projection": READ_BY_VERL,
    "freeze_language_model": only(True, reason="the model under adapters is frozen"),
}

CHECKPOINT: dict[str, Rule] = {
    "_target_": no_effect(SHAPE),
    "save_contents": mapped("model, optimizer and extra are one checkpoint; hf_model is an export beside it"),
    "load_contents": mapped("a checkpoint is loaded whole"),
    "async_save": mapped("whether save waits"),
    "strict": only(True, reason="a weight that is missing, or that nothing reads, is an error"),
    "save_lora_only": no_effect("with LoRA a checkpoint never holds the frozen model"),
    "mbridge_config": only({}, reason="of verl's bridges"),
}
