"""The five-minute start of docs/integrations/megatron.md, run verbatim."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/integrations/megatron.md"


def page_start() -> tuple[str, list[str]]:
    """Return the docs' program, and the words of its command."""
    text = PAGE.read_text(encoding="utf-8").partition("## megatron-bridge and mcore-bridge")[0]
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (command,) = re.findall(r"```bash\n(.*?)\n```", text, re.DOTALL)
    return program, command.split()


@pytest.mark.nightly  # covered: runtime/bootstrap/test_training_device.py
@pytest.mark.torchrun
def test_the_page_runs_as_it_is_written(tmp_path: Path) -> None:
    program, command = page_start()
    assert command[:2] == ["megascend", "run"]
    assert command[5] == "torchrun"
    (tmp_path / "plain.py").write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    full_command = [sys.executable, "-m", "megascend.apps.cli.main", *command[1:5], *torchrun, *command[6:]]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHDYNAMO_DISABLE")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    completed = subprocess.run(
        full_command,
        cwd=tmp_path,
        env=env | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    losses = [float(number) for number in re.findall(r"step \d loss (\d+\.\d+)", completed.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 1
