"""Labels of classifiers: what each kind of column means, what is refused, and what is said about their distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megascend.apps.data.labels import LabelSet
from megascend.errors import DataError

NAMES = ("bad", "fair", "good")
SINGLE = LabelSet(NAMES, "single_label_classification")
MULTI = LabelSet(NAMES, "multi_label_classification")
PAIR = LabelSet(("no", "yes"), "multi_label_classification")
STARS = LabelSet(("1", "2", "3"), "single_label_classification")
IDENTITY = LabelSet(("0", "1", "2"), "single_label_classification")
NUMBER = LabelSet(("LABEL_0",), "regression")
NUMBERS = LabelSet(NAMES, "regression")


@pytest.mark.parametrize(
    ("labels", "value", "expected"),
    [
        (SINGLE, 0, 0),
        (SINGLE, "good", 2),
        (SINGLE, "1", 1),
        (SINGLE, 2.0, 2),
        (STARS, "1", 0),
        (IDENTITY, 1, 1),
        (IDENTITY, "1", 1),
        (MULTI, [], [0, 0, 0]),
        (MULTI, ["good", 0], [1, 0, 1]),
        (MULTI, '["fair"]', [0, 1, 0]),
        (MULTI, [2, 0, 1], [1, 1, 1]),
        (MULTI, [0, 1, 1], [0, 1, 1]),
        (MULTI, [0.0, 1.0, 0.0], [0, 1, 0]),
        (MULTI, [True, False, True], [1, 0, 1]),
        (PAIR, [1, 1], [1, 1]),
        (PAIR, [False, True], [0, 1]),
        (PAIR, [1], [0, 1]),
        (NUMBER, 3, [3]),
        (NUMBER, "0.5", [0.5]),
        (NUMBERS, [1, 2.5, -1], [1, 2.5, -1]),
        (NUMBERS, "[1, 2, 3]", [1, 2, 3]),
    ],
)
def test_label_is_an_id_or_a_number_for_each(labels: LabelSet, value: Any, expected: int | list[float]) -> None:
    assert labels.parse(value) == expected


@pytest.mark.parametrize(
    ("labels", "value", "message"),
    [
        (SINGLE, 3, r"an integer in \[0, 3\) or one of bad, fair, good, found 3"),
        (SINGLE, -1, "found -1; some data sets mark samples without a label so"),
        (SINGLE, 1.5, "found 1.5"),
        (SINGLE, float("nan"), "found nan"),
        (SINGLE, True, "found True"),
        (SINGLE, "Good", "found 'Good'; did you mean 'good'"),
        (SINGLE, "", "found ''"),
        (SINGLE, ["bad"], "must be one label, found .* set classification.problem_type: multi_label_classification"),
        (SINGLE, {"id": 1}, "found {'id': 1}"),
        (STARS, 1, "the integer 1, which is the id of '2' and the name of id 0: write names as strings"),
        (MULTI, "good", "must be a list of labels, found 'good'"),
        (MULTI, 1, "must be a list of labels, found 1"),
        (MULTI, [3], "found 3"),
        (MULTI, ["bad", 0], "has a label twice"),
        (MULTI, [0.5, 0.0, 1.0], "or 0 or 1 for each of the 3 labels"),
        (MULTI, [True, False], "found True"),
        (MULTI, [None], "found None"),
        (PAIR, [0, 1], "which may be ids or a number for each label"),
        (NUMBER, True, "must be a finite number"),
        (NUMBER, "high", "must be a finite number"),
        (NUMBER, float("inf"), "must be a finite number"),
        (NUMBER, 1e39, "must be a finite number"),
        (NUMBER, 10**400, "must be a finite number"),
        (NUMBER, [1, 2], "must be a finite number"),
        (NUMBERS, 1, "must be 3 finite numbers"),
        (NUMBERS, [1, 2, None], "must be 3 finite numbers"),
    ],
)
def test_other_values_are_refused_by_name(labels: LabelSet, value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        labels.parse(value)


@pytest.mark.parametrize(
    ("labels", "column", "expected"),
    [
        (
            SINGLE,
            [[0], [2], [0]],
            ["labels of the samples: bad 2, fair 0, good 1", "warning: none of the samples has fair"],
        ),
        (
            SINGLE,
            [[1], [1]],
            ["", "warning: all 2 samples have fair: there is nothing to tell apart", "warning: none of"],
        ),
        (
            MULTI,
            [[1, 0, 1], [1, 1, 0]],
            ["labels of the samples: bad 2, fair 1, good 1", "warning: all 2 samples have bad: "],
        ),
        (NUMBER, [[0.5], [2]], ["labels of the samples: 0.5 to 2"]),
        (NUMBER, [[1], [1]], ["", "warning: all labels of the samples are the same"]),
    ],
)
def test_remarks_name_labels_that_cannot_be_learned(labels: LabelSet, column: Any, expected: list[str]) -> None:
    remarks = labels.remarks(np.asarray(column, dtype=np.float32), "samples")
    assert len(remarks) == len(expected)
    for remark, beginning in zip(remarks, expected, strict=True):
        assert remark.startswith(beginning)
