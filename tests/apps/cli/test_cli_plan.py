"""``megascend plan``: ranked layouts that the engine accepts, a run file that runs, and errors in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.runs import chats, write_lines

[QUESTION] = chats([("one?", "two")])


@pytest.fixture(scope="module")
def experts(megascend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a small mixture of experts."""
    path = tmp_path_factory.mktemp("models") / "moe"
    megascend("new-model", path, "--arch", "qwen3_moe", "--hidden", "32", "--context", "256")
    return path


def test_plan_ranks_layouts_and_its_run_file_passes_a_dry_run(megascend, experts: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "data.jsonl", [QUESTION] * 8)
    arguments = ("--device", "b200", "--cards", "4", "--length", "256", "--batch", "8", "--best", "3", "--explain")
    completed = megascend("plan", experts, *arguments, "--write", "run.yaml", "--data", "data.jsonl", cwd=tmp_path)
    output = completed.stdout
    assert "4 x NVIDIA B200 SXM 192GB, 1 node" in output
    assert "2 loses " in output
    assert "3 loses " in output
    assert "warning   NVIDIA B200 SXM 192GB: nothing was measured on this device" in output
    assert "refused" not in output
    run_file = (tmp_path / "run.yaml").read_text()
    assert run_file.rstrip() in output
    assert output.endswith("run.yaml: the run file of layout 1\n")
    settings = yaml.safe_load(run_file)
    assert settings["data"] == {"path": "data.jsonl", "global_batch_size": 8}
    dry = megascend("train", "run.yaml", "--dry-run", "--nproc", "4", "--set", "platform=cpu", cwd=tmp_path)
    assert "4 ranks = " in dry.stdout
    repeated = megascend("plan", experts, "--write", "run.yaml", cwd=tmp_path, code=2)
    assert "--write run.yaml exists" in repeated.stderr


def test_rl_divides_the_devices(megascend, experts: Path) -> None:
    completed = megascend("plan", experts, "--cards", "4", "--batch", "64", "--rl")  # samples as long as its context
    assert "a step is 64 responses of 256 tokens" in completed.stdout
    assert "was not compared with measurements" in completed.stdout
    rows = [line.split() for line in completed.stdout.splitlines() if " x TP1 " in line]
    assert len(rows) >= 2
    for engines, _, _, _, trainer, *_ in rows:
        assert int(engines) + int(trainer) <= 4


def test_calibration_of_a_cpu_checks_the_program_and_is_refused_as_measurements(
    megascend, experts: Path, tmp_path: Path
) -> None:
    megascend("plan", "--calibrate", "cpu.json", cwd=tmp_path)
    content = json.loads((tmp_path / "cpu.json").read_text())
    assert content["missing"] == []
    assert all(len(row) == 6 and min(row[3:]) > 0 for row in content["products"])
    refused = megascend("plan", experts, "--calibration", "cpu.json", cwd=tmp_path, code=2)
    assert "was measured on a CPU, with sizes that only check the program" in refused.stderr


@pytest.mark.nightly
def test_calibration_measures_collectives_of_several_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "megascend.apps.plan.calibrate", "links.json", "--only", "element-wise"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300, capture_output=True)
    rows = json.loads((tmp_path / "links.json").read_text())["collectives"]
    assert {row["kind"] for row in rows} == {"all_reduce", "all_gather", "send"}  # Gloo has no others
    assert all(row["ranks"] == 2 and row["us"] > 0 for row in rows)
