"""The scripts of twinkle's cookbook for Megatron, unmodified, on two ranks of the CPU. MEGASCEND_TWINKLE: a checkout."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("twinkle.model", reason="no twinkle here: bash scripts/test_integrations.sh twinkle")

from safetensors.torch import load_file
from twinkle_runs import launched, run

CHECKOUT = os.environ.get("MEGASCEND_TWINKLE")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.torchrun,
    pytest.mark.skipif(CHECKOUT is None, reason="MEGASCEND_TWINKLE names no checkout of twinkle"),
]


@pytest.mark.parametrize(
    ("script", "arch", "layout"),
    [
        ("tp.py", "qwen3", ["--dp-size", "1", "--tp-size", "2"]),
        ("tp_moe.py", "qwen3_moe", ["--dp-size", "2", "--ep-size", "2"]),
    ],
)
def test_a_script_trains_evaluates_and_saves(tmp_path: Path, script: str, arch: str, layout: list[str]) -> None:
    shape = ["--arch", arch, "--hidden", "64", "--layers", "2"]
    run(
        [sys.executable, "-m", "megascend.apps.cli.main", "new-model", "model", *shape], tmp_path
    )  # with a chat template
    rows = [{"query": f"Who are you, {n}?", "response": "I am {{NAME}} of {{AUTHOR}}.", "tag": "en"} for n in range(64)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        *(
            "--model-id",
            str(tmp_path / "model"),
            "--dataset-id",
            str(tmp_path / "data.jsonl"),
            "--template-cls",
            "Template",
        ),
        *("--train-samples", "64", "--eval-samples", "16", "--batch-size", "8", "--lr", "1e-3", "--log-interval", "1"),
        *("--eval-interval", "4", "--output-dir", str(tmp_path / "out"), *layout),
    ]
    output = run(launched(2, f"{CHECKOUT}/cookbook/megatron/{script}", *settings), tmp_path)
    losses = [float(value) for value in re.findall(r"Current is step \d+ of 8, metric: \{'loss': '([\d.]+)'", output)]
    assert len(losses) >= 8
    assert losses[-1] < losses[0]
    (last,) = tmp_path.rglob("last-checkpoint")
    if script == "tp_moe.py":  # saves the whole model, with the adapter merged
        base, merged = load_file(tmp_path / "model" / "model.safetensors"), load_file(last / "model.safetensors")
        assert merged.keys() == base.keys()
        changed = {name for name in base if (base[name] - merged[name].float()).abs().max() > 1e-2}
        assert {name.split(".")[-2] for name in changed} >= {"q_proj", "o_proj", "gate_proj", "down_proj"}
