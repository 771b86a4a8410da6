"""The settings of ``megascend rl`` that others are derived from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megascend.config.rl import Objective, RlConfig, Rollout, load_rl_config
from megascend.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"prompts_per_step": 64}, 640),
        ({"prompts_per_step": 1}, 100),  # a handful of groups proves nothing
        ({"prompts_per_step": 64, "max_groups_without_signal": 5}, 5),
        ({"max_groups_without_signal": 0}, 0),
    ],
)
def test_groups_without_signal_are_bounded_by_ten_batches_or_by_the_setting(settings, bound) -> None:
    assert Rollout(prompts="p.jsonl", reward="m:f", **settings).max_equal_groups == bound


SETTINGS: dict[str, Any] = {"model": "m", "output": "o", "steps": 1, "rollout": {"prompts": "p", "reward": "m:f"}}


def test_entries_vllm_are_engines_that_the_run_starts() -> None:
    config = RlConfig(**SETTINGS, engines=("vllm", "http://host:8000", "vllm"), placement={"engines": [[1], [2, 3]]})
    assert config.started_engines == (0, 2)


def with_objective(**objective: Any) -> RlConfig:
    return RlConfig(**SETTINGS, objective=objective)


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        ("grpo", ("ppo", 0.2, 0.2, "grpo", "none", "responses", 0.0)),
        ("dr_grpo", ("ppo", 0.2, 0.2, "centered", "none", "fixed", 0.0)),
        ("dapo", ("ppo", 0.2, 0.28, "grpo", "none", "tokens", 0.2)),
        ("gspo", ("gspo", 3e-4, 4e-4, "grpo", "none", "responses", 0.0)),
        ("cispo", ("cispo", 1.0, 4.0, "grpo", "none", "tokens", 0.0)),
        ("reinforce++", ("ppo", 0.2, 0.2, "reinforce++", "none", "responses", 0.0)),
        ("rloo", ("importance_sampling", None, None, "rloo", "truncated", "sums", 0.0)),
    ],
)
def test_presets_set_what_is_not_set(preset: str, settings: tuple[Any, ...]) -> None:
    names = ("loss", "clip_low", "clip_high", "advantages", "correction", "average", "overlong_share")
    config = with_objective(preset=preset)
    assert tuple(getattr(config.objective, name) for name in names) == settings
    assert config.objective.length == config.rollout.max_tokens
    # What a run stores is what it has read, also by a version with other presets.
    assert RlConfig(**config.model_dump(mode="json")) == config
    assert with_objective(preset=preset, average="sums").objective.average == "sums"


def test_settings_win_over_a_preset_also_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(SETTINGS | {"objective": {"preset": "dapo", "clip_low": 0.1}}), encoding="utf-8")
    objective = load_rl_config(path, ["objective.clip_high=0.4", "objective.length=99"]).objective
    assert (objective.clip_low, objective.clip_high, objective.length) == (0.1, 0.4, 99)
    assert (objective.average, objective.correction) == ("tokens", "none")


def test_clip_ranges_of_a_preset_are_those_of_its_loss_where_there_is_a_ratio() -> None:
    for changes in ({"correction": "truncated"}, {"loss": "gspo"}, {"loss": "dro"}):
        assert with_objective(preset="dapo", **changes).objective.loss_options == {}


def test_equal_groups_are_kept_where_they_have_advantages() -> None:
    assert with_objective(preset="grpo").drops_equal_groups
    assert not with_objective(preset="reinforce++").drops_equal_groups
    assert with_objective(preset="reinforce++", advantages="reinforce++_baseline").drops_equal_groups
    # A teacher's scores are learned from a group with equal rewards, too.
    assert not RlConfig(**SETTINGS, teacher={"model": "teacher", "rewards": True}).drops_equal_groups
    rollout = SETTINGS["rollout"] | {"drop_equal": True}
    assert RlConfig(**SETTINGS | {"rollout": rollout}, teacher={"model": "m", "rewards": True}).drops_equal_groups
    assert RlConfig(**SETTINGS | {"rollout": rollout}, objective={"preset": "reinforce++"}).drops_equal_groups


def test_settings_of_rewards_that_a_teacher_replaces_are_listed() -> None:
    objective = {"preset": "dapo", "divide_by_std": False}
    replaced = {"divide_by_std": False, "overlong_share": 0.2}
    for loss in ("policy", "reverse_kl"):
        config = RlConfig(**SETTINGS, teacher={"model": "teacher", "loss": loss}, objective=objective)
        assert config.replaced_settings == replaced
    assert RlConfig(**SETTINGS, teacher={"model": "teacher"}).replaced_settings == {}
    assert RlConfig(**SETTINGS, objective=objective).replaced_settings == {}
    with_rewards = RlConfig(**SETTINGS, teacher={"model": "teacher", "rewards": True}, objective=objective)
    assert with_rewards.replaced_settings == {}


def test_options_that_a_loss_does_not_have_are_refused_by_name() -> None:
    from megascend.apps.rl.set_up import check_objective

    for values, words in (
        (
            {"preset": "gspo", "dual_clip": 3},
            r"objective\.dual_clip: 3, but loss 'gspo' has no setting 'dual_clip'",
        ),
        (
            {"loss": "dro", "correction": "none", "clip_low": 0.2},
            r"objective\.clip_low: 0\.2, but loss 'dro' has no setting",
        ),
        (
            {"loss_settings": {"beta": 0.2}, "correction": "none"},
            r"objective\.loss_settings\.beta: 0\.2, but loss 'ppo' has no setting",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            check_objective(Objective(**values))
