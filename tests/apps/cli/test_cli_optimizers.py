"""``megascend train`` with the optimizers and schedules beside AdamW: real runs from a file, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.runs import chats, metrics, sets, write_lines, write_run

STEPS = 10
GROUPS = [{"match": "model.embed_tokens.*", "lr_scale": 0.1, "weight_decay": 0.0}, {"match": "*norm*", "lr_scale": 0.5}]
RUNS = {
    "Muon, wsd": {
        "optimizer": {"kind": "muon", "lr": 0.01, "groups": GROUPS},
        "schedule": {"kind": "wsd", "warmup_ratio": 0.2, "decay_ratio": 0.3, "min_lr": 0.001},
    },
    "groups, polynomial": {
        "optimizer": {"lr": 0.01, "groups": GROUPS},
        "schedule": {"kind": "polynomial", "power": 2, "warmup_ratio": 0.2},
    },
}
RATES = {
    # Two steps of warm-up, five at the peak, then 0, 1 and 2 thirds of the decay to 0.001.
    "Muon, wsd": [0.005] + [0.01] * 7 + [0.007, 0.004],
    "groups, polynomial": [0.005, 0.01, *(0.01 * (1 - step / 8) ** 2 for step in range(8))],
}


@pytest.fixture(scope="module")
def folder(megascend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a directory with a model, data and a run file."""
    folder = tmp_path_factory.mktemp("optimizers")
    megascend("new-model", folder / "model", "--hidden", "64", "--layers", "2", "--context", "256")
    write_lines(folder / "chat.jsonl", chats())
    write_run(folder, model="model", data={"path": "chat.jsonl", "global_batch_size": 4}, steps=STEPS)
    return folder


@pytest.mark.nightly_cases("Muon, wsd-megatron")  # covered: single; engines/test_muon.py
@pytest.mark.parametrize(
    ("name", "engine"), [("Muon, wsd", "single"), ("Muon, wsd", "megatron"), ("groups, polynomial", "fsdp")]
)
def test_a_run_learns_with_the_rates_of_its_schedule(megascend, folder: Path, name: str, engine: str) -> None:
    output = f"{engine} {name}"
    values = [f"{key}={json.dumps(value)}" for key, value in RUNS[name].items()]
    options = sets(*values, f"output={output}", f"engine={engine}")
    megascend("train", "run.yaml", *options, "--dry-run", cwd=folder)
    megascend("train", "run.yaml", *options, cwd=folder)
    rows = metrics(folder / output)
    assert [row["lr"] for row in rows] == pytest.approx(RATES[name])
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
