"""The cases that stand for a matrix have every setting of it."""

from __future__ import annotations

from covering import COMBINED, covering, settings_of
from megascend.testing.lora_parity import lora_matrix
from megascend.testing.parity import matrix


def test_every_setting_is_there():
    for cases in (matrix(), lora_matrix()):
        chosen = covering(cases, settings_of)
        assert len(chosen) <= len(cases) * 0.4
        lacking = set().union(*(settings_of(case).items() for case in cases))
        assert lacking - set().union(*(settings_of(case).items() for case in chosen)) == set()
    assert {case.name for case in matrix()} >= {*COMBINED}


def test_one_that_has_both_stands_for_each_and_the_plain_one_for_nothing():
    cases = [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {"a": 2}, {"c": 1}]
    assert covering(cases, lambda case: case) == [{"a": 1, "b": 1}, {"a": 2}, {"c": 1}]


def test_the_plain_case_has_no_settings_and_others_have_theirs():
    named = {case.name: settings_of(case) for case in matrix()}
    assert named["single"] == {}
    assert named["TP2 x DP2, distributed optimizer"] == {"parallel.tensor": 2, "data": 2}
    assert named["MoE EP2, plain optimizer"] == {
        "parallel.expert": 2,
        "data": 2,
        "arch": "'qwen3_moe'",
        "optimizer.distributed": False,
    }
