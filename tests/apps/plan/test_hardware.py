"""Devices: interpolation of measured shares, products, attention, and collectives by size and link."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from apps.plan.devices import BYTES, PEAK, RATE, flat
from megascend.apps.plan.hardware import (
    BACKWARD_ATTENTION,
    Measurements,
    Table,
    calibrated,
    load,
)
from megascend.errors import ConfigError


def test_table_interpolates_between_logarithms() -> None:
    table = Table({(1, 1): 0.2, (4, 1): 0.4, (1, 16): 0.6, (4, 16): 0.8})
    assert table(1, 1) == 0.2
    assert table(2, 1) == pytest.approx(0.3)  # half way between 1 and 4
    assert table(2, 4) == pytest.approx(0.5)
    assert table(100, 0.1) == 0.4  # outside the grid its border holds


@pytest.mark.parametrize("first", [(4, 1), (16, 1)])
def test_hole_takes_a_measured_value_whichever_is_asked_for_first(first: tuple[int, int]) -> None:
    table = Table({(1, 1): 0.2, (64, 2): 0.8, (4, 10**6): 0.5, (16, 10**6): 0.5})
    table(*first)
    # (16, 1) is nearer to the hole (4, 1), which has the value of (1, 1), than to any measured point.
    assert (table(4, 1), table(16, 1)) == (0.2, 0.8)


def test_product_takes_its_flops_or_at_least_its_bytes() -> None:
    device = flat()
    assert device.product(4096, 2048, 1024, "forward") == pytest.approx(2 * 4096 * 2048 * 1024 / RATE)
    # One token: the weight has to be read.
    moved = 2 * (2048 + 2048 * 1024 + 1024)
    assert device.product(1, 2048, 1024, "forward") == pytest.approx(moved / BYTES)


def test_attention_is_causal() -> None:
    # Two products of all pairs of tokens are 4 L^2 w, of which half are masked.
    forward = 2 * 4096**2 * 1024 / RATE
    assert flat().attention(8192, 4096, 1024, 128, backward=False) == pytest.approx(2 * forward)
    assert flat().attention(8192, 4096, 1024, 128, backward=True) == pytest.approx(2 * forward * BACKWARD_ATTENTION)


@pytest.mark.parametrize(
    ("kind", "ranks", "seconds"),
    [
        # In a node of four: latency of 1 us for each doubling, and three quarters of the bytes over the rank's link.
        ("all_gather", [0, 1, 2, 3], 2e-6 + 0.75 * 1e9 / 100e9),
        ("all_reduce", [0, 1, 2, 3], 2e-6 + 2 * 0.75 * 1e9 / 100e9),
        ("reduce_scatter", [0, 1], 1e-6 + 0.5 * 1e9 / 100e9),
        ("send", [0, 1], 1e-6 + 1e9 / 100e9),
        # Two nodes with four members each use four network cards: 40 GB/s.
        ("all_gather", list(range(8)), 2e-6 + 5e-6 + 7 / 8 * 1e9 / 40e9),
        # One member in each node: its own card.
        ("all_gather", [0, 4], 1e-6 + 5e-6 + 0.5 * 1e9 / 10e9),
        ("send", [3, 4], 5e-6 + 1e9 / 10e9),
        # Half of the rows leave the node.
        ("all_to_all", list(range(8)), 5e-6 + 0.5 * 1e9 / 10e9),
        ("all_to_all", [0, 1, 2, 3], 1e-6 + 0.75 * 1e9 / 100e9),
        ("all_reduce", [5], 0.0),
    ],
)
def test_collectives_by_hand(kind: str, ranks: list[int], seconds: float) -> None:
    assert flat().collective(kind, 1e9, ranks) == pytest.approx(seconds)


def test_unknown_device_is_refused_with_the_known_ones() -> None:
    assert load("H100").name == "h100"
    with pytest.raises(ConfigError, match=r"--device h101: no device of this name is described; known: .*h100"):
        load("h101")


def test_calibration_replaces_the_measurements(tmp_path: Path) -> None:
    tables = {
        "format": 1,
        "device": "mine",
        "products": [[1, 1, 1, 1.0, 1.0, 1.0]],
        "grouped": [[1, 1, 1, 1, 1.0, 1.0, 1.0]],
        "attention": [[1, 1, 1, 1, 1, 1.0, 1.0]],
        "element-wise": [[1, 1.0]],
        "memory": 10**9,
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(tables))
    device = calibrated(load("ascend-910b"), path)
    assert (device.measured, device.warning, device.memory) == (True, None, 10**9)
    assert Measurements.from_calibration(tables, PEAK, BYTES).products["forward"](5, 5, 5) == pytest.approx(2e6 / PEAK)
    for us in (0.0, -1.0, math.nan):
        path.write_text(json.dumps(tables | {"element-wise": [[1, us]]}))
        with pytest.raises(ConfigError, match=f"has a time of {us} us: measure again"):
            calibrated(load("ascend-910b"), path)
