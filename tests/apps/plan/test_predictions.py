"""Predictions of scripts/bench.py plan: their errors, the order of layouts, and what docs/planning.md stores of them."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest

from bench import plan


@pytest.fixture(scope="module")
def measured() -> list[Any]:
    return plan.measured()


@pytest.fixture(scope="module")
def published() -> list[Any]:
    return plan.published()


def test_measured_steps_are_predicted(measured: list[Any]) -> None:
    summary = plan.summary(measured)
    assert summary["rows"] >= 40
    assert summary["median"] <= 0.08
    assert summary["memory_rows"] >= 15
    assert summary["memory"] <= 0.05


def test_published_rows_are_predicted(published: list[Any]) -> None:
    assert len([row for row in published if "H100" in row.name]) >= 25
    assert plan.summary(published)["median"] <= 0.20
    assert all(row.source for row in published)


def test_order_is_right_where_measurements_differ(measured: list[Any]) -> None:
    rows = [row for row in measured if "LoRA" not in row.name and "graphs" not in row.name]
    compared = 0
    for first, second in combinations(rows, 2):
        same_model = (
            first.name.split(" tokens")[0].rsplit(", ", 1)[0] == second.name.split(" tokens")[0].rsplit(", ", 1)[0]
        )
        if same_model and first.tokens == second.tokens and abs(first.seconds / second.seconds - 1) > 0.05:
            compared += 1
            assert (first.seconds < second.seconds) == (first.time.seconds < second.time.seconds), (
                first.name,
                second.name,
            )
    assert compared >= 4


def test_stored_predictions_are_those_of_the_code(measured: list[Any], published: list[Any]) -> None:
    # Of another processor, the last digit may differ.
    stored = json.loads(plan.STORED.read_text(encoding="utf-8"))
    for kind, rows in (("measured", measured), ("published", published)):
        current = plan.stored(rows)["rows"]
        assert [row["name"] for row in current] == [row["name"] for row in stored[kind]["rows"]]
        for row, stored_row in zip(current, stored[kind]["rows"], strict=True):
            assert row["predicted"] == pytest.approx(stored_row["predicted"], abs=2e-4), (
                "run scripts/bench.py plan --store"
            )
