"""The quick starts of docs/integrations/verl.md, run verbatim."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl.workers", reason="no verl in this environment: bash scripts/test_integrations.sh verl")

from verl_runs import DEADLINE_S, RAY, RL_DEADLINE_S, environment

from support import families
from support.integration_programs import page_blocks

pytestmark = [pytest.mark.nightly, pytest.mark.torchrun]


def run(script: str, folder: Path, deadline_s: float, **more: str) -> str:
    """Run a script that must succeed; return its output."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = environment(PATH=path, **more)
    completed = families.run(["bash", "-c", "set -e\n" + script], deadline_s, cwd=folder, env=env)
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-4000:]
    assert "verl's engine is megascend" in completed.stdout
    return completed.stdout


def test_the_five_minute_start(tmp_path: Path) -> None:
    blocks = page_blocks("verl", "## Five-minute start", "## Reinforcement learning on a CPU")
    printed = run("\n".join(blocks), tmp_path, DEADLINE_S)
    losses = [float(value) for value in re.findall(r"train/loss:([\d.]+)", printed)]
    assert len(losses) == 12
    assert losses[-1] < 0.5 * losses[0]
    assert (tmp_path / "checkpoints" / "global_step_12" / "megascend").is_dir()


def test_reinforcement_learning_on_a_cpu(tmp_path: Path) -> None:
    """Check that the reward rises, and actor and transformers, which samples, give equal probabilities to 1e-5."""
    model = page_blocks("verl", "## Five-minute start", "## Reinforcement learning on a CPU")[0].splitlines()[0]
    assert model.startswith("megascend new-model")
    blocks = page_blocks("verl", "## Reinforcement learning on a CPU", "## How verl loads it")
    printed = run("\n".join([model, *blocks]), tmp_path, RL_DEADLINE_S, **RAY)
    rewards = [float(value) for value in re.findall(r"critic/score/mean:([\d.]+)", printed)]
    differences = [float(value) for value in re.findall(r"rollout_probs_diff_max:([\d.e-]+)", printed)]
    assert (len(rewards), len(differences)) == (20, 20)
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.5
    assert max(differences) < 1e-5
