"""Section ``recipes``: the four recipes of cookbook/ascend, through scripts/npu/smoke.sh."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from megascend.runtime.distributed.launch import child_environment
from npu_acceptance.plan import Settings, largest_power_of_two
from npu_acceptance.records import Measurement, Results, failed, noted

SCRIPT = Path("scripts") / "npu" / "smoke.sh"
RECIPES = ("tp_npu", "tp_moe_npu", "tp_moe_cp_npu", "multi_lora_npu")
RECIPE_S = 580
"""Seconds that one recipe may take."""
COLUMNS = ("layout", "first loss", "last loss", "gradient norm", "median ms", "seconds", "verdict")


def run(settings: Settings, results: Results) -> None:
    """Record for each recipe its verdict (the loss fell) with the first and last loss."""
    recipes = RECIPES[:1] if settings.quick else RECIPES
    # A simulated device, if any, already surrounds this section: the script need not start it.
    command = ["bash", str(SCRIPT), *recipes]
    variables = {
        "MEGASCEND_RUN": str(settings.folder / "recipes"),
        "NPROC": str(largest_power_of_two(settings.cards)),
        "PYTHON": sys.executable,
    }
    variables["MEGASCEND_SMOKE_DEADLINE"] = str(RECIPE_S * (2 if settings.simulated else 1))
    with subprocess.Popen(
        command,
        env=child_environment() | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            for measurement in parse_row(line):
                results.add(measurement)
    for recipe in recipes:
        if recipe not in results.names:
            results.add(failed(recipe, f"no row in the table of {SCRIPT.name}"))


def parse_row(line: str) -> list[Measurement]:
    """Return the measurements of a row of the script's table; of any other line, none."""
    cells = re.split(r"\s{2,}", line.strip())
    if cells[0] not in RECIPES or len(cells) != 1 + len(COLUMNS):
        return []
    recipe, layout, first, last, norm, milliseconds, _, verdict = cells
    if verdict != "OK":
        return [failed(recipe, f"{verdict}; first loss {first}, last loss {last}")]
    fell = float(last) < float(first)
    note = f"{layout}, gradient norm {norm}"
    return [
        Measurement(recipe, "ok" if fell else "failed", float(last), float(first), "last loss, under the first", note),
        noted(f"{recipe}, median step", float(milliseconds), "ms"),
    ]
