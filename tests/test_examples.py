"""Example run files are valid for ``megascend train`` or ``megascend rl``, and their data exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascend.apps.data.files import read_documents
from megascend.apps.rl.rollout.prompts import read_prompts
from megascend.apps.rl.rollout.rewards import load_reward
from megascend.config import load_config
from megascend.config.rl import load_rl_config

ROOT = Path(__file__).resolve().parent.parent
RL = ROOT / "examples" / "rl"
FILES = sorted(set((ROOT / "examples").rglob("*.yaml")) - set(RL.rglob("*.yaml")))


def test_examples_exist() -> None:
    assert {path.name for path in FILES} >= {"quickstart.yaml", "lora.yaml"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_example_run_file_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    assert len(read_documents(config.data.path)) >= config.data.global_batch_size
    assert config.schedule.total_steps in (0, config.steps)


def test_rl_example_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_rl_config(RL / "sort_digits.yaml")
    assert config.evaluation is not None
    assert len(read_prompts(config.rollout.prompts)) >= config.rollout.prompts_per_step
    reward = load_reward(config.rollout.reward)
    for prompt in read_prompts(config.evaluation.prompts):
        assert reward(prompt["answer"], prompt) == 1.0
        assert reward(prompt["answer"] + "x", prompt) == 4 / 5
        assert sorted(prompt["prompt"][1:4]) == list(prompt["answer"][:3])
