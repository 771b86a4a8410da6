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
from npu_acceptance.recipes import of_row
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
    ("found", "verdict"),
    [(0.5, "ok"), (1.0, "ok"), (1.01, "failed"), (math.nan, "failed"), (math.inf, "failed"), (-1.0, "ok")],
)
def test_what_is_not_finite_is_over_every_bound(found: float, verdict: str) -> None:
    assert at_most("error", found, 1.0).verdict == verdict


def test_results_survive_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    results = Results(tmp_path / "section.jsonl")
    results.extend([at_most("a", 1.0, 2.0), equal("b", [1], [2]), left_out("c", "no card"), noted("d", math.inf)])
    with results.path.open("a") as file:
        file.write('{"name": "e", "verd')
    found = read_results(results.path)
    assert [(each.name, each.verdict) for each in found] == [
        ("a", "ok"), ("b", "failed"), ("c", "left out"), ("d", "noted"),
    ]  # fmt: skip
    assert found[1] == Measurement("b", "failed", "[1]", "[2]")
    assert found[3].found == "inf"  # which JSON knows no number for
    assert read_results(tmp_path / "none.jsonl") == ()


def section(name: str, verdict: str, *measurements: Measurement, problem: str = "") -> SectionResult:
    return SectionResult(name, verdict, 3.2, 60, measurements, problem)  # type: ignore[arg-type]


def test_the_summary_says_what_failed_by_name_and_ends_with_a_verdict() -> None:
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


def test_sections_come_in_their_order_and_unknown_ones_are_named() -> None:
    assert [each.name for each in plan.chosen([])] == list(plan.NAMES)
    assert [each.name for each in plan.chosen(["speed", "doctor"])] == ["doctor", "speed"]
    with pytest.raises(ConfigError, match="no section spede; there are doctor, operators"):
        plan.chosen(["spede"])
    assert plan.too_few_cards(plan.SECTIONS[0].least_cards, 1) == ""
    (recipes,) = plan.chosen(["recipes"])
    assert plan.too_few_cards(recipes.least_cards, 1) == "needs 4 cards, and 1 takes part"


def test_cards_are_counted_from_what_the_shell_sees(tmp_path: Path) -> None:
    for name in ("davinci0", "davinci3", "davinci_manager"):
        (tmp_path / name).touch()
    assert count_cards({}, tmp_path) == 2
    assert count_cards({"ASCEND_RT_VISIBLE_DEVICES": "4,5,6"}, tmp_path) == 3
    assert count_cards({"ASCEND_RT_VISIBLE_DEVICES": ",".join(map(str, range(16)))}, tmp_path) == 8
    with pytest.raises(ConfigError, match="no card is to be seen"):
        count_cards({}, tmp_path / "nothing")
    with pytest.raises(ConfigError, match="--cards 9"):
        parse(["--cards", "9"])


def test_settings_travel_as_json(tmp_path: Path) -> None:
    settings = Settings(tmp_path, 4, simulated=True, quick=True)
    assert Settings.from_json(settings.to_json()) == settings


def test_layouts_have_bounds_for_cards_and_those_of_the_docs_when_simulated() -> None:
    simulated, cards = parity.cases(True, False), parity.cases(False, False)
    assert {case.name for case in simulated} == {*parity.FROM_MATRIX, *(case.name for case in parity.ON_EIGHT)}
    assert [case.world_size for case in simulated] == sorted(case.world_size for case in simulated)
    assert {case.world_size for case in simulated} == {1, 2, 4, 8}
    for here, there in zip(simulated, cards, strict=True):
        assert here.name == there.name
        assert here.loss_bound < there.loss_bound
        assert here.parallel == there.parallel
    assert [plan.largest_power_of_two(cards) for cards in range(1, 9)] == [1, 2, 2, 4, 4, 4, 4, 8]


def test_rows_of_the_recipes_table_are_read() -> None:
    row = "tp_npu          TP2 CP1 DP4 PP1                     5.7703     5.1563      1.975             201         80  OK"
    recipe, step = of_row(row)
    assert (recipe.verdict, recipe.found, recipe.bound) == ("ok", 5.1563, 5.7703)
    assert (step.name, step.found) == ("tp_npu, median step", 201.0)
    (bad,) = of_row(row.replace("  OK", "  FAILED (exit code 1)"))
    assert bad.verdict == "failed"
    assert "exit code 1" in bad.note
    assert of_row(row.replace("5.1563", "5.9"))[0].verdict == "failed"  # the loss rose
    assert of_row("device: cards") == []
    assert failed("x", "y").verdict == "failed"
