"""``megascend simnpu -- COMMAND``; errors of the simulated device are one line, without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from simnpu.environment import own_paths


def launch(*arguments: str, first: Path | None = None, **changes: str) -> subprocess.CompletedProcess[str]:
    simnpu_paths = {str(path) for path in own_paths()}
    paths = [*([str(first)] if first else []), *(entry for entry in sys.path if entry and entry not in simnpu_paths)]
    unset = ("SIMNPU", "RANK", "LOCAL_WORLD_SIZE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    env |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "megascend.apps.cli.main", "simnpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env | changes, timeout=300, check=False)


def test_arguments_and_exit_code_are_passed_through() -> None:
    code = "import sys; print(sys.argv[1:]); sys.exit(7)"
    completed = launch("--", sys.executable, "-S", "-c", code, "--help", "--", "-x", "a b")
    assert (completed.returncode, completed.stdout.strip(), completed.stderr) == (
        7,
        "['--help', '--', '-x', 'a b']",
        "",
    )


def test_unsimulated_operator_error_is_one_line() -> None:
    """Raise the simulated device's error, which is not a MegascendError, inside the command line."""
    code = (
        "import sys, typer\n"
        "from megascend.apps.cli import main\n"
        "def broken():\n"
        "    import torch_npu\n"
        "    torch_npu.npu_fold_proteins\n"
        "main.app.command('broken')(broken)\n"
        "sys.argv = ['megascend', 'broken']\n"
        "main.main()\n"
    )
    completed = launch("--", sys.executable, "-c", code)
    assert completed.returncode == 2
    assert "Traceback" not in completed.stderr
    (line,) = [line for line in completed.stderr.splitlines() if "SIMULATED" not in line]
    assert line.startswith("NotSimulatedError: torch_npu.npu_fold_proteins: this operator is not simulated")


def test_unsupported_torch_is_refused_before_its_import(tmp_path: Path) -> None:
    """Check the versions first: torch autoloads the device, and its own message would be about the device."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    info = tmp_path / "torch-2.16.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.16.0\n")
    completed = launch("--", sys.executable, "-c", "import torch", first=tmp_path)
    assert completed.returncode != 0
    assert "VersionError: torch 2.16.0 is installed; stack 0.1" in completed.stderr
    assert "needs torch<2.16,>=2.6" in completed.stderr
    assert "Traceback" not in completed.stderr
    assert "torch was imported" not in completed.stderr
