"""``megascend simnpu -- COMMAND``: the command sees the device, gets its arguments unchanged, and gives its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def launch(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    paths = [entry for entry in sys.path if entry and "simnpu" not in entry]
    env = (
        os.environ
        | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        | changes
    )
    for name in ("MEGASCEND_SIMNPU", "RANK"):
        env.pop(name, None)
    command = [sys.executable, "-m", "megascend.cli.main", "simnpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=180, check=False)


def test_arguments_pass_unchanged_and_the_exit_code_is_the_commands() -> None:
    code = "import sys, torch; print(torch.zeros(1, device='npu').device, sys.argv[1:]); sys.exit(7)"
    done = launch("--", sys.executable, "-c", code, "--help", "--", "-x", "a b")
    assert done.returncode == 7
    assert done.stdout.strip() == "npu:0 ['--help', '--', '-x', 'a b']"
    assert "SIMULATED" in done.stderr


def test_a_command_that_does_not_exist_is_named() -> None:
    done = launch("--", "no-such-program", "--nproc_per_node", "2")
    assert done.returncode == 2
    assert "ConfigError: cannot run no-such-program: No such file or directory" in done.stderr


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
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry and "simnpu" not in entry)])
    done = launch("--", sys.executable, "-c", "import torch", PYTHONPATH=path)
    assert done.returncode != 0
    assert "VersionError: torch 2.15.0 is installed; stack 0.1" in done.stderr
    assert "needs torch<2.14,>=2.6" in done.stderr
    assert "Traceback" not in done.stderr
    assert "torch was imported" not in done.stderr


SCRIPT = """
import json, os, pathlib, sys, torch, torch_npu
import torch.distributed as dist
rank = int(os.environ["RANK"])
torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("hccl")
total = torch.full((2,), float(rank + 1)).npu()
dist.all_reduce(total)
found = [torch.npu.device_count(), torch.npu.current_device(), total.tolist(), dist.get_backend()]
pathlib.Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.torchrun
def test_torchrun_with_two_ranks_over_hccl(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = launch("--", *torchrun, str(tmp_path / "script.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [2, rank, [3.0, 3.0], "hccl"]
    assert done.stderr.count("SIMULATED") == 1
