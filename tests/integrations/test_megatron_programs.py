"""Megatron-LM's own programs, unmodified, on two CPU processes; MEGASCEND_MEGATRON_LM names a checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("MEGASCEND_MEGATRON_LM", "")
PAGE = Path(__file__).parents[2] / "docs/integrations/megatron.md"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.torchrun,
    pytest.mark.skipif(
        not CHECKOUT, reason="set MEGASCEND_MEGATRON_LM to a checkout of Megatron-LM (tag core_v0.16.1)"
    ),
]


def run(program: str, arguments: list[str], folder: Path) -> str:
    """Run ``program`` of a copy of the checkout on two ranks; return its output."""
    tree = folder / "megatron-lm"
    shutil.copytree(CHECKOUT, tree, ignore=shutil.ignore_patterns(".git", "docs"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # The programs call `make`, which asks python3 and python3-config of PATH for names.
    binaries = os.pathsep.join(
        [str(Path(sys.executable).parent), sysconfig.get_path("scripts", vars={"base": sys.base_prefix})]
    )
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHDYNAMO_DISABLE")
    env = {name: value for name, value in os.environ.items() if name not in unset} | {
        "PATH": binaries + os.pathsep + os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(tree), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "megascend.apps.cli.main",
        "run",
        "--platform",
        "cpu",
        "--",
        *launch,
        program,
        *arguments,
    ]
    completed = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert completed.returncode == 0, completed.stderr[-4000:]
    return completed.stdout


def page_arguments() -> list[str]:
    """Return the arguments of ``pretrain_gpt.py`` in the docs."""
    (command,) = re.findall(r"pretrain_gpt\.py \\\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    return command.replace("\\\n", " ").split()


@pytest.mark.parametrize("tensor_parallel", [2, 1], ids=["TP2", "DP2"])
def test_pretrain_gpt_learns(tensor_parallel: int, tmp_path: Path) -> None:
    pytest.importorskip("pybind11", reason="Megatron-LM's helpers for data sets are compiled with pybind11")
    layout = ["--tensor-model-parallel-size", str(tensor_parallel)]
    out = run("pretrain_gpt.py", [*page_arguments(), *layout], tmp_path)
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", out)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.5


def test_the_simple_training_loop(tmp_path: Path) -> None:
    pytest.importorskip("pybind11", reason="Megatron-LM's helpers for data sets are compiled with pybind11")
    out = run("examples/run_simple_mcore_train_loop.py", [], tmp_path)
    assert len(re.findall(r"Iteration \d: Losses reduced", out)) == 2 * 5
    assert "Successfully loaded the model" in out
