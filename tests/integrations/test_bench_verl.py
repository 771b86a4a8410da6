"""Commands and comparisons of ``scripts/bench_verl.py`` on a GPU; ``verl/test_verl_bench.py`` has the runs."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delitem(sys.modules, "bench_verl", raising=False)
    import bench_verl

    return bench_verl


def without(monkeypatch: pytest.MonkeyPatch, *absent: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find(name))


def settings(bench, run: str, platform: str) -> list[str]:
    work = bench.Work(
        shape=bench.TINY,
        platform=platform,
        precision="bf16",
        sequences=8,
        length=32,
        warmup=1,
        steps=2,
        lr=1e-3,
        seed=1,
        ranks=1,
    )
    arguments = argparse.Namespace(shortest=None, micro_batch_tokens=None, tensor=1, set=[])
    return bench.command(run, work, arguments, Path("model"), Path("run"))


def test_without_flash_attn_all_runs_on_a_gpu_take_cudnns_attention(bench, monkeypatch) -> None:
    """Check verl's default, ``flash``: it switches every other kernel off."""
    fused = "engine.override_transformer_config.attention_backend=fused"
    without(monkeypatch, "flash_attn")
    assert all(fused in settings(bench, run, "cuda") for run in ("megatron", "megatron:fused", "megascend"))
    assert fused not in settings(bench, "megatron", "cpu")


def test_options_of_verls_megatron_engine(bench) -> None:
    """Check that the third run adds verl's kernels to the second, and megascend's run has neither option."""
    fusion, kernels = "+engine.override_transformer_config.apply_rope_fusion=True", "model.use_fused_kernels=True"
    commands = {run: settings(bench, run, "cuda") for run in ("megatron", "megatron:fused", "megatron:kernels")}
    assert [fusion in command for command in commands.values()] == [False, True, True]
    assert [kernels in command for command in commands.values()] == [False, False, True]
    megascend_command = settings(bench, "megascend", "cuda")
    assert fusion not in megascend_command
    assert kernels not in megascend_command


def test_disagreeing_runs_are_reported(bench) -> None:
    figures = bench.Figures(loss=[2.0, 1.0], norm=[3.0, 3.0], tokens=[64, 64])
    assert bench.disagreement(figures, bench.Figures([2.0, 1.01], [3.0, 3.0], [64, 64]), 2e-2) == ""
    other = bench.Figures([2.0, 1.03], [3.0, 3.0], [64, 64])
    assert bench.disagreement(figures, other, 2e-2) == "loss of step 2: 1.03, not 1"
    assert bench.disagreement(figures, bench.Figures([2.0, float("nan")], [3.0, 3.0], [64, 64]), 2e-2)


def test_failure_cause_is_the_text_before_torchruns_report(bench) -> None:
    text = "step 1\nMemoryError: no room\nE1124 torch/distributed/elastic/multiprocessing/api.py failed\nTraceback\n"
    assert bench.cause(text) == "step 1\nMemoryError: no room"
