"""Small runs of ``megascend rl`` for tests: a tiny model with prompts and rewards, settings, and what a run writes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megascend.apps.rl.learner import Totals
from megascend.apps.rl.rollout.engines.local import LocalEngine
from megascend.apps.rl.train import train_rl
from megascend.apps.train.callbacks import Callback
from megascend.apps.train.learner import RunResult
from megascend.config.rl import RlConfig
from megascend.testing import run_distributed
from weightwire.engine import Completion, Sampling

REWARD = """
import os, signal

def vowels(response, example):
    return sum(letter in "aeiou0123" for letter in response) / max(1, len(response))

def broken(response, example):
    raise KeyError("no such thing")

def settled(response, example):
    even = int(example["prompt"].strip("say :")) % 2 == 0
    return 1.0 if even else vowels(response, example)


def parts(response, example):
    return {"reward": vowels(response, example), "length": len(response)}

calls = 0

def fading(response, example):
    global calls
    calls += 1
    return 0.0 if calls > 24 else vowels(response, example)
"""
DEADLINE_S = 240
TIMINGS = {"seconds", "tokens_per_s", "wait_s", "idle", "sync_s", "pause_s"}
SAMPLING_METRICS = {"reward", "equal", "stale", "prompts", "lag", "max_lag"}
"""Metrics that depend on timing with ``in_order`` too, since engines sample ahead; what is learned does not."""


class RecordedEngine(LocalEngine):
    """Engine whose answers depend only on prompt and seed, like a recording; it accepts weight updates."""

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, n: int = 1, adapter: str | None = None
    ) -> list[Completion]:
        draw, version = random.Random(f"{prompt}/{sampling.seed}"), await self.version()
        completions = []
        for _ in range(n):
            count = draw.randint(1, sampling.max_tokens)
            tokens = tuple(draw.randrange(97, 123) for _ in range(count))
            logprobs = tuple(-draw.uniform(5.0, 6.5) for _ in tokens)
            completions.append(Completion(tokens, logprobs, "stop", version, version))
        return completions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a tiny model with a tokenizer, prompts and rewards."""
    from megascend.apps.cli.random_checkpoint import ModelSize, write_checkpoint

    folder = tmp_path_factory.mktemp("rl")
    write_checkpoint(folder / "model", ModelSize(hidden=32, layers=1, heads=2, kv_heads=2, context=64), 0)
    lines = [{"prompt": f"say {number}:"} for number in range(7)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reward.py").write_text(REWARD)
    return folder


def settings(folder: Path, output: str, **changes: Any) -> RlConfig:
    rollout = {
        "prompts": folder / "prompts.jsonl",
        "reward": f"{folder / 'reward.py'}:vowels",
        "prompts_per_step": 2,
        "group_size": 3,
        "max_tokens": 5,
    } | changes.pop("rollout", {})
    values = {
        "model": folder / "model",
        "output": folder / output,
        "steps": 5,
        "self_check": False,
        "platform": "cpu",
        "precision": "fp32",
        "optimizer": {"lr": 0.01},
        "rollout": rollout,
        "plot": False,
        "export": False,
        "timeout_s": 60,
    }
    return RlConfig(**(values | changes))


def run(
    config: RlConfig,
    kind: Callable[..., LocalEngine] = LocalEngine,
    engines: int = 1,
    resume: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> RunResult[Totals]:
    return train_rl(
        config,
        resume=resume,
        callbacks=callbacks,
        engines=lambda config: [
            kind(config.model, name=f"engine {index}", own_process=False, seed=index) for index in range(engines)
        ],
    )


def in_a_fork(act: Callable[[], Any]) -> Any:
    return run_distributed(act, 1, init=False, timeout_s=DEADLINE_S)


def rows(config: RlConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def rollouts(config: RlConfig) -> list[dict[str, Any]]:
    """Return the trajectories that a run has recorded."""
    lines = (config.output / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def dry(config: RlConfig) -> Any:
    from megascend.apps.train.dry_run import dry_run_rl
    from megascend.apps.train.preflight import preflight

    return in_a_fork(lambda: dry_run_rl(preflight(config, 1, False)))[0]
