"""verl's PPO with Ray, a critic and a reference model, each in a separate process on the actor's devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl.workers", reason="no verl in this environment: bash scripts/test_integrations.sh verl")

from verl_runs import RAY, RL_DEADLINE_S, critic_settings, grpo_command, logged_steps, python, write_prompts

pytestmark = pytest.mark.nightly

STEPS = 20
REWARD, DIFFERENCE = "critic/score/mean", "training/rollout_probs_diff_max"
KL = "actor/kl_loss"
REFERENCE = ["actor_rollout_ref.actor.use_kl_loss=True"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a random model, prompts and a reward."""
    directory = tmp_path_factory.mktemp("ppo")
    write_prompts(directory)
    command = ["-m", "megascend", "new-model", "qwen3", "--arch", "qwen3", "--hidden", "64", "--layers", "2"]
    new_model = python(command, directory, VERL_ENGINE_VENDOR="")
    assert new_model.returncode == 0, new_model.stderr
    return directory


def trained(folder: Path, name: str, ranks: int, steps: int, *settings: str) -> dict[int, dict[str, float]]:
    """Run training; return the metrics of its steps. A run of an existing name resumes."""
    log = folder / f"{name}.jsonl"
    log.unlink(missing_ok=True)
    command = grpo_command(folder, name, ranks, steps, *critic_settings(folder), *settings)
    completed = python(command, folder, RL_DEADLINE_S, VERL_FILE_LOGGER_PATH=str(log), **RAY)
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-4000:]
    assert "verl's engine is megascend" in completed.stdout
    assert "a critic with a new head" in completed.stdout
    return logged_steps(log)


def mean(steps: dict[int, dict[str, float]], name: str, chosen: Any) -> float:
    return sum(steps[step][name] for step in chosen) / len(chosen)


def rises(steps: dict[int, dict[str, float]]) -> None:
    """Check that the reward rises, the critic's loss falls, and its values approach the rewards."""
    assert sorted(steps) == list(range(1, STEPS + 1))
    first, last = (1, 2, 3), (STEPS - 2, STEPS - 1, STEPS)
    print({name: [round(steps[step][name], 4) for step in steps] for name in (REWARD, "critic/vf_loss")})
    assert mean(steps, REWARD, last) > mean(steps, REWARD, first) + 0.25
    assert mean(steps, "critic/vf_loss", last) < mean(steps, "critic/vf_loss", first) / 3
    assert mean(steps, "critic/values/mean", last) == pytest.approx(mean(steps, REWARD, last), abs=0.15)
    assert max(steps[step][DIFFERENCE] for step in steps) < 1e-5
    assert min(steps[step]["critic/grad_norm"] for step in steps) > 0


@pytest.mark.torchrun
def test_ppo_with_a_critic_and_a_reference_trains_and_resumes(folder: Path) -> None:
    """Check that the reference is the actor of the first step, and a resumed critic is the saved one."""
    steps = trained(folder, "one", 1, STEPS, *REFERENCE, f"trainer.save_freq={STEPS}")
    rises(steps)
    assert abs(steps[1][KL]) < 1e-6
    assert steps[STEPS][KL] > 1e-3
    for role in ("actor", "critic"):
        assert (folder / "one" / f"global_step_{STEPS}" / role / "megascend").is_dir()
    after = trained(folder, "one", 1, STEPS + 2, *REFERENCE, f"trainer.save_freq={STEPS}")
    assert sorted(after) == [STEPS + 1, STEPS + 2]
    for figures in after.values():
        assert figures[REWARD] == pytest.approx(mean(steps, REWARD, (STEPS - 1, STEPS)), abs=0.15)
        assert figures["critic/values/mean"] == pytest.approx(figures[REWARD], abs=0.2)
        assert figures[KL] > 1e-3


@pytest.mark.torchrun
def test_actor_and_critic_may_have_different_layouts(folder: Path) -> None:
    """Run a data parallel actor and a tensor parallel critic on two ranks."""
    rises(trained(folder, "two", 2, STEPS, "critic.megatron.tensor_model_parallel_size=2"))


GRPO, GAE = "algorithm.adv_estimator=grpo", "algorithm.adv_estimator=gae"
CASES: list[tuple[list[str], dict[str, str]]] = [
    (["model_engine=megatron", GRPO], {"actor_rollout": "global_pool"}),
    (["model_engine=megatron", GAE], {"actor_rollout": "global_pool", "critic": "critic_pool"}),
    (["model_engine=megatron", GRPO, *REFERENCE], {"actor_rollout": "global_pool", "ref": "ref_pool"}),
    (
        ["model_engine=megatron", GRPO, *REFERENCE, "actor_rollout_ref.model.lora.rank=8"],
        {"actor_rollout": "global_pool"},
    ),
    (["model_engine=dp", GAE, *REFERENCE], {"actor_rollout_ref": "global_pool", "critic": "global_pool"}),
]
POOLS = """
import json, sys
from pathlib import Path
import verl
from hydra import compose, initialize_config_dir
from verl.trainer.ppo.v1 import get_trainer_cls

found = []
with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
    for overrides in json.loads(sys.argv[1]):
        config = compose("ppo_trainer", overrides=overrides)
        trainer = object.__new__(get_trainer_cls(config.trainer.v1.trainer_mode))
        trainer.config = config
        trainer._init_resource_pool_mgr()
        manager = trainer.resource_pool_manager
        assert manager.get_n_gpus() == config.trainer.n_gpus_per_node
        assert {str(role) for role in trainer.role_worker_mapping} <= {str(role) for role in manager.mapping}
        found.append([manager.max_colocate_count, {str(role): pool for role, pool in manager.mapping.items()}])
print(json.dumps(found))
"""


def test_roles_with_a_separate_resource_pool(tmp_path: Path) -> None:
    """Give critic and reference on Megatron-Core a pool; with LoRA there is none, and verl's other engines share theirs.

    Beside both and a reward model, a device has room for four processes, and not for three.
    """
    crowded = ["model_engine=megatron", GAE, *REFERENCE, "reward.reward_model.enable=True"]
    completed = python(["-c", POOLS, json.dumps([*(settings for settings, _ in CASES), crowded])], tmp_path)
    assert completed.returncode == 0, completed.stderr[-4000:]
    results = json.loads(completed.stdout.splitlines()[-1])
    results, four = results[:-1], results[-1]
    assert [{role: pool for role, pool in pools.items() if role != "rm"} for _, pools in results] == [
        roles for _, roles in CASES
    ]
    assert {count for count, _ in results} == {3}
    assert four[0] == 4
