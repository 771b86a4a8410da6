"""Predictions of scripts/bench.py plan: their errors, the order of layouts, and what docs/planning.md stores of them."""

from __future__ import annotations

import importlib.util
import json
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench.py plan"


@pytest.fixture(scope="module")
def bench() -> Any:
    specification = importlib.util.spec_from_file_location("bench_plan", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["bench_plan"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measured(bench: Any) -> list[Any]:
    return bench.measured()


@pytest.fixture(scope="module")
def published(bench: Any) -> list[Any]:
    return bench.published()


def test_measured_steps_are_predicted(bench: Any, measured: list[Any]) -> None:
    summary = bench.summary(measured)
    assert summary["rows"] >= 40
    assert summary["median"] <= 0.08
    assert summary["memory_rows"] >= 15
    assert summary["memory"] <= 0.05


def test_published_rows_are_predicted(bench: Any, published: list[Any]) -> None:
    assert len([row for row in published if "H100" in row.name]) >= 25
    assert bench.summary(published)["median"] <= 0.20
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


def test_stored_predictions_are_those_of_the_code(bench: Any, measured: list[Any], published: list[Any]) -> None:
    # Of another processor, the last digit may differ.
    stored = json.loads(bench.STORED.read_text(encoding="utf-8"))
    for kind, rows in (("measured", measured), ("published", published)):
        current = bench.stored(rows)["rows"]
        assert [row["name"] for row in current] == [row["name"] for row in stored[kind]["rows"]]
        for row, stored_row in zip(current, stored[kind]["rows"], strict=True):
            assert row["predicted"] == pytest.approx(stored_row["predicted"], abs=2e-4), (
                "run scripts/bench.py plan --store"
            )
