"""The settings of ``megascend rl`` that others are derived from."""

from __future__ import annotations

import pytest

from megascend.config.rl import RlConfig, Rollout


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


def test_router_replay_needs_engines_that_return_experts() -> None:
    settings = {
        "model": "m",
        "output": "o",
        "steps": 1,
        "rollout": {"prompts": "p", "reward": "m:f", "router_replay": True},
    }
    with pytest.raises(ValueError, match=r"rollout\.router_replay needs engines that return the experts of each token"):
        RlConfig(**settings)
    assert RlConfig(**settings, engines=("http://host:8000",)).rollout.router_replay


SETTINGS = {"model": "m", "output": "o", "steps": 1, "rollout": {"prompts": "p", "reward": "m:f"}}


def test_placement_needs_engines_that_the_run_starts() -> None:
    config = RlConfig(**SETTINGS, engines=("vllm", "http://host:8000", "vllm"), placement={"engines": [[1], [2, 3]]})
    assert config.started_engines == (0, 2)
    with pytest.raises(ValueError, match="placement is of engines that the run starts, and engines has no vllm"):
        RlConfig(**SETTINGS, engines=("http://host:8000",), placement={"memory": 0.5})
    with pytest.raises(
        ValueError, match=r"placement\.engines has the GPUs of 1 engines, and engines has 2 entries vllm"
    ):
        RlConfig(**SETTINGS, engines=("vllm", "vllm"), placement={"engines": [[1]]})
    with pytest.raises(ValueError, match="memory"):
        RlConfig(**SETTINGS, engines=("vllm",), placement={"memory": 1.5})
