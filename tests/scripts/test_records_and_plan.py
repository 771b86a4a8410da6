"""Records, verdicts, the plan and the summary: plain data."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megascend.errors import ConfigError
from npu_acceptance import parity, plan
from npu_acceptance.__main__ import count_cards, parse
from npu_acceptance.plan import Settings
from npu_acceptance.recipes import parse_row
from npu_acceptance.records import (
    Measurement,
    Report,
    Results,
    SectionResult,
    at_most,
    equal,
    failed,
    left_out,
    noted,
    read_results,
)
from npu_acceptance.report import render


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(0.5, "ok"), (1.0, "ok"), (1.01, "failed"), (math.nan, "failed"), (math.inf, "failed"), (-1.0, "ok")],
)
def test_at_most_fails_above_the_bound_or_if_not_finite(value: float, verdict: str) -> None:
    assert at_most("error", value, 1.0).verdict == verdict


def test_read_results_skips_a_truncated_line(tmp_path: Path) -> None:
    results = Results(tmp_path / "section.jsonl")
    results.extend([at_most("a", 1.0, 2.0), equal("b", [1], [2]), left_out("c", "no card"), noted("d", math.inf)])
    with results.path.open("a") as file:
        file.write('{"name": "e", "verd')
    measurements = read_results(results.path)
    assert [(measurement.name, measurement.verdict) for measurement in measurements] == [
        ("a", "ok"), ("b", "failed"), ("c", "left out"), ("d", "noted"),
    ]  # fmt: skip
    assert measurements[1] == Measurement("b", "failed", "[1]", "[2]")
    assert measurements[3].found == "inf"  # JSON has no number for it
    assert read_results(tmp_path / "none.jsonl") == ()


def section(name: str, verdict: str, *measurements: Measurement, problem: str = "") -> SectionResult:
    return SectionResult(name, verdict, 3.2, 60, measurements, problem)  # type: ignore[arg-type]


def test_render_names_failures_and_ends_with_verdict() -> None:
    report = Report(
        {"simulated": True, "versions": {"torch": "2.7.1"}},
        (
            section("operators", "failed", at_most("swiglu, bf16", 0.4, 0.03), at_most("rms_norm, bf16", 0.01, 0.03)),
            section("collectives", "failed", problem="not done after 60 s"),
            section("parity", "ok", at_most("single, loss", 2e-6, 1e-5), left_out("TP2", "needs 2 cards")),
            section("speed", "ok", noted("median step", 12.5, "ms")),
        ),
    )
    text = render(report)
    for part in (
        "versions: torch 2.7.1",
        "FAILED    operators          3 s",
        "failed  swiglu, bf16: 0.4 (<= 0.03)",
        "not done after 60 s",
        "parity: left out, needs 2 cards: TP2",
        "nearest to its bound: single, loss: 2e-06 (<= 1e-05)",
        "speed: median step: 12.5 ms",
    ):
        assert part in text
    assert text.endswith("FAILED: operators, collectives")
    assert report.failed == ["operators", "collectives"]
    assert json.loads(report.to_json())["sections"][0]["measurements"][0]["verdict"] == "failed"
    good = Report({"simulated": True}, report.sections[2:])
    assert render(good).endswith("PASSED: parity, speed on the simulated device, which says nothing about cards")


def test_select_keeps_order_and_rejects_unknown_sections() -> None:
    assert [section.name for section in plan.select([])] == list(plan.NAMES)
    assert [section.name for section in plan.select(["speed", "doctor"])] == ["doctor", "speed"]
    with pytest.raises(ConfigError, match="unknown section spede; available: doctor, operators"):
        plan.select(["spede"])
    assert plan.too_few_cards(plan.SECTIONS[0].min_cards, 1) == ""
    (recipes,) = plan.select(["recipes"])
    assert plan.too_few_cards(recipes.min_cards, 1) == "needs 4 cards, and 1 takes part"


def test_count_cards_reads_devices_and_environment(tmp_path: Path) -> None:
    for name in ("davinci0", "davinci3", "davinci_manager"):
        (tmp_path / name).touch()
    assert count_cards({}, tmp_path) == 2
    assert count_cards({"ASCEND_RT_VISIBLE_DEVICES": "4,5,6"}, tmp_path) == 3
    assert count_cards({"ASCEND_RT_VISIBLE_DEVICES": ",".join(map(str, range(16)))}, tmp_path) == 8
    with pytest.raises(ConfigError, match="no card is visible"):
        count_cards({}, tmp_path / "nothing")
    with pytest.raises(ConfigError, match="--cards 9"):
        parse(["--cards", "9"])


def test_settings_round_trip_through_json(tmp_path: Path) -> None:
    settings = Settings(tmp_path, 4, simulated=True, quick=True)
    assert Settings.from_json(settings.to_json()) == settings


def test_parity_cases_have_wider_bounds_on_cards() -> None:
    simulated, cards = parity.cases(True, False), parity.cases(False, False)
    assert {case.name for case in simulated} == {*parity.FROM_MATRIX, *(case.name for case in parity.ON_EIGHT)}
    assert [case.world_size for case in simulated] == sorted(case.world_size for case in simulated)
    assert {case.world_size for case in simulated} == {1, 2, 4, 8}
    for simulated_case, card_case in zip(simulated, cards, strict=True):
        assert simulated_case.name == card_case.name
        assert simulated_case.loss_bound < card_case.loss_bound
        assert simulated_case.parallel == card_case.parallel
    assert [plan.largest_power_of_two(cards) for cards in range(1, 9)] == [1, 2, 2, 4, 4, 4, 4, 8]


def test_parse_row_reads_the_recipes_table() -> None:
    row = "tp_npu          TP2 CP1 DP4 PP1                     5.7703     5.1563      1.975             201         80  OK"
    recipe, step = parse_row(row)
    assert (recipe.verdict, recipe.found, recipe.bound) == ("ok", 5.1563, 5.7703)
    assert (step.name, step.found) == ("tp_npu, median step", 201.0)
    (bad,) = parse_row(row.replace("  OK", "  FAILED (exit code 1)"))
    assert bad.verdict == "failed"
    assert "exit code 1" in bad.note
    assert parse_row(row.replace("5.1563", "5.9"))[0].verdict == "failed"  # the loss rose
    assert parse_row("device: cards") == []
    assert failed("x", "y").verdict == "failed"
