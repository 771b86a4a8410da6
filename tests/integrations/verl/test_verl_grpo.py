"""verl's own GRPO with Ray, unmodified, on megascend's engine and rollouts: the reward rises, and both agree on probabilities.

The actor is Megatron-Core; what samples is transformers, or a vLLM in an environment of its own. verl compares the probabilities
that the two give to every sampled token.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("verl.workers", reason="no verl in this environment: bash scripts/test_integrations.sh verl")

from verl_runs import RAY, RL_DEADLINE_S, grpo_command, logged_steps, python, write_prompts

pytestmark = [pytest.mark.nightly, pytest.mark.torchrun]

STEPS = 20
WIDE_HEADS = "wide_heads"
"""Heads of size 32: vLLM 0.32 has no attention for heads of 16 on a CPU."""
REWARD, DIFFERENCE = "critic/score/mean", "training/rollout_probs_diff_max"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two models with random weights, prompts and a reward."""
    directory = tmp_path_factory.mktemp("grpo")
    write_prompts(directory)
    command = ["--arch", "qwen3", "--hidden", "64", "--layers", "2"]
    for name, heads in (("qwen3", []), (WIDE_HEADS, ["--heads", "2", "--kv-heads", "1"])):
        new_model = python(["-m", "megascend", "new-model", name, *command, *heads], directory, VERL_ENGINE_VENDOR="")
        assert new_model.returncode == 0, new_model.stderr
    return directory


def vllm_python() -> str:
    interpreter = os.environ.get("MEGASCEND_VLLM_PYTHON", "")
    if not interpreter:
        pytest.skip("MEGASCEND_VLLM_PYTHON names no vLLM: bash scripts/vllm_env.sh makes one")
    return interpreter


LAYOUTS = {
    "DP2": (2, []),
    "TP2": (2, ["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"]),
    "one rank, vLLM": (
        1,
        [
            "actor_rollout_ref.rollout.enforce_eager=True",
            "+actor_rollout_ref.rollout.engine_kwargs.megascend.vllm_python=",
        ],
    ),
}


def writing_below(folder: Path) -> list[int]:
    """List processes whose output goes to a file below a folder: vLLM's, whatever their names."""
    numbers = []
    for number in psutil.pids():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{number}/fd/1").startswith(str(folder)):
                numbers.append(number)
    return numbers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reward_rises(folder: Path, layout: str) -> None:
    """Also check that actor and sampler give every token the same probability, to 1e-5, in every step."""
    ranks, settings = LAYOUTS[layout]
    if "vLLM" in layout:
        model = f"actor_rollout_ref.model.path={folder / WIDE_HEADS}"
        settings = [*settings[:-1], settings[-1] + vllm_python(), model]
    name = layout.replace(" ", "-").replace(",", "")
    log = folder / f"{name}.jsonl"
    command = grpo_command(folder, name, ranks, STEPS, *settings)
    engines = folder / f"{name}-engines"
    engines.mkdir()
    files = {"VERL_FILE_LOGGER_PATH": str(log), "TMPDIR": str(engines), "RAY_TMPDIR": "/tmp"}
    completed = python(command, folder, RL_DEADLINE_S, **files, **RAY)
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-4000:]
    if "vLLM" in layout:
        assert list(engines.glob("*/vllm.log"))
    end = time.monotonic() + 60
    while writing_below(engines):
        assert time.monotonic() < end, "processes of the engine are left"
        time.sleep(0.1)
    assert "verl's engine is megascend" in completed.stdout
    steps = logged_steps(log)
    assert sorted(steps) == list(range(1, STEPS + 1))
    rewards = [steps[step][REWARD] for step in sorted(steps)]
    print(f"{layout}: rewards {[round(reward, 3) for reward in rewards]}")
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.25
    assert max(steps[step][DIFFERENCE] for step in steps) < 1e-5
