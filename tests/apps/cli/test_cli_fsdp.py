"""``megascend train`` with ``engine: fsdp`` and the run file of the quick start: train, resume, report."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from support.runs import losses, sets

ROOT = Path(__file__).parents[3]
RUN_FILE = ROOT / "examples" / "quickstart" / "quickstart.yaml"


@pytest.mark.core
def test_quick_start_run_file_on_one_process(megascend, tmp_path: Path) -> None:
    model, output = tmp_path / "model", tmp_path / "run"
    sizes = ("--arch", "qwen3", "--hidden", "128", "--layers", "4", "--heads", "4", "--kv-heads", "2")
    megascend("new-model", model, *sizes)
    # The quick start's warm-up is longer than these runs.
    values = sets("engine=fsdp", "parallel.tensor=1", f"model={model}", f"output={output}", "checkpoint.every=2")
    values += sets("plot=false", "schedule.warmup_steps=0")
    printed = megascend("show-config", RUN_FILE, *values, cwd=ROOT)
    assert yaml.safe_load(printed.stdout)["engine"] == "fsdp"
    megascend("train", RUN_FILE, *values, "--set", "steps=3", cwd=ROOT)
    completed = megascend("train", RUN_FILE, *values, "--set", "steps=6", "--resume", "auto", cwd=ROOT)
    assert "resumed from" in completed.stdout
    rows_of_run = losses(output)
    assert [step for step, *_ in rows_of_run] == list(range(1, 7))
    assert rows_of_run[-1][1] < rows_of_run[0][1]
    assert (output / "hf" / "config.json").is_file()
    megascend("doctor", "--run", output)
