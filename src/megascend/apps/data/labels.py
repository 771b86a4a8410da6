"""Labels of sequence classifiers: conversion of a column of the data to a loss's targets, and remarks on their distribution."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from megascend.apps.data.messages import LARGEST_NUMBER, decoded
from megascend.config.data import ProblemType, default_labels
from megascend.errors import DataError

if TYPE_CHECKING:
    import numpy as np

LIST_LIMIT = 12
"""Most labels that are listed in a message."""


class LabelName(str):
    """Name of a class label of datasets.

    Attributes:
        number: its id there.
    """

    number: int


def label_name(feature: Any, value: Any) -> Any:
    """Return the name of a value of datasets' ``ClassLabel``, which is an id or a name; -1 (no label) stays as it is."""
    try:
        is_id = not isinstance(value, str) or (value.endswith(".0") and value not in feature.names)  # floats of tables
        number = int(float(value)) if is_id else feature.str2int(value)
        if is_id and number != float(value):
            raise ValueError
        if number == -1:
            return -1
        name = LabelName(feature.int2str(number))
    except (TypeError, ValueError):
        raise DataError(f"the class labels are {_abbreviated(feature.names)}, found {value!r:.60}") from None
    name.number = number
    return name


@dataclass(frozen=True)
class LabelSet:
    """Labels of a classifier, in the order of their ids, and transformers' name for what a label is."""

    names: tuple[str, ...]
    problem_type: ProblemType

    def parse(self, value: Any) -> int | list[float]:
        """Return the label of a sample: the id of one label, or a number for each of them.

        Raises:
            DataError: the value is no label; the message does not name its source.
        """
        if self.problem_type == "regression":
            return self._numbers(value)
        if self.problem_type == "single_label_classification":
            if isinstance(value, list):
                raise DataError(
                    f"'label' must be one label, found {value!r:.60}; for several of a sample set classification.problem_type: "
                    "multi_label_classification"
                )
            return self._id(value)
        # In tables a list is JSON text.
        values = decoded(value)
        if not isinstance(values, list):
            raise DataError(
                f"'label' must be a list of labels, found {value!r:.60}; for one label a sample leave "
                "classification.problem_type out"
            )
        return self._indicators(values)

    def _id(self, value: Any) -> int:
        """Return the id of a label, which is an integer or one of the names."""
        if isinstance(value, str) and value in self.names:
            return self.names.index(value)
        number = value
        if isinstance(value, LabelName):
            # By its id only where the run file names no labels, or neither does datasets (ClassLabel(num_classes=...)).
            if self.names != default_labels(len(self.names)) and value != str(value.number):
                raise DataError(self._unknown(value))
            number = value.number
        elif isinstance(value, str):  # as CSV has numbers
            try:
                number = int(value)
            except ValueError:
                raise DataError(self._unknown(value)) from None
        if isinstance(number, float) and number.is_integer():  # tables store integers as floats if some are missing
            number = int(number)
        if type(number) is not int or not 0 <= number < len(self.names):
            hint = "; some data sets mark samples without a label so: remove them" if number == -1 else ""
            raise DataError(f"'label' must be {self._description}, found {value!r:.60}{hint}")
        if str(number) in self.names and self.names.index(str(number)) != number:
            # A string is a name; an integer could be meant as either.
            raise DataError(
                f"'label' is the integer {number}, which is the id of {self.names[number]!r} and the name of id "
                f"{self.names.index(str(number))}: write names as strings"
            )
        return number

    def _indicators(self, values: list[Any]) -> list[float]:
        """Encode a list of labels as zeros and ones; return a list of as many zeros and ones unchanged."""
        count = len(self.names)
        binary = all(isinstance(value, bool | int | float) and value in (0, 1) for value in values)
        if len(values) == count and binary:
            integers = all(type(value) is int for value in values)
            if integers and len({*values}) == count:  # [0, 1] of two labels, [0] of one
                raise DataError(
                    f"'label' is {values!r:.60}, which may be ids or a number for each label: write names, or true and false for "
                    "each label"
                )
            return [float(value) for value in values]
        if any(isinstance(value, float) for value in values):
            raise DataError(
                f"'label' must be a list of {self._description}, or 0 or 1 for each of the {count} labels, found {values!r:.60}"
            )
        ids = [self._id(value) for value in values]
        if len({*ids}) < len(ids):
            raise DataError(f"'label' has a label twice, found {values!r:.60}")
        return [float(label in ids) for label in range(count)]

    def _numbers(self, value: Any) -> list[float]:
        """Return the numbers of a regression."""
        count, column = len(self.names), decoded(value)
        if isinstance(column, str):  # as CSV has numbers
            with contextlib.suppress(ValueError):
                column = json.loads(column)
        values: list[Any] = column if isinstance(column, list) else [column]
        if len(values) != count or not all(
            # False for NaN too; an integer may be too large to become a float.
            type(number) in (int, float) and abs(number) <= LARGEST_NUMBER
            for number in values
        ):
            expected = "a finite number" if count == 1 else f"{count} finite numbers"
            raise DataError(f"'label' must be {expected} (of float32), found {value!r:.60}")
        return [float(number) for number in values]

    @property
    def _description(self) -> str:
        return f"an integer in [0, {len(self.names)}) or one of {_abbreviated(self.names)}"

    def _unknown(self, name: str) -> str:
        similar = get_close_matches(name, self.names, 1)
        advice = f"; did you mean {similar[0]!r}?" if similar else ""
        return f"'label' must be {self._description} (classification.labels), found {name!r:.60}{advice}"

    def describe(self, label: Any) -> str:
        """Return the label of a sample as text, or that of a row of a store."""
        if isinstance(label, int):
            return self.names[label]
        values = [float(value) for value in label]
        if self.problem_type == "single_label_classification":
            return self.names[int(values[0])]
        if self.problem_type == "regression":
            return ", ".join(f"{value:g}" for value in values)
        return ", ".join(name for name, value in zip(self.names, values, strict=True) if value) or "no label"

    def remarks(self, labels: np.ndarray, subject: str) -> list[str]:
        """Return how often each label occurs, and warnings of labels that nothing can be learned about.

        ``labels``: float32 [samples, 1], ids; or [samples, labels], a number for each.
        """
        total = len(labels)
        if self.problem_type == "regression":
            low, high = labels.min(0), labels.max(0)
            same = [
                name for name, first, last in zip(self.names, low, high, strict=True) if first == last and total > 1
            ]
            ranges = [f"{first:g} to {last:g}" for first, last in zip(low, high, strict=True)]
            lines = [f"labels of the {subject}: {_abbreviated(ranges)}"]
            return lines + (
                [f"warning: all labels of the {subject} are the same: {_abbreviated(same)}"] if same else []
            )
        single = self.problem_type == "single_label_classification"
        ids = labels[:, 0].astype("int64")
        columns = [ids == number for number in range(len(self.names))] if single else labels.T
        by_name = {name: int(column.sum()) for name, column in zip(self.names, columns, strict=True)}
        lines = [f"labels of the {subject}: {_abbreviated([f'{name} {count:,}' for name, count in by_name.items()])}"]
        # One sample has the same label as all.
        if total > 1 and (constant := [name for name, count in by_name.items() if count == total]):
            lines.append(
                f"warning: all {total:,} {subject} have {_abbreviated(constant)}: there is nothing to tell apart"
            )
        if absent := [name for name, count in by_name.items() if not count]:
            lines.append(f"warning: none of the {subject} has {_abbreviated(absent)}")
        return lines


def _abbreviated(values: Sequence[str]) -> str:
    suffix = f" and {len(values) - LIST_LIMIT} more" if len(values) > LIST_LIMIT else ""
    return f"{', '.join(values[:LIST_LIMIT])}{suffix}"
