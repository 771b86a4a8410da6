"""``megascend simnpu -- COMMAND``, and errors of the simulated device under it: one line, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simnpu.environment import own_paths


def launch(*arguments: str, first: Path | None = None, **changes: str) -> subprocess.CompletedProcess[str]:
    own = {str(path) for path in own_paths()}
    paths = [*([str(first)] if first else []), *(entry for entry in sys.path if entry and entry not in own)]
    unset = ("SIMNPU", "RANK", "LOCAL_WORLD_SIZE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    env |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "megascend.cli.main", "simnpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env | changes, timeout=300, check=False)


def test_arguments_pass_unchanged_and_the_exit_code_is_the_commands() -> None:
    code = "import sys; print(sys.argv[1:]); sys.exit(7)"
    done = launch("--", sys.executable, "-S", "-c", code, "--help", "--", "-x", "a b")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (7, "['--help', '--', '-x', 'a b']", "")


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (("no-such-program", "--nproc_per_node", "2"), {}, "ConfigError: cannot run no-such-program: No such file"),
        (("true",), {"SIMNPU_DEVICES": "0"}, "ConfigError: SIMNPU_DEVICES='0': expected a number of devices"),
    ],
)
def test_an_error_of_the_device_is_one_line(arguments: tuple[str, ...], changes: dict[str, str], message: str) -> None:
    done = launch("--", *arguments, **changes)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(message)


def test_a_name_that_is_not_simulated_is_one_line_inside_a_command() -> None:
    """The command line under it meets the device's own error, which is none of megascend's."""
    code = (
        "import sys, typer\n"
        "from megascend.cli import main\n"
        "def broken():\n"
        "    import torch_npu\n"
        "    torch_npu.npu_fold_proteins\n"
        "main.app.command('broken')(broken)\n"
        "sys.argv = ['megascend', 'broken']\n"
        "main.main()\n"
    )
    done = launch("--", sys.executable, "-c", code)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "SIMULATED" not in line]
    assert line.startswith("NotSimulatedError: torch_npu.npu_fold_proteins: this operator is not simulated")


def test_without_a_command_the_usage_is_shown() -> None:
    done = launch()
    assert done.returncode == 2
    assert "COMMAND" in done.stderr


def test_a_torch_outside_the_version_table_is_refused_before_it_is_imported(tmp_path: Path) -> None:
    """torch loads the device by itself, and its own message would be about that."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    info = tmp_path / "torch-2.15.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.15.0\n")
    done = launch("--", sys.executable, "-c", "import torch", first=tmp_path)
    assert done.returncode != 0
    assert "VersionError: torch 2.15.0 is installed; stack 0.1" in done.stderr
    assert "needs torch<2.14,>=2.6" in done.stderr
    assert "Traceback" not in done.stderr
    assert "torch was imported" not in done.stderr
