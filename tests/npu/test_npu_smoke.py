"""``scripts/npu/smoke.sh``: its table, verdicts and exit code, with a stand-in for the interpreter."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from support.ascend_packages import PROVIDER_PACKAGES

ROOT = Path(__file__).resolve().parents[2]

LOG = """\
8 ranks = tensor 2 x context 1 x data 4 x pipeline 1, sequence parallel
experts: expert tensor 1 x expert 4 x data 2 x pipeline 1
263,552 parameters on npu
step 1/3  loss 5.7703  grad norm 1.880  1,928 ms
step 2/3  loss 5.3885  grad norm 1.889  201 ms  SKIPPED
step 3/3  loss 5.1563  grad norm 1.975  182 ms
hang monitors: 8 of 8 alive
"""
RAISED = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "somewhere.py", line 1, in <module>
[rank3]: megascend.errors.ConfigError: this is why
[rank5]: megascend.errors.ConfigError: the same from another rank
W1121 torch.distributed.elastic Sending process 4711 closing signal SIGTERM
"""
# Answers for `python -c` (is there a package?), and for the simulated device's command that runs a recipe's script.
STAND_IN = """\
#!/usr/bin/env bash
[ "$1" != -c ] || exec {python} "$@"
case "${{*: -1}}" in
  */tp_npu.sh | */multi_lora_npu.sh) cat "$FOLDER/log"; echo "SMOKE OK" ;;
  */tp_moe_npu.sh) cat "$FOLDER/raised"; exit 1 ;;
  */tp_moe_cp_npu.sh) cat "$FOLDER/log"; exec sleep 60 ;;
esac
"""


@pytest.fixture
def smoke(tmp_path: Path):
    """Return ``smoke(*arguments, **environment)``, which runs the script."""
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "log").write_text(LOG)
    (tmp_path / "raised").write_text(RAISED)
    base = {name: value for name, value in os.environ.items() if name not in ("MEGASCEND_MINDSPEED", "PYTHONPATH")}
    variables = {"PYTHON": str(stand_in), "FOLDER": str(tmp_path), "MEGASCEND_RUN": str(tmp_path / "run")}

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(ROOT / "scripts" / "npu" / "smoke.sh"), *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            env=base | variables | environment,
            check=False,
        )

    return run


def cells(output: str, recipe: str) -> list[str]:
    """Return the row of a recipe, split at double spaces."""
    (row,) = (line for line in output.splitlines() if line.startswith(f"{recipe}  "))
    return [cell.strip() for cell in row.split("  ") if cell.strip()]


def test_failure_shows_the_failed_rank_and_exits_with_1(smoke, tmp_path: Path) -> None:
    completed = smoke("--simulated", "--stand-in", MEGASCEND_SMOKE_DEADLINE="2")
    assert completed.returncode == 1
    *figures, _, verdict = cells(completed.stdout, "tp_npu")
    assert figures == ["tp_npu", "TP2 CP1 DP4 PP1 ETP1 EP4", "5.7703", "5.1563", "1.975", "201", "8/8"]
    assert verdict == "OK"
    assert cells(completed.stdout, "tp_moe_npu")[1:6] == ["-"] * 5
    assert cells(completed.stdout, "tp_moe_npu")[-1] == "FAILED (exit code 1)"
    assert cells(completed.stdout, "tp_moe_cp_npu")[-1] == "FAILED (not done after 2 s)"
    assert cells(completed.stdout, "multi_lora_npu")[-1] == "OK"
    _, moe_log, cp_log = completed.stdout.split("\n== ")
    assert moe_log.startswith(f"{tmp_path}/run/logs/tp_moe_npu.log\n")
    assert "this is why" in moe_log
    assert "rank5" not in moe_log
    assert "step 3/3" in cp_log


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--simulated",), f"no {PROVIDER_PACKAGES[0]} for"),
        (("--stand-in",), "--stand-in needs --simulated"),
        (("--simulated", "--stand-in", "tp_other"), "no recipe cookbook/ascend/tp_other.py"),
    ],
)
def test_missing_requirements_exit_with_2(smoke, arguments: tuple[str, ...], message: str) -> None:
    completed = smoke(*arguments)
    assert completed.returncode == 2
    assert message in completed.stderr
    assert completed.stdout == ""
