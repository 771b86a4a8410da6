"""``scripts/bench_verl.py``: verl's Megatron engine and megascend's agree; their speed on a CPU is not meaningful."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl.workers", reason="no verl in this environment: bash scripts/test_integrations.sh verl")
pytest.importorskip("mbridge", reason="no mbridge, which verl's own engine needs: bash scripts/verl_env.sh")

from verl_runs import DEADLINE_S, ROOT, environment

from support import families

pytestmark = [pytest.mark.nightly, pytest.mark.torchrun]


def test_verl_megatron_engine_and_megascend_agree(tmp_path: Path) -> None:
    runs = ["--run", "megatron", "--run", "megascend", "--warmup", "2", "--steps", "3"]
    work = ["--tiny", "--platform", "cpu", "--shortest", "8", "--lr", "1e-3", "--json", tmp_path / "found.json"]
    command = [sys.executable, ROOT / "scripts" / "bench_verl.py", *runs, *work]
    completed = families.run(command, 2 * DEADLINE_S, env=environment())
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-6000:]
    verl_run, megascend_run = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert (verl_run["run"], megascend_run["run"]) == ("megatron", "megascend")
    assert verl_run["tokens"] == megascend_run["tokens"], "the same sequences"
    assert len(megascend_run["loss"]) == 5
    assert megascend_run["loss"] == pytest.approx(verl_run["loss"], rel=1e-3), "bf16"
    assert megascend_run["norm"] == pytest.approx(verl_run["norm"], rel=5e-3), "bf16"
    assert megascend_run["loss"][-1] < megascend_run["loss"][0] - 0.02, "and something is learned"
