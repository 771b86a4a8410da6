"""A dry run refuses what a real run refuses, in the same words: settings against each engine, layout, model and LoRA."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megascend.apps.cli.dry_run_text import Style, report_rl
from megascend.apps.cli.random_checkpoint import ModelSize, write_checkpoint
from megascend.apps.rl.train import train_rl
from megascend.apps.train.dry_run import dry_run, dry_run_rl
from megascend.apps.train.preflight import preflight
from megascend.apps.train.train import train
from megascend.config import RunConfig
from megascend.config.rl import RlConfig
from megascend.errors import MegascendError
from megascend.models.checkpoint_files.info import inspect_checkpoint
from support.forked_programs import run_forked

Changes = dict[str, Any]
REFUSED: dict[str, dict[str, tuple[str, Changes, str]]] = {
    "megatron": {
        "bias": ("qwen3_moe", {"moe": {"bias_update_rate": 0.1}}, "have no correction bias"),
        "options": ("qwen3", {"provider_options": {"use_flash_attn": True}}, "use_flash_attn"),
    },
    "fsdp": {
        "dropout on experts": ("qwen3_moe", {"lora": {"rank": 4, "dropout": 0.1}}, "dropout 0.1 on experts"),
        "layers": ("qwen3", {"recompute": {"granularity": "full", "layers": 2}}, "recompute.layers: 2"),
        "replicas": ("qwen3", {"fsdp": {"replicate": 2}}, "does not divide the 1 processes"),
    },
}
"""Some of the rules of each engine, all of which ``engines/test_rules.py`` has."""


def reward(response: str, example: dict[str, Any]) -> float:
    return 0.0


def refusal(call: Any, *arguments: Any, **options: Any) -> str:
    try:
        call(*arguments, **options)
    except MegascendError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def both_refusals(engine: str, folder: Path) -> dict[str, tuple[str, str]]:
    """Return the errors of a dry run and of a real run, by the name of the setting."""
    common = {"engine": engine, "platform": "cpu", "self_check": False, "steps": 1, "export": False}
    data = {"path": str(folder / "data.jsonl"), "global_batch_size": 1}
    rollout = {"prompts": str(folder / "prompts.jsonl"), "reward": f"{__file__}:reward", "max_tokens": 8}
    results = {}
    for name, (model, changes, _) in REFUSED[engine].items():
        output = folder / engine / name.replace(" ", "_")
        settings = {**common, "model": str(folder / model), "output": str(output), **changes}
        config = RunConfig(**settings, data=data)
        dry = refusal(lambda config=config: dry_run(preflight(config, 1, overwrite=False)))
        results[name] = dry, refusal(train, config)
        if name == "layers":
            rl_config = RlConfig(**settings, engines=["local"], rollout=rollout)
            dry = refusal(lambda config=rl_config: dry_run_rl(preflight(config, 1, overwrite=False)))
            results["layers, rl"] = dry, refusal(train_rl, rl_config)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny models with tokenizers, data and prompts."""
    folder = tmp_path_factory.mktemp("refusals")
    size = ModelSize(hidden=32, layers=2, heads=2, kv_heads=2, context=64)
    write_checkpoint(folder / "qwen3", size, 0)
    write_checkpoint(folder / "qwen3_moe", replace(size, arch="qwen3_moe", experts=4), 0)
    (folder / "data.jsonl").write_text(json.dumps({"text": "one two"}) + "\n", encoding="utf-8")
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "one"}) + "\n", encoding="utf-8")
    return folder


def run_here(task: str, folder: Path) -> dict[str, Any]:
    """Run this file in a process of its own: a process is prepared for one engine."""
    completed = run_forked(Path(__file__), task, folder)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return json.loads(completed.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "engine",
    [engine if engine == "megatron" else pytest.param(engine, marks=pytest.mark.nightly) for engine in REFUSED],
)
def test_dry_run_and_real_run_refuse_in_the_same_words(engine: str, folder: Path) -> None:
    results = run_here(engine, folder)
    assert len(results) > len(REFUSED[engine]) or engine == "megatron"
    for name, (dry, real) in results.items():
        assert dry == real, name
        words = REFUSED[engine][name.removesuffix(", rl")][2]
        assert words in real, name


def test_rl_dry_run_describes_prompts_trial_and_memory(folder: Path) -> None:
    results = run_here("rl", folder)
    lines = results["lines"]
    assert "prompts   1; 3 tokens each" in lines
    assert any(line.startswith("trial ") and "prompts.jsonl:1: reward" in line for line in lines)
    assert any(line.strip().startswith("total ") for line in lines)
    assert any(line.startswith("steps     3 of ") for line in lines)
    parts = "loss ppo (clip_low 0.1, clip_high 0.28), advantages grpo, average tokens, no correction"
    assert f"objective dapo: {parts}, overlong_share 0.2 of 8" in lines
    assert f"teacher   {folder / 'qwen3'}: reverse_kl; on the trainer's ranks" in lines
    items, shape = results["items"], inspect_checkpoint(folder / "qwen3").shape
    # fp32 shards of one rank: two copies each in host memory, which is a CPU's own.
    assert items["reference"] == items["teacher"] == 2 * items["parameters"]
    assert items["teacher's output layer"] == 2 * shape.vocab_size * shape.hidden_size
    # 16 groups of 8 responses of 8 tokens after a prompt of 3, in bf16, twice.
    assert items["teacher's states"] == 2 * 2 * shape.hidden_size * 16 * 8 * 11
    # Weights in bf16, those in use and those of an update.
    assert results["processes"] == {"local engine": items["parameters"]}
    assert any(line.endswith("of weights in host memory beside rank 0") for line in lines)
    assert not (folder / "out").exists()


def rl_lines(folder: Path) -> dict[str, Any]:
    """Return the text of a dry run of ``rl``, and bytes of the memory that it estimates."""
    rollout = {"prompts": str(folder / "prompts.jsonl"), "reward": f"{__file__}:reward", "max_tokens": 8}
    common = {"engine": "fsdp", "platform": "cpu", "steps": 3, "engines": ["local"], "rollout": rollout}
    common["objective"] = {"preset": "dapo", "clip_low": 0.1}
    common["reference"] = {"coefficient": 0.1}
    common["teacher"] = {"model": str(folder / "qwen3"), "engine": "trainer", "loss": "reverse_kl"}
    config = RlConfig(model=folder / "qwen3", output=folder / "out", **common)
    dry = dry_run_rl(preflight(config, 1, overwrite=False))
    assert dry.memory is not None
    lines = list(report_rl(dry, Style(colour=False)))
    return {"lines": lines, "items": dry.memory.items, "processes": dry.processes}


if __name__ == "__main__":
    task, directory = sys.argv[1], Path(sys.argv[2])
    print(json.dumps(rl_lines(directory) if task == "rl" else both_refusals(task, directory)))
