"""The cases that stand for a matrix have every setting of it, and every two that occur together."""

from __future__ import annotations

import itertools

from covering import covering, settings_of
from megascend.testing.lora_parity import lora_matrix
from megascend.testing.parity import matrix


def parts(settings):
    return {*settings.items(), *itertools.combinations(sorted(settings.items(), key=str), 2)}


def test_every_setting_and_every_two_are_there():
    for cases in (matrix(), lora_matrix()):
        chosen = covering(cases, settings_of)
        assert len(chosen) <= len(cases) * 0.6
        lacking = set().union(*(parts(settings_of(case)) for case in cases))
        assert lacking - set().union(*(parts(settings_of(case)) for case in chosen)) == set()


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


def test_without_pairs_every_setting_is_there_once():
    cases = [{"a": 1}, {"a": 1, "b": 1}, {"b": 1, "c": 1}, {"a": 2, "c": 1}]
    assert covering(cases, lambda case: case, pairs=False) == [{"a": 1, "b": 1}, {"a": 2, "c": 1}]
