"""``scripts/bench_verl.py``: verl's own Megatron engine and megascend's compute the same; their speed on a CPU says nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="no verl in this environment: bash scripts/test_integrations.sh verl")
pytest.importorskip("mbridge", reason="no mbridge, which verl's own engine needs: bash scripts/verl_env.sh")

from verl_runs import DEADLINE_S, ROOT, environment

from support import families

pytestmark = [pytest.mark.nightly, pytest.mark.torchrun]


def test_verls_own_engine_and_ours(tmp_path: Path) -> None:
    runs = ["--run", "megatron", "--run", "megascend", "--warmup", "2", "--steps", "3"]
    work = ["--tiny", "--platform", "cpu", "--shortest", "8", "--lr", "1e-3", "--json", tmp_path / "found.json"]
    command = [sys.executable, ROOT / "scripts" / "bench_verl.py", *runs, *work]
    done = families.run(command, 2 * DEADLINE_S, env=environment())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    own, ours = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert (own["run"], ours["run"]) == ("megatron", "megascend")
    assert own["tokens"] == ours["tokens"], "the same sequences"
    assert len(ours["loss"]) == 5
    assert ours["loss"] == pytest.approx(own["loss"], rel=1e-3), "bf16"
    assert ours["norm"] == pytest.approx(own["norm"], rel=5e-3), "bf16"
    assert ours["loss"][-1] < ours["loss"][0] - 0.02, "and something is learned"
