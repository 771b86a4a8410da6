"""``megascend train`` with the optimizers and schedules beside AdamW: real runs from a file, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

STEPS = 10
CHATS = [("one?", "two"), ("red?", "blue and green"), ("up?", "down"), ("left?", "right, as ever")]
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
    completed = megascend("new-model", folder / "model", "--hidden", "64", "--layers", "2", "--context", "256")
    assert completed.returncode == 0, completed.stderr
    lines = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in CHATS]
    (folder / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "model": "model",
        "output": "out",
        "data": {"path": "chat.jsonl", "global_batch_size": 4},
        "steps": STEPS,
        "platform": "cpu",
        "precision": "fp32",
        "plot": False,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.mark.parametrize("engine", ["megatron", "fsdp", "single"])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_learns_with_the_rates_of_its_schedule(megascend, folder: Path, name: str, engine: str) -> None:
    output = f"{engine} {name}"
    values = [f"{key}={json.dumps(value)}" for key, value in RUNS[name].items()]
    sets = [part for value in (*values, f"output={output}", f"engine={engine}") for part in ("--set", value)]
    dry = megascend("train", "run.yaml", *sets, "--dry-run", cwd=folder)
    assert dry.returncode == 0, dry.stderr
    completed = megascend("train", "run.yaml", *sets, cwd=folder)
    assert completed.returncode == 0, completed.stderr
    rows = [json.loads(line) for line in (folder / output / "metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows] == pytest.approx(RATES[name])
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3


def test_a_dry_run_refuses_a_pattern_without_a_weight(megascend, folder: Path) -> None:
    groups = 'optimizer.groups=[{"match": "transformer.wte.*", "lr_scale": 0.1}]'
    for engine in ("megatron", "fsdp"):
        completed = megascend(
            "train", "run.yaml", "--set", groups, "--set", f"engine={engine}", "--dry-run", cwd=folder
        )
        assert completed.returncode == 2
        assert "optimizer.groups.0.match: 'transformer.wte.*': no trained weight has such a name" in completed.stderr
