"""The programs of the README and the guides run unchanged, and learn."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
DEADLINE_S = 120


def python(*arguments: str | Path, cwd: Path) -> str:
    """Run this Python in ``cwd`` as a single process and return its standard output."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    completed = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=DEADLINE_S,
        check=False,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    return completed.stdout


@pytest.fixture(scope="module")
def new_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the model of the quick start's first command."""
    folder = tmp_path_factory.mktemp("quickstart")
    python("-m", "megascend.apps.cli.main", "new-model", "runs/quickstart/model", "--layers", "2", cwd=folder)
    return folder / "runs" / "quickstart" / "model"


@pytest.fixture
def folder(new_model: Path, tmp_path: Path) -> Path:
    """Create a folder with that model at the path the programs use."""
    shutil.copytree(new_model, tmp_path / "runs" / "quickstart" / "model")
    return tmp_path


def programs_of(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.nightly  # covered: engines/fsdp/test_single.py
def test_single_process_program_runs(folder: Path) -> None:
    (program,) = [text for text in programs_of(README.parent / "docs" / "fsdp.md") if "SingleBackend" in text]
    (folder / "single.py").write_text(program)
    losses = [float(line.split()[1]) for line in python("single.py", cwd=folder).splitlines() if line[:1].isdigit()]
    assert len(losses) == 10
    assert losses[-1] < 0.5 * losses[0]
    exported = folder / "runs" / "single" / "hf"
    assert json.loads((exported / "config.json").read_text())["model_type"] == "qwen3"
    assert (folder / "runs" / "single" / "checkpoint" / "megascend.json").is_file()


@pytest.mark.nightly  # covered: training/lora/test_backend_adapters.py, lora/test_peft_format.py
def test_lora_program_runs(folder: Path) -> None:
    (folder / "guide.py").write_text(programs_of(README.parent / "docs" / "lora.md")[0])
    figures = [float(line.split()[0]) for line in python("guide.py", cwd=folder).splitlines() if line[:1].isdigit()]
    assert len(figures) == 10
    assert figures[-1] < figures[0]
    merged = folder / "runs" / "lora" / "merged"
    assert json.loads((merged / "config.json").read_text())["model_type"] == "qwen3"


def test_readme_program_runs(folder: Path) -> None:
    (program,) = programs_of(README)
    (folder / "train.py").write_text(program)

    output = python("train.py", cwd=folder)

    steps = re.findall(r"^(\d+) ([\d.e-]+) ([\d.e-]+) (True|False)$", output, re.MULTILINE)
    assert [int(number) for number, *_ in steps] == list(range(20))
    assert {skipped for *_, skipped in steps} == {"False"}
    assert float(steps[-1][1]) < 0.5 * float(steps[0][1])
    exported = folder / "runs" / "readme" / "hf"
    assert json.loads((exported / "config.json").read_text())["model_type"] == "qwen3"
    assert (exported / "model.safetensors").stat().st_size > 0
