"""Names and values of settings in transformers, TRL, peft, axolotl, LLaMA-Factory and Megatron-LM, with their equivalents here.

They are refused, not translated: many count other things (samples of a device, a share of the steps), so that a number would have
to be converted with knowledge that a run file does not have.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass


@dataclass(frozen=True)
class Synonym:
    """Equivalent of another program's setting.

    Attributes:
        settings: full names of the settings here, those of ``train`` and of ``rl``; none: a run has no such setting.
        conversion: how the value converts, or what to do instead; empty: the value is the same.
    """

    settings: tuple[str, ...] = ()
    conversion: str = ""

    def advice(self, existing: Container[str]) -> str:
        """Return the end of a message about an unknown setting, naming those of ``settings`` that are in ``existing``."""
        # A section that a program constructs has its settings without its name.
        names = [name for name in self.settings if name in existing] or [
            name for setting in self.settings if (name := setting.rpartition(".")[2]) in existing
        ]
        if not names:
            return f": {self.conversion}" if self.conversion else ""
        return f", called {' or '.join(names)} here" + (f": {self.conversion}" if self.conversion else "")


BATCH = Synonym(
    ("data.global_batch_size", "rollout.prompts_per_step"),
    "it counts over all devices, samples of a device x accumulation steps x devices; memory depends on "
    "batching.micro_batch_tokens, in tokens",
)
LENGTH = Synonym(("batching.max_length",), "in tokens; batching.micro_batch_tokens has to be at least as large")
PRECISION = Synonym(("precision",), "fp32, fp16 or bf16")
WITH_LORA = Synonym(("lora",), "a section, lora: {rank: 16, alpha: 32}; without it all parameters are trained")
TARGETS = Synonym(("lora.targets",), "all-linear, or a list of names")
TRACKING = Synonym(("trackers",), "a list of names, or of {NAME: {options}} such as {wandb: {project: chat}}")
VALIDATION = Synonym(
    ("validation.every", "evaluation.every"), "in steps; the section also says which samples are held out"
)
SHARDING = Synonym(
    ("engine",), "optimizer.distributed: true (the default) shards as ZeRO-1, engine: fsdp as ZeRO-3, with section fsdp"
)

SYNONYMS: dict[str, Synonym] = {
    # model, data, output
    **dict.fromkeys(("model_name_or_path", "model_name", "base_model", "pretrained_model_name_or_path"), Synonym(("model",))),
    **dict.fromkeys(("output_dir", "save_dir"), Synonym(("output",))),
    **dict.fromkeys(
        (
            "dataset", "datasets", "dataset_name", "dataset_path", "train_file", "train_files", "train_data", "train_dataset",
            "train", "file", "files", "data_file", "data_files", "data_path",
        ),
        Synonym(("data.path", "rollout.prompts"), "one file or folder; several: data.sources"),
    ),
    **dict.fromkeys(
        ("validation_file", "val_file", "val_files", "val_data", "eval_data", "eval_dataset", "eval_file"),
        Synonym(("validation.path", "evaluation.prompts"), "one file or folder"),
    ),
    **dict.fromkeys(("tokenizer", "tokenizer_name", "tokenizer_path"), Synonym(("model",), "the tokenizer is the checkpoint's")),
    "dataset_split": Synonym(("data.split",)),
    "dataset_config": Synonym(("data.config_name",)),
    "dataset_text_field": Synonym(("data.columns",), "{text: NAME}"),
    "sample_packing": Synonym(("batching.packing",)),
    "train_on_inputs": Synonym(("data.train_on_prompt",)),
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss"), Synonym(("data.train_on_prompt",), "the opposite: false is the default")
    ),
    "shuffle_merged_datasets": Synonym(("data.shuffle",)),
    **dict.fromkeys(("data_seed", "random_seed"), Synonym(("seed",))),
    # length of the run, batches
    **dict.fromkeys(("num_train_epochs", "num_epochs", "n_epochs", "train_epochs", "total_epochs"), Synonym(("epochs",))),
    **dict.fromkeys(("max_steps", "train_iters", "total_training_steps"), Synonym(("steps",), "leave it out with epochs")),
    **dict.fromkeys(
        (
            "per_device_train_batch_size", "per_device_batch_size", "train_batch_size", "micro_batch_size",
            "gradient_accumulation_steps", "gradient_accumulation", "grad_accum",
        ),
        BATCH,
    ),
    "global_batch_size": Synonym(("rollout.prompts_per_step",), "prompts of a step, each with rollout.group_size responses"),
    **dict.fromkeys(
        (
            "max_seq_length", "max_seq_len", "seq_len", "sequence_len", "seq_length", "cutoff_len", "model_max_length",
            "block_size",
        ),
        LENGTH,
    ),
    # optimizer and schedule
    "learning_rate": Synonym(("optimizer.lr",)),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), Synonym(("optimizer.betas",), "a list of both, [0.9, 0.999]")),
    **dict.fromkeys(("adam_epsilon", "adam_eps"), Synonym(("optimizer.eps",))),
    **dict.fromkeys(("clip_grad", "gradient_clipping"), Synonym(("optimizer.max_grad_norm",))),
    "optim": Synonym(("optimizer.kind",), "adamw or muon; 8-bit AdamW is kind: adamw with optimizer.moments: 8bit"),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_fraction"), Synonym(("schedule.warmup_ratio",))),
    **dict.fromkeys(("num_warmup_steps", "lr_warmup_steps", "lr_warmup_iters"), Synonym(("schedule.warmup_steps",))),
    **dict.fromkeys(
        ("lr_scheduler_type", "lr_scheduler", "lr_decay_style"),
        Synonym(("schedule.kind",), "a warm-up is schedule.warmup_ratio or warmup_steps, with any kind"),
    ),
    "lr_scheduler_kwargs": Synonym(("schedule",), "a section, with kind, warmup_ratio and min_lr"),
    **dict.fromkeys(
        ("cosine_min_lr_ratio", "min_lr_ratio", "min_lr_rate"),
        Synonym(("schedule.min_lr",), "a learning rate: the ratio times optimizer.lr"),
    ),
    # precision, memory, parallelism
    **dict.fromkeys(("bf16", "bfloat16"), Synonym(("precision",), "precision: bf16, the default")),
    **dict.fromkeys(("fp16", "float16"), Synonym(("precision",), "precision: fp16")),
    **dict.fromkeys(("torch_dtype", "dtype", "mixed_precision", "model_dtype"), PRECISION),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing", "recompute_granularity"),
        Synonym(("recompute.granularity",), "recompute.granularity: full is gradient_checkpointing: true"),
    ),
    "gradient_checkpointing_kwargs": Synonym(("recompute",), "a section"),
    **dict.fromkeys(("deepspeed", "zero_stage", "fsdp_config", "fsdp_version"), SHARDING),
    **dict.fromkeys(
        ("tensor_parallel_size", "tensor_model_parallel_size", "tp_size", "tp"), Synonym(("parallel.tensor",))
    ),
    **dict.fromkeys(
        ("pipeline_parallel_size", "pipeline_model_parallel_size", "pp_size", "pp"), Synonym(("parallel.pipeline",))
    ),
    **dict.fromkeys(
        ("context_parallel_size", "sequence_parallel_size", "cp_size", "cp"), Synonym(("parallel.context",))
    ),
    **dict.fromkeys(
        ("expert_parallel_size", "expert_model_parallel_size", "ep_size", "ep"), Synonym(("parallel.expert",))
    ),
    "sequence_parallel": Synonym(("parallel.sequence",)),
    **dict.fromkeys(
        ("data_parallel_size", "data_parallel", "dp_size", "dp", "num_gpus", "n_gpus", "gpus", "devices", "world_size"),
        Synonym((), "leave it out: --nproc or torchrun starts the processes, and data parallelism is what the other sizes leave"),
    ),
    **dict.fromkeys(
        ("flash_attn", "attn_implementation", "use_flash_attention"), Synonym((), "leave it out: the engine chooses its kernels")
    ),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization_bit"), Synonym(("base_weights",), "with lora; nf4, or fp8")
    ),
    **dict.fromkeys(("use_cpu", "no_cuda"), Synonym(("platform",), "platform: cpu")),
    "ddp_timeout": Synonym(("timeout_s",)),
    # adapters
    **dict.fromkeys(("r", "lora_r", "lora_rank"), Synonym(("lora.rank",))),
    "lora_alpha": Synonym(("lora.alpha",)),
    "lora_dropout": Synonym(("lora.dropout",)),
    **dict.fromkeys(
        ("target_modules", "lora_target_modules", "lora_target", "lora_target_linear", "lora_modules"), TARGETS
    ),
    **dict.fromkeys(("use_rslora", "peft_use_rslora"), Synonym(("lora.rslora",))),
    **dict.fromkeys(("use_peft", "peft_config", "lora_config", "adapter", "finetuning_type"), WITH_LORA),
    # checkpoints, logs, validation
    **dict.fromkeys(("save_steps", "save_every", "save_freq", "save_interval"), Synonym(("checkpoint.every",), "in steps")),
    "save_strategy": Synonym(("checkpoint.every",), "in steps; 0: only when a signal stops the run"),
    "save_total_limit": Synonym(("checkpoint.keep_last",)),
    "saves_per_epoch": Synonym(("checkpoint.every",), "in steps"),
    **dict.fromkeys(
        ("logging_steps", "log_interval", "log_every", "logging_strategy", "logging_first_step"),
        Synonym((), "every step is logged, in metrics.jsonl and by trackers; leave it out"),
    ),
    **dict.fromkeys(("report_to", "wandb", "use_wandb", "wandb_project", "logger"), TRACKING),
    **dict.fromkeys(
        ("eval_steps", "eval_strategy", "evaluation_strategy", "eval_interval", "eval_every", "test_freq"), VALIDATION
    ),
    **dict.fromkeys(("val_set_size", "test_size", "val_size"), Synonym(("validation.fraction",), "a share below 1")),
    **dict.fromkeys(("resume_from_checkpoint", "auto_resume_from_checkpoints"), Synonym((), "an option: --resume auto")),
    "overwrite_output_dir": Synonym((), "an option: --overwrite"),
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "push_to_hub_model_id"), Synonym(("push.repository",), "NAMESPACE/NAME")
    ),
    "hub_private_repo": Synonym(("push.private",)),
    # preferences, reinforcement learning
    **dict.fromkeys(
        ("beta", "rl_beta"), Synonym(("dpo.beta", "orpo.beta", "simpo.beta", "kto.beta", "reference.coefficient"))
    ),
    "center_rewards_coefficient": Synonym(("bradley_terry.center_coefficient",)),
    **dict.fromkeys(
        ("id2label", "label2id", "label_names", "class_names"),
        Synonym(("classification.labels",), "a list of names in the order of their ids"),
    ),
    "num_classes": Synonym(("classification.num_labels",)),
    "num_generations": Synonym(("rollout.group_size",)),
    **dict.fromkeys(("max_completion_length", "max_new_tokens", "response_length"), Synonym(("rollout.max_tokens",))),
    "max_prompt_length": Synonym(("batching.max_length",), "of prompt and response together, in tokens"),
    **dict.fromkeys(("reward_funcs", "reward_function"), Synonym(("rollout.reward",), "one path/to/file.py:function")),
    **dict.fromkeys(("epsilon", "clip_ratio"), Synonym(("objective.clip_low",), "with objective.clip_high")),
    "epsilon_high": Synonym(("objective.clip_high",)),
    "loss_type": Synonym(("objective.preset",), "or objective.loss and objective.average"),
    "adv_estimator": Synonym(("objective.advantages",)),
    **dict.fromkeys(("kl_coef", "kl_loss_coef"), Synonym(("reference.coefficient",), "in section reference")),
    "scale_rewards": Synonym(("objective.divide_by_std",)),
    "vllm_gpu_memory_utilization": Synonym(("placement.memory",)),
}  # fmt: skip
"""Equivalents by name."""

VALUES: dict[str, str] = {
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "gpu": "cuda",
    "ascend": "npu",
}
"""Equivalents of values, where one of a few names is expected."""
