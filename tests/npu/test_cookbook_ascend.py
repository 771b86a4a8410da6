"""Every recipe of ``cookbook/ascend`` on simulated ranks, and failing runs.

A full run on 8 ranks takes about 50 s on two free cores, nearly all of it the start of 8 processes; that of multi_lora_npu,
whose model is larger, about 80 s. The shell script passes its command lines to a stand-in for the interpreter, and two forked
ranks run the recorded commands; in CI those of one recipe.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import math
import os
import re
import runpy
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

import megascend
from megascend.runtime.bootstrap.runtime import Runtime
from megascend.testing import run_distributed
from megascend.testing.reference import run_reference
from support import families
from support.ascend_packages import package_folders

ROOT = Path(__file__).resolve().parents[2]
ASCEND = ROOT / "cookbook" / "ascend"
DEADLINE_S = 300
RECIPES = {
    "tp_npu": "8 ranks = tensor 2 x context 1 x data 2 x pipeline 2",
    "tp_moe_npu": "8 ranks = tensor 2 x context 1 x data 4 x pipeline 1, sequence parallel\n"
    "experts: expert tensor 1 x expert 4 x data 2 x pipeline 1",
    "tp_moe_cp_npu": "8 ranks = tensor 2 x context 2 x data 2 x pipeline 1, sequence parallel\n"
    "experts: expert tensor 1 x expert 4 x data 2 x pipeline 1",
    "multi_lora_npu": "8 ranks = tensor 2 x context 1 x data 2 x pipeline 2",
}
ON_TWO = {
    "tp_npu": (("--tensor", "2", "--pipeline", "1"), "2 ranks = tensor 2 x context 1 x data 1 x pipeline 1"),
    "tp_moe_npu": (
        ("--tensor", "2", "--expert", "2"),
        "2 ranks = tensor 2 x context 1 x data 1 x pipeline 1, sequence parallel\n"
        "experts: expert tensor 1 x expert 2 x data 1 x pipeline 1",
    ),
    "tp_moe_cp_npu": (
        ("--tensor", "1", "--context", "2", "--expert", "2"),
        "2 ranks = tensor 1 x context 2 x data 1 x pipeline 1",
    ),
    "multi_lora_npu": (("--tensor", "1", "--pipeline", "2"), "2 ranks = tensor 1 x context 1 x data 1 x pipeline 2"),
}
TENANT = re.compile(r"^tenant (\w+): rank \d+, loss ([\d.]+) -> ([\d.]+)$", re.MULTILINE)
STEP = re.compile(r"^step (\d+)/(\d+)  loss ([\d.]+)  grad norm ([\d.]+)  ([\d,]+) ms$", re.MULTILINE)


@contextmanager
def started(recipe: str, folder: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start ``megascend simnpu -- bash cookbook/ascend/RECIPE.sh ARGUMENTS``; kill all its processes at the end."""
    path = [str(ROOT / "src"), *package_folders(), *(entry for entry in sys.path if entry and "simnpu" not in entry)]
    variables = {
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "MEGASCEND_RUN": str(folder),
    }
    program = [sys.executable, "-m", "megascend.apps.cli.main", "simnpu", "--", "bash", str(ASCEND / f"{recipe}.sh")]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    env = os.environ | variables | environment
    with families.started([*program, *arguments], cwd=folder, env=env, **streams) as process:
        yield process


def script(recipe: str) -> ModuleType:
    """Import the recipe as a module; ``main`` does not run."""
    spec = importlib.util.spec_from_file_location(recipe, ASCEND / f"{recipe}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STAND_IN = """#!/usr/bin/env bash
printf '%s\\0' "$@" >> "$LOG"
printf '\\n' >> "$LOG"
"""


def commands(recipe: str, folder: Path, *arguments: str, ranks: int) -> list[list[str]]:
    """Return the arguments of every interpreter that the recipe's shell script starts."""
    interpreter, log = folder / "python", folder / "log"
    interpreter.write_text(STAND_IN)
    interpreter.chmod(interpreter.stat().st_mode | stat.S_IXUSR)
    variables = {"PYTHON": str(interpreter), "LOG": str(log), "MEGASCEND_RUN": str(folder), "NPROC": str(ranks)}
    script = ["bash", str(ASCEND / f"{recipe}.sh"), *arguments]
    completed = subprocess.run(
        script, capture_output=True, text=True, timeout=DEADLINE_S, cwd=folder, env=os.environ | variables, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return [line.split("\0")[:-1] for line in log.read_text().splitlines()]


NEW_MODEL = "import sys; from megascend.apps.cli.main import main; sys.argv[0] = 'megascend'; main()"


def run_on_forked_ranks(recipe: str, folder: Path, *arguments: str, ranks: int) -> tuple[int, str]:
    """Run the shell script's commands on forked ranks of a bootstrapped process; return rank 0's exit code and output."""
    new_model, launch = commands(recipe, folder, *arguments, ranks=ranks)
    assert new_model[:3] == ["-m", "megascend.apps.cli.main", "new-model"]
    completed = run_reference(NEW_MODEL, *new_model[2:])
    assert completed.returncode == 0, completed.stderr
    assert launch[:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]

    def on_rank() -> tuple[int, str]:
        megascend.MegatronBackend = functools.partial(megascend.MegatronBackend, self_check=False)  # tested elsewhere
        os.chdir(ROOT)
        sys.argv = launch[5:]
        output, code = io.StringIO(), 0
        with contextlib.redirect_stdout(output):
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as error:
                code = int(error.code or 0)
        return code, output.getvalue()

    return run_distributed(on_rank, ranks, init=False, timeout_s=DEADLINE_S)[0]


@pytest.mark.nightly_cases("tp_npu", "tp_moe_npu", "multi_lora_npu")  # covered: tp_moe_cp_npu; tenants: test_lora.py
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_learns_on_two_forked_ranks(recipe: str, tmp_path: Path, npu: Runtime) -> None:
    arguments, layout = ON_TWO[recipe]
    code, output = run_on_forked_ranks(recipe, tmp_path, *arguments, ranks=2)
    assert code == 0, output
    assert_it_learns(recipe, layout, output)


@pytest.mark.nightly
@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_learns_from_its_shell_script(recipe: str, tmp_path: Path) -> None:
    with started(recipe, tmp_path, NPROC="8") as process:
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output[:8000]
    assert_it_learns(recipe, RECIPES[recipe], output)


@pytest.mark.nightly
@pytest.mark.torchrun
@pytest.mark.slow
def test_four_ranks_learn_from_four_engines(tmp_path: Path) -> None:
    """Run asynchronous GRPO: TP 2 x DP 2 on the simulated device, transformers on the CPU as the engines."""
    arguments = ("--steps", "10", "--warm-up", "90")
    with started("async_grpo_npu", tmp_path, *arguments) as process:
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output[-8000:]
    assert "4 engines after" in output
    # Before the first update the engines have the trainer's weights, so the mismatch is rounding.
    assert re.search(r"^step 1/10  reward [\d.]+  lag 0.0  mismatch \d.\de-0[6-9]", output, re.MULTILINE), output[
        -8000:
    ]


@pytest.mark.nightly
@pytest.mark.torchrun
@pytest.mark.slow
def test_two_tenants_learn_on_four_served_ranks(tmp_path: Path) -> None:
    """Run `megascend serve`: TP 2 x PP 2 on the simulated device, two Tinker clients at once."""
    with started("tinker_npu", tmp_path, NPROC="4") as process:
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output[-8000:]
    assert "learned: each tenant its own answer" in output
    assert output.rstrip().splitlines()[-1] == "SMOKE OK"
    assert "SIMULATED" in (tmp_path / "tinker-server.log").read_text()


def assert_it_learns(recipe: str, layout: str, output: str) -> None:
    assert layout in output
    assert "parameters on npu" in output
    steps = STEP.findall(output)
    assert [int(number) for number, *_ in steps] == list(range(1, 11)), output[:8000]
    losses = [float(loss) for _, _, loss, *_ in steps]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[0] == pytest.approx(math.log(259), abs=0.3)  # a random model guesses among the tokenizer's tokens
    assert losses[-1] < 0.75 * losses[0]
    tenants = TENANT.findall(output)
    assert len(tenants) == (4 if recipe == "multi_lora_npu" else 0)
    assert all(float(last) < 0.9 * float(first) for _, first, last in tenants), tenants
    assert re.search(r"^peak device memory: [\d.,]+ to [\d.,]+ MiB a rank$", output, re.MULTILINE)
    assert re.search(r"^hang monitors: (\d+) of \1 alive$", output, re.MULTILINE)
    assert output.rstrip().splitlines()[-1] == "SMOKE OK"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("losses", "norms", "skipped", "problem"),
    [
        ([[5.0, 4.0], [5.0, 4.0]], [1.0, 1.0], 0, None),
        ([[5.0, 4.0], [5.0, 4.0]], [math.inf, 1.0], 1, None),  # fp16 looks for its loss scale
        ([[5.0, 4.0], [5.0, 4.0]], [math.nan, 1.0], 0, "step 1 has loss 5.0 and gradient norm nan"),
        ([[5.0, math.nan], [5.0, 4.0]], [1.0, 1.0], 1, "step 2 has loss nan"),
        ([[5.0, 5.0], [5.0, 5.0]], [1.0, 1.0], 2, "did not fall: 5.0000 -> 5.0000, 2 steps skipped"),
        (
            [[5.0, 4.0], [5.0, 4.1]],
            [1.0, 1.0],
            0,
            "the ranks disagree: rank 0 has losses [5.0, 4.0], rank 1 [5.0, 4.1]",
        ),
        ([[5.0, 4.0], [5.0, math.nan]], [1.0, 1.0], 0, "rank 1 [5.0, nan]"),
    ],
    ids=["learns", "learns after a skipped step", "norm", "loss", "level", "other rank", "other rank's NaN"],
)
def test_what_is_wrong_by_losses_and_norms(recipe: str, losses, norms, skipped: int, problem: str | None) -> None:
    verdict = script(recipe).problem_in(losses, norms, skipped)
    assert verdict == problem if problem is None else problem in verdict
