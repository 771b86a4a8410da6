"""The README's program runs as it stands, and learns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
DEADLINE_S = 120


def python(*arguments: str | Path, cwd: Path) -> str:
    """Standard output of this Python, run in ``cwd`` as a single process."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=DEADLINE_S,
        check=False,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def programs_of(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_program_without_a_cluster_runs(tmp_path: Path) -> None:
    (program,) = programs_of(README.parent / "docs" / "single.md")
    (tmp_path / "single.py").write_text(program)
    python("-m", "megascend.cli.main", "new-model", "runs/quickstart/model", "--layers", "2", cwd=tmp_path)
    losses = [float(line.split()[1]) for line in python("single.py", cwd=tmp_path).splitlines() if line[:1].isdigit()]
    assert len(losses) == 10
    assert losses[-1] < 0.5 * losses[0]
    exported = tmp_path / "runs" / "single" / "hf"
    assert json.loads((exported / "config.json").read_text())["model_type"] == "qwen3"
    assert (tmp_path / "runs" / "single" / "checkpoint" / "megascend.json").is_file()


def test_the_programs_about_lora_run(tmp_path: Path) -> None:
    python("-m", "megascend.cli.main", "new-model", "runs/quickstart/model", "--layers", "2", cwd=tmp_path)
    (tmp_path / "guide.py").write_text(programs_of(README.parent / "docs" / "lora.md")[0])
    figures = [float(line.split()[0]) for line in python("guide.py", cwd=tmp_path).splitlines() if line[:1].isdigit()]
    assert len(figures) == 10
    assert figures[-1] < figures[0]
    merged = tmp_path / "runs" / "lora" / "merged"
    assert json.loads((merged / "config.json").read_text())["model_type"] == "qwen3"

    (tmp_path / "short.py").write_text(
        "import megascend\n\nmegascend.bootstrap()\nsamples = [megascend.Sample.causal(list(b'2 + 2 = 4')) for _ in 'ab']\n"
        "samples[0].adapter, samples[1].adapter = 'alice', 'bob'\n" + programs_of(README)[1]
    )
    python("short.py", cwd=tmp_path)
    saved = json.loads((tmp_path / "runs" / "lora" / "alice" / "adapter_config.json").read_text())
    assert saved["r"] == 16


def test_the_program_in_the_readme_runs(tmp_path: Path) -> None:
    programs = programs_of(README)
    assert len(programs) == 2
    lines = [line for line in programs[0].splitlines() if line.strip()]
    assert len(lines) <= 20, "the README promises twenty lines"
    (tmp_path / "train.py").write_text(programs[0])
    python("-m", "megascend.cli.main", "new-model", "runs/quickstart/model", "--layers", "2", cwd=tmp_path)

    output = python("train.py", cwd=tmp_path)

    steps = re.findall(r"^(\d+) ([\d.e-]+) ([\d.e-]+) (True|False)$", output, re.MULTILINE)
    assert [int(number) for number, *_ in steps] == list(range(20))
    assert {skipped for *_, skipped in steps} == {"False"}
    assert float(steps[-1][1]) < 0.5 * float(steps[0][1])
    exported = tmp_path / "runs" / "readme" / "hf"
    assert json.loads((exported / "config.json").read_text())["model_type"] == "qwen3"
    assert (exported / "model.safetensors").stat().st_size > 0
