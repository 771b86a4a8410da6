"""``python -m simnpu -- COMMAND``: the command sees the device, gets its arguments unchanged, and gives its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import simnpu
from simnpu.environment import own_paths


def launch(*arguments: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
    package_paths = {str(path) for path in own_paths()}
    paths = [entry for entry in sys.path if entry and entry not in package_paths]
    unset = ("SIMNPU", "RANK", "LOCAL_WORLD_SIZE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    env |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | changes
    command = [sys.executable, "-m", "simnpu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)


SHOW = "import os, json; print(json.dumps({n: v for n, v in os.environ.items() if 'SIMNPU' in n}))"


def settings_of_the_command(*options: str | Path, **changes: str) -> tuple[dict[str, str], str]:
    """Return our variables as the command sees them, and its stderr."""
    completed = launch(*options, "--", sys.executable, "-S", "-c", SHOW, **changes)
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout), completed.stderr


def test_arguments_pass_unchanged_and_the_exit_code_is_the_commands() -> None:
    code = "import sys, torch; print(torch.zeros(1, device='npu').device, sys.argv[1:]); sys.exit(7)"
    completed = launch("--", sys.executable, "-c", code, "--help", "--", "-x", "a b")
    assert completed.returncode == 7
    assert completed.stdout.strip() == "npu:0 ['--help', '--', '-x', 'a b']"
    assert "SIMULATED" in completed.stderr


def test_a_command_may_come_without_the_dashes() -> None:
    code = "import sys; print(sys.argv[1:])"
    completed = launch("--devices", "2", sys.executable, "-S", "-c", code, "--devices", "--", "-x")
    assert (completed.stdout.strip(), completed.returncode) == ("['--devices', '--', '-x']", 0)


def test_options_set_the_variables_of_the_command(tmp_path: Path) -> None:
    options = ("--devices", "3", "--name", "910B3", "--objects", "refuse", "--log", tmp_path / "calls")
    variables, stderr = settings_of_the_command(*options, SIMNPU_DEVICES="5")
    assert variables.pop("SIMNPU_PYTHON") == sys.executable
    assert variables == {
        "SIMNPU": "1",
        "SIMNPU_DEVICES": "3",
        "SIMNPU_DEVICE_NAME": "910B3",
        "SIMNPU_OBJECTS": "refuse",
        "SIMNPU_LOG": str(tmp_path / "calls"),
    }
    assert stderr == ""


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (("--", "no-such-program"), {}, "ConfigError: cannot run no-such-program: No such file or directory"),
        (("--devices", "no", "--", "true"), {}, "ConfigError: SIMNPU_DEVICES='no': expected a number of devices"),
        (("--", "true"), {"SIMNPU_DEVICE_NAME": "A100"}, "ConfigError: SIMNPU_DEVICE_NAME='A100': expected one of"),
    ],
)
def test_an_error_is_one_line(arguments: tuple[str, ...], changes: dict[str, str], message: str) -> None:
    completed = launch(*arguments, **changes)
    assert completed.returncode == 2
    (line,) = completed.stderr.splitlines()
    assert line.startswith(message)


def test_without_a_command_the_usage_is_shown() -> None:
    completed = launch()
    assert completed.returncode == 2
    assert "no COMMAND: python -m simnpu -- torchrun" in completed.stderr


def test_the_check_says_in_one_line_what_the_device_is(tmp_path: Path) -> None:
    completed = launch("--check", "--devices", "3")
    assert completed.returncode == 0, completed.stderr
    (line,) = completed.stdout.splitlines()
    assert line.startswith(f"simnpu {simnpu.__version__}: torch_npu ")
    assert "+simnpu, 3 x Simulated Ascend" in line
    assert "SIMULATED" in line
    (tmp_path / "torch.py").write_text("raise SystemExit('this torch is broken')\n")
    completed = launch("--check", PYTHONPATH=os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)]))
    assert completed.returncode == 2
    (line,) = completed.stderr.splitlines()
    assert line == "PlatformError: the simulated device does not work here (exit code 1): this torch is broken"
