"""Which setting is named when two sides disagree: decided by what a made-up side ignores."""

from __future__ import annotations

import pytest

from megascend.selfcheck.suspects import advice, culprits, known_suspects, other_suspects, plan
from megascend.testing import tiny_config

CONFIG = tiny_config(
    "llama",
    hidden_act="gelu",
    norm_topk_prob=False,
    partial_rotary_factor=0.5,
    rope_parameters={"rope_type": "longrope", "rope_theta": 5e5, "short_factor": [1.0]},
)


def found(config, ignored: dict[str, object]) -> list[str]:
    """Names of the settings convicted where one side computes with the values of ``ignored`` whatever is set."""

    def agrees(trial) -> bool:
        return all(trial.get(name) == value for name, value in ignored.items())

    planned = plan(config, known_suspects(config, config))
    return [each.name for each in culprits(planned, [agrees(trial) for trial in planned.configs])]


@pytest.mark.parametrize(
    ("name", "value"), [("hidden_act", "silu"), ("norm_topk_prob", True), ("partial_rotary_factor", 1.0)]
)
def test_one_setting_is_named(name, value) -> None:
    assert found(CONFIG, {name: value}) == [name]


def test_rope_is_named_with_its_kind() -> None:
    plain = {"rope_type": "default", "rope_theta": 5e5}
    assert found(CONFIG, {"rope_parameters": plain}) == ["rope_parameters.rope_type"]


def test_several_at_once_are_named_together() -> None:
    assert found(CONFIG, {"hidden_act": "silu", "norm_topk_prob": True}) == ["hidden_act", "norm_topk_prob"]


def test_what_no_setting_explains_is_blamed_on_none() -> None:
    assert found(CONFIG, {"model_type": "something else"}) == []
    assert found(tiny_config("qwen3"), {"x": 1}) == []


def test_settings_that_nobody_thought_of_are_tried_against_the_architectures_default() -> None:
    config = CONFIG | {"swiglu_limit": 7.0, "vocab_size": 99}
    default = tiny_config("llama") | {"swiglu_limit": None, "vocab_size": 32000}
    others = other_suspects(config, default, known_suspects(config, config))
    assert [(each.name, each.plain) for each in others] == [("swiglu_limit", None)]


def test_advice_for_samples_that_are_right() -> None:
    assert "batching.max_length: 4096" in advice(["rope_scaling.rope_type"], 4096, True)
    assert "max_length" not in advice(["rope_scaling.rope_type"], 4096, False)
    assert "max_length" not in advice(["hidden_act"], 4096, True)
