"""Names in run files and overrides: short names, names of other programs, and names of engines, losses and the like."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path

import pytest
from peft import LoraConfig
from pydantic import BaseModel
from transformers import TrainingArguments

from megascend.apps.rl.set_up import check_objective
from megascend.config import RunConfig, load_config
from megascend.config.registry import (
    losses_of_responses,
)
from megascend.config.rl import Objective, RlConfig, load_rl_config
from megascend.config.section import Also, section_of
from megascend.config.serve import load_serve_config
from megascend.errors import ConfigError
from megascend.training.batch import losses
from support.forked_programs import run_forked

RUN_FILE = "model: m\noutput: o\ndata: {path: d.jsonl}\n"
RL_FILE = "model: m\noutput: o\nrollout: {prompts: p.jsonl, reward: 'operator:eq'}\n"


def load(folder: Path, text: str, *overrides: str) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(RUN_FILE + text, encoding="utf-8")
    return load_config(path, list(overrides))


def load_rl(folder: Path, text: str, *overrides: str) -> RlConfig:
    path = folder / "rl.yaml"
    path.write_text(RL_FILE + text, encoding="utf-8")
    return load_rl_config(path, list(overrides))


# --- short names ---


def test_short_name_sets_the_only_setting_that_ends_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "megascend"):
        config = load(
            tmp_path, "", "lr=1e-4", "warmup_steps=5", "cuda_graphs.max_count=4", "seed=7", "optimizer.eps=1e-6"
        )
    assert (config.optimizer.lr, config.schedule.warmup_steps, config.seed) == (1e-4, 5, 7)
    assert config.batching.cuda_graphs is not None
    assert config.batching.cuda_graphs.max_count == 4
    assert [record.getMessage() for record in caplog.records] == [
        "--set lr=1e-4 sets optimizer.lr",
        "--set warmup_steps=5 sets schedule.warmup_steps",
        "--set cuda_graphs.max_count=4 sets batching.cuda_graphs.max_count",
    ]


def test_short_name_prefers_sections_that_the_run_has(tmp_path: Path) -> None:
    dpo = load(tmp_path, "dpo: {beta: 0.1}\n", "beta=0.3").dpo
    assert dpo is not None
    assert dpo.beta == 0.3
    lora = load(tmp_path, "", "rank=4").lora
    assert lora is not None
    assert lora.rank == 4
    validation = load(tmp_path, "", "validation.fraction=0.5", "fraction=0.25").validation
    assert validation is not None
    assert validation.fraction == 0.25


@pytest.mark.parametrize(
    ("text", "override", "candidates"),
    [
        ("lora: {optimizer: {lr: 1e-3}}\n", "lr=1e-4", "optimizer.lr, lora.optimizer.lr"),
        ("validation: {fraction: 0.1}\n", "every=5", "checkpoint.every, validation.every"),
        ("", "max_tokens=5", "batching.cuda_graphs.max_tokens, generation.max_tokens"),
    ],
)
def test_ambiguous_short_name_lists_the_candidates(tmp_path: Path, text: str, override: str, candidates: str) -> None:
    name = override.partition("=")[0]
    with pytest.raises(
        ConfigError, match=f"^--set {name}: several settings end so, {candidates}: give the full name of one$"
    ):
        load(tmp_path, text, override)


def test_short_name_alternative_replaces_the_files(tmp_path: Path) -> None:
    validation = load(tmp_path, "validation: {path: v}\n", "fraction=0.1").validation
    assert validation is not None
    assert (validation.path, validation.fraction) == (None, 0.1)


# --- names of other programs ---

REFUSED: dict[str, str] = {
    "learning_rate: 2.0e-4": r"learning_rate: unknown setting \(value 0.0002\), did you mean optimizer.lr or",
    "r: 8": r"r: unknown setting \(value 8\), did you mean lora.rank\?$",
    "lora_rank: 8": r"did you mean lora.rank\?$",
    "gradient_accumulation_steps: 4": r"did you mean data.global_batch_size\?",
    "per_device_train_batch_size: 4": r"did you mean data.global_batch_size\?",
    "num_train_epochs: 3": r"did you mean epochs\?$",
    "warmup_ratio: 0.03": "did you mean schedule.warmup_ratio or lora.schedule.warmup_ratio",
    "lr_scheduler_type: cosine": "did you mean schedule.kind or",
    "bf16: true": r"did you mean precision\?$",
    "max_length: 512": "did you mean batching.max_length",
    "max_seq_length: 512": "did you mean batching.max_length",
    "save_steps: 500": r"did you mean checkpoint.every\?$",
    "beta: 0.1": "did you mean distillation.beta or dpo.beta",
    "gradient_checkpointing: true": "did you mean recompute.granularity",
    "deepspeed: zero3.json": r"did you mean engine\?$",
    "optimizer: {learning_rate: 1}": r"optimizer.learning_rate: unknown setting \(value 1\), did you mean optimizer.lr",
    "lora: {r: 8, lora_alpha: 16}": r"lora.r: .* did you mean lora.rank\?; lora.lora_alpha: .* did you mean lora.alpha\?$",
    "schedule: {kind: cosin}": r"did you mean cosine\?",
}


@pytest.mark.parametrize("line", REFUSED)
def test_name_of_another_program_is_refused_with_the_name_here(line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=REFUSED[line]):
        load(tmp_path, line + "\n")


@pytest.mark.parametrize("name", ["learning_rate", "gradient_accumulation_steps", "lora_alpha", "deepspeed"])
def test_override_has_the_message_of_the_run_file(name: str, tmp_path: Path) -> None:
    messages = []
    for text, overrides in ((f"{name}: 4\n", []), ("", [f"{name}=4"])):
        with pytest.raises(ConfigError) as refused:
            load(tmp_path, text, *overrides)
        messages.append(str(refused.value))
    assert messages[0] == messages[1]


def test_rl_names_its_own_settings(tmp_path: Path) -> None:
    for line, message in {
        "num_generations: 8": "did you mean rollout.group_size",
        "beta: 0.04": "did you mean reference.coefficient or teacher.beta",
        "max_completion_length: 512": "did you mean rollout.max_tokens",
        "per_device_train_batch_size: 4": "did you mean rollout.prompts_per_step",
        "eval_steps: 5": "did you mean evaluation.every",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_rl(tmp_path, line + "\n")


def test_aliases_of_transformers_and_peft_are_spelled_as_there() -> None:
    """Compare with the packages: a misspelt alias would never match."""
    external = {field.name for kind in (TrainingArguments, LoraConfig) for field in fields(kind)}
    common = {
        "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs",
        "lr_scheduler_type", "bf16", "fp16", "gradient_checkpointing", "deepspeed", "save_steps", "save_total_limit",
        "report_to", "eval_steps", "optim", "output_dir", "r", "lora_alpha", "lora_dropout", "target_modules",
    }  # fmt: skip
    assert common <= external
    assert common <= _aliases(RunConfig)


def _aliases(kind: type[BaseModel]) -> set[str]:
    names: set[str] = set()
    for name, field in kind.model_fields.items():
        names |= {alias for also in field.metadata if isinstance(also, Also) for alias in also.names}
        section = section_of(kind, name)
        names |= set() if section is None else _aliases(section)
    return names


# --- names that are registered ---


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("provider=mindsped", "provider: unknown provider 'mindsped', did you mean mindspeed"),
        ("provider=nowhere.at_all:Provider", "provider: 'nowhere.at_all' cannot be imported, package 'nowhere'"),
        ("engine=fdsp", "engine: unknown engine 'fdsp', did you mean fsdp"),
        ("trackers=[wanb]", "trackers: unknown tracker 'wanb', did you mean wandb"),
    ],
)
def test_unknown_name_is_refused_when_the_file_is_read(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, "", override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("objective.loss=poo", "objective.loss: unknown loss of sampled responses 'poo', did you mean ppo"),
        ("objective.loss=dpo", "objective.loss: dpo needs ref_logprobs; responses have old_logprobs and advantages"),
        ("sync.transport=ncl", "sync.transport: unknown transport 'ncl', did you mean nccl"),
    ],
)
def test_unknown_name_of_rl_is_refused_when_the_file_is_read(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_rl(tmp_path, "", override)


def test_unknown_engine_of_the_service_is_refused_when_the_file_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engine: unknown engine 'vllm'; known: megatron"):
        load_serve_config(None, {"model": "m", "engine": "vllm"})


# --- registries ---


@pytest.mark.parametrize("name", losses.BUILT_IN)
def test_run_files_name_the_losses_that_learn_from_responses(name: str) -> None:
    try:
        check_objective(Objective(loss=name))
    except ConfigError:
        assert name not in losses_of_responses()
    else:
        assert name in losses_of_responses()


def test_a_loss_is_added_by_its_function_and_one_row() -> None:
    """The recipe of CONTRIBUTING.md, in a process of its own."""
    program = """
from megascend.config.registry import LOSSES, BuiltInLoss
from megascend.config.rl import RlConfig
from megascend.config.plugins import check_loss, check_names
from megascend.models.checkpoint_files.hidden_matrices import MATRIX_OPTIMIZERS
from megascend.training.batch import policy_losses
LOSSES["mine"] = BuiltInLoss(requires=("old_logprobs", "advantages"))
LOSSES["of_texts"] = BuiltInLoss()
policy_losses.mine = policy_losses.of_texts = lambda logprobs, inputs: -logprobs
check_names(RlConfig(model="m", output="o", rollout={"prompts": "p", "reward": "r:f"}, objective={"loss": "mine"}))
check_loss("of_texts", plugins=False)
from megascend.apps.serve.samples import loss_of
from megascend.training.batch.losses import resolve
assert loss_of("mine", {}).function is resolve("mine").function is policy_losses.mine
"""
    completed = run_forked(program)
    assert completed.returncode == 0, completed.stderr
