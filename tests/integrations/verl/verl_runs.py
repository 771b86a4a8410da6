"""Files and commands of tests that start verl's programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support import families

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DEADLINE_S = 400
RL_DEADLINE_S = 1200
"""Of a run with Ray, whose processes import verl and Megatron-Core each."""

FP32 = "+engine.override_transformer_config.params_dtype=float32"


def environment(**more: str) -> dict[str, str]:
    """Build the environment of a process that imports verl on this machine's CPU; ``vendor`` is megascend by default."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_VENDOR": "megascend", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return {**os.environ, **variables, **more}


def python(
    arguments: list[str], cwd: Path, deadline_s: float = DEADLINE_S, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end with verl's interpreter, which is this one."""
    return families.run([sys.executable, *arguments], deadline_s, cwd=cwd, env=environment(**more))


def write_data(folder: Path) -> None:
    """Write 24 training conversations of different lengths, and 8 held-out ones."""
    import pandas

    rows = []
    for number in range(32):
        count = 1 + number * 7 % 9
        answer = " ".join(WORDS[1 : count + 1])
        turns = [{"role": "user", "content": f"count to {WORDS[count]}"}, {"role": "assistant", "content": answer}]
        rows.append({"messages": turns})
    pandas.DataFrame(rows[:24]).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[24:]).to_parquet(folder / "val.parquet")


def sft_command(folder: Path, model: str, name: str, ranks: int, *settings: str) -> list[str]:
    """Return the command of verl's SFT trainer under torchrun; two epochs of three steps, validation after each."""
    return [
        *("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"),
        *("-m", "verl.trainer.sft_trainer", "engine=megatron", "optim=megatron", FP32),
        f"model.path={folder / model}",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'val.parquet'}",
        *("data.train_batch_size=8", "data.max_token_len_per_gpu=256", "data.num_workers=0"),
        *("optim.lr=1e-2", "optim.weight_decay=0", "trainer.logger=[file]", "trainer.total_epochs=2"),
        *("trainer.device=cpu", "trainer.test_freq=3", f"trainer.default_local_dir={folder / name}"),
        *settings,
    ]


def logged(path: Path) -> dict[str, Any]:
    """Read verl's file log: (loss, norm) by step, validation losses by step."""
    steps, validation = {}, {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        data = record["data"]
        if "train/loss" in data:
            steps[record["step"]] = (data["train/loss"], data["train/grad_norm"])
        if "val/loss" in data:
            validation[record["step"]] = data["val/loss"]
    return {"steps": steps, "validation": validation}


RAY = {
    "RAY_raylet_start_wait_time_s": "600",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_enable_worker_prestart": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""A machine with few cores takes its time, and workers that nobody asks for take it from the others."""

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """The share of a response's eight characters that are small letters."""
    return sum("a" <= letter <= "z" for letter in solution_str) / 8
'''


def write_prompts(folder: Path) -> None:
    """Write 32 training prompts, 8 held-out ones, and the reward's module."""
    import pandas

    rows = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": f"say {WORDS[number % 10]}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number in range(40)
    ]
    pandas.DataFrame(rows[:32]).to_parquet(folder / "prompts.parquet")
    pandas.DataFrame(rows[32:]).to_parquet(folder / "held_out.parquet")
    (folder / "reward.py").write_text(REWARD)


def grpo_command(folder: Path, name: str, ranks: int, steps: int, *settings: str) -> list[str]:
    """Return the command of verl's GRPO with Ray: eight responses to each of eight prompts a step, by megascend's rollout."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        *("-m", "verl.trainer.main_ppo", "model_engine=megatron", "algorithm.adv_estimator=grpo"),
        *(f"actor_rollout_ref.model.path={folder / 'qwen3'}", f"data.train_files={folder / 'prompts.parquet'}"),
        *(f"data.val_files={folder / 'held_out.parquet'}", "data.train_batch_size=8", "data.dataloader_num_workers=0"),
        *("data.max_prompt_length=32", "data.max_response_length=8", "data.seed=1"),
        *(f"reward.custom_reward_function.path={folder / 'reward.py'}", "reward.num_workers=1"),
        *(f"+{actor}.megatron.override_transformer_config.params_dtype=float32", f"{actor}.optim.lr=1e-2"),
        *(f"{actor}.ppo_mini_batch_size=8", f"{actor}.use_dynamic_bsz=True", f"{actor}.ppo_max_token_len_per_gpu=1024"),
        *(f"{rollout}.name=megascend", f"{rollout}.n=8", f"{rollout}.dtype=float32", f"{rollout}.agent.num_workers=1"),
        *(f"{rollout}.tensor_model_parallel_size=1", "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"),
        *(
            "trainer.device=cpu",
            f"trainer.n_gpus_per_node={ranks}",
            "trainer.logger=[file]",
            "trainer.total_epochs=100",
        ),
        *(f"trainer.total_training_steps={steps}", "trainer.val_before_train=False"),
        *(f"trainer.default_local_dir={folder / name}", "+ray_kwargs.ray_init.include_dashboard=False"),
        *("ray_kwargs.ray_init.num_cpus=12", f"+ray_kwargs.ray_init.num_gpus={ranks}"),
        *settings,
    ]


def critic_settings(folder: Path) -> list[str]:
    """Return the settings that turn a GRPO command into PPO with a critic that has a new head."""
    return [
        *("algorithm.adv_estimator=gae", f"critic.model.path={folder / 'qwen3'}", "critic.optim.lr=1e-3"),
        "critic.ppo_max_token_len_per_gpu=1024",
        "+critic.megatron.override_transformer_config.params_dtype=float32",
    ]


def logged_steps(path: Path) -> dict[int, dict[str, float]]:
    """Return all figures of verl's file logger, by step."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["step"]: record["data"] for record in records}
