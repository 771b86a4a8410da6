from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megascend import DataError, Sample


def test_causal_shifts_by_one_and_gives_the_prompt_no_weight():
    sample = Sample.causal([10, 11, 12, 13, 14], prompt_length=2)
    assert sample.input_ids.tolist() == [10, 11, 12, 13]
    assert sample.target_ids.tolist() == [11, 12, 13, 14]
    assert sample.weights.tolist() == [0.0, 1.0, 1.0, 1.0]  # token 11 belongs to the prompt
    assert (sample.input_ids.dtype, sample.weights.dtype) == (torch.int64, torch.float32)


def test_values_that_are_not_finite_are_0_where_a_target_has_no_weight():
    nan, infinite = float("nan"), float("inf")
    sample = Sample([1, 2, 3], [2, 3, 4], [0, 1, 0], old_logprobs=[-infinite, -1.0, nan], extra={"p": [nan, 2.0, 3.0]})
    assert sample.old_logprobs.tolist() == [0.0, -1.0, 0.0]
    assert sample.extra["p"].tolist() == [0.0, 2.0, 3.0]


def test_causal_sample_carries_adapter_and_pair():
    sample = Sample.causal([1, 2, 3], adapter="alice", pair=7, chosen=False)
    assert (sample.adapter, sample.pair, sample.chosen) == ("alice", 7, False)
    assert Sample.causal([1, 2]).adapter is None
    with pytest.raises(TypeError):
        Sample.causal([1, 2], 0, None, "alice")  # by name alone


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sample.causal([1]), "at least 2 tokens, got 1"),
        (lambda: Sample.causal([1, 2], prompt_length=2), r"prompt_length must be in \[0, 2\), got 2"),
        (lambda: Sample([1, 2], [1], [1.0, 1.0]), "one length"),
        (lambda: Sample([], [], []), "at least one token"),
        (lambda: Sample([1, 2], [2, 3], [1.0, float("nan")]), r"weights\[1\] is nan"),
        (lambda: Sample([1, 2], [2, 3], [1, 1], advantages=[0.0, float("inf")]), r"advantages\[1\] is inf"),
        (lambda: Sample([1.5], [1], [1]), "input_ids must hold integers"),
        (lambda: Sample([[1, 2]], [1], [1]), r"one-dimensional, got shape \(1, 2\)"),
        (lambda: Sample(["a"], [1], [1]), "cannot become a tensor"),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_refused(make, message):
    with pytest.raises(DataError, match=message):
        make()


@pytest.mark.parametrize("value", [3, np.int64(3), torch.tensor(3), np.array(3)])
def test_label_may_be_a_scalar_of_numpy_or_torch(value: Any) -> None:
    label = Sample.scored([1, 2], label=value).label
    assert (type(label), label) == (int, 3)


@pytest.mark.parametrize("value", [[0.5, 1.0, 2.0], torch.tensor([0.5, 1.0, 2.0]), np.array([0.5, 1.0, 2.0])])
def test_label_of_floats_has_a_length_of_its_own(value: Any) -> None:
    sample = replace(Sample.scored([1, 2], label=value), adapter="a")
    assert torch.equal(sample.label, torch.tensor([0.5, 1.0, 2.0]))
    assert "label" not in sample.token_fields()
    assert "label" in sample.loss_fields


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), torch.tensor(0.5)])
def test_label_that_is_one_float_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match=r"label is 0\.5; it must be an integer, or a list of floats"):
        Sample.scored([1, 2], label=value)
