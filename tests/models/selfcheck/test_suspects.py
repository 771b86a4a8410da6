"""Suspect settings and convictions, with a fake side that ignores some settings."""

from __future__ import annotations

import pytest

from megascend.models.selfcheck.suspects import advice, culprits, known_suspects, other_suspects, plan
from megascend.testing import tiny_config

CONFIG = tiny_config(
    "llama",
    hidden_act="gelu",
    norm_topk_prob=False,
    partial_rotary_factor=0.5,
    rope_parameters={"rope_type": "longrope", "rope_theta": 5e5, "short_factor": [1.0]},
)


def disagreeing(config, ignored: dict[str, object]) -> list[str]:
    """Return the disagreeing settings if one side always computes with the values of ``ignored``."""

    def agrees(trial) -> bool:
        return all(trial.get(name) == value for name, value in ignored.items())

    trial_plan = plan(config, known_suspects(config, config))
    return [suspect.name for suspect in culprits(trial_plan, [agrees(trial) for trial in trial_plan.configs])]


@pytest.mark.parametrize(
    ("name", "value"), [("hidden_act", "silu"), ("norm_topk_prob", True), ("partial_rotary_factor", 1.0)]
)
def test_single_culprit_is_convicted(name, value) -> None:
    assert disagreeing(CONFIG, {name: value}) == [name]


def test_rope_type_is_convicted() -> None:
    plain = {"rope_type": "default", "rope_theta": 5e5}
    assert disagreeing(CONFIG, {"rope_parameters": plain}) == ["rope_parameters.rope_type"]


def test_several_culprits_are_convicted() -> None:
    assert disagreeing(CONFIG, {"hidden_act": "silu", "norm_topk_prob": True}) == ["hidden_act", "norm_topk_prob"]


def test_unexplained_difference_convicts_nothing() -> None:
    assert disagreeing(CONFIG, {"model_type": "something else"}) == []
    assert disagreeing(tiny_config("qwen3"), {"x": 1}) == []


def test_other_suspects_differ_from_the_default() -> None:
    config = CONFIG | {"swiglu_limit": 7.0, "vocab_size": 99}
    default = tiny_config("llama") | {"swiglu_limit": None, "vocab_size": 32000}
    remaining = other_suspects(config, default, known_suspects(config, config))
    assert [(suspect.name, suspect.plain) for suspect in remaining] == [("swiglu_limit", None)]


def test_advice_limits_length_if_short_samples_agree() -> None:
    assert "batching.max_length: 4096" in advice(["rope_scaling.rope_type"], 4096, True)
    assert "max_length" not in advice(["rope_scaling.rope_type"], 4096, False)
    assert "max_length" not in advice(["hidden_act"], 4096, True)
