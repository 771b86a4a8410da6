"""Fixtures that run the command line in a separate process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support import forked_programs
from support.forked_programs import run_command

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def megascend() -> Command:
    """Return ``megascend("train", "run.yaml", cwd=...)``, which runs a command and returns its CompletedProcess.

    It fails unless the exit code is ``code``; None: any. The process is forked (see ``forked_programs``), or with ``fresh=True``
    started as by a shell.
    """

    def run(
        *arguments: str | Path,
        cwd: Path | None = None,
        code: int | None = 0,
        timeout: float = 300,
        fresh: bool = False,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        variables = forked_programs.environment(**environment)
        if fresh:
            completed = subprocess.run(
                [sys.executable, "-m", "megascend.apps.cli.main", *map(str, arguments)],
                capture_output=True,
                text=True,
                timeout=timeout,
                cwd=cwd,
                check=False,
                env=variables,
            )
        else:
            completed = run_command(*arguments, directory=cwd, timeout_s=timeout, variables=variables)
        assert code in (None, completed.returncode), completed.stdout[-2000:] + completed.stderr
        return completed

    return run


@pytest.fixture(scope="session")
def small_model(megascend: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a two-layer Qwen3 with ``megascend new-model``."""
    path = tmp_path_factory.mktemp("models") / "qwen3"
    megascend("new-model", path, "--hidden", "32", "--layers", "2", "--context", "256")
    return path
