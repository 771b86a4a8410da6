"""Running the command line as a user does: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def megascend() -> Command:
    """``megascend("train", "run.yaml", cwd=...)``: the finished process, output captured."""

    def run(*arguments: str | Path, cwd: Path | None = None, timeout: float = 300, **environment: str):
        path = os.pathsep.join(entry for entry in sys.path if entry)
        return subprocess.run(
            [sys.executable, "-m", "megascend.cli.main", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd,
            check=False,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"} | environment,
        )

    return run


@pytest.fixture(scope="session")
def small_model(megascend: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen3 made by ``megascend new-model``."""
    path = tmp_path_factory.mktemp("models") / "qwen3"
    done = megascend("new-model", path, "--hidden", "32", "--layers", "2", "--context", "256")
    assert done.returncode == 0, done.stderr
    return path
