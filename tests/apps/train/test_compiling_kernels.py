"""Kernels compiled ahead of a run on CUDA: the job, from the model's files and the settings, and its process."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from megascend.apps.train import prefetch
from megascend.apps.train.prefetch import compiling_kernels, job_of
from megascend.apps.train.preflight import RunPlan, check_run
from megascend.config import RunConfig
from megascend.runtime.distributed.launch import Launch
from megascend.testing.tiny_models import write_tiny_checkpoint
from megascend.training.kernels import compile_ahead
from megascend.training.kernels.compile_ahead import Attention, Job


@pytest.fixture(autouse=True)
def triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set Triton's cache folder and a fake version, so that Triton need not be installed."""
    version = compile_ahead.metadata.version
    monkeypatch.setattr(compile_ahead.metadata, "version", lambda name: "3.6.0" if name == "triton" else version(name))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    (tmp_path / "triton").mkdir()
    return tmp_path / "triton"


def plan(
    folder: Path, arch: str = "qwen3", settings: dict[str, Any] | None = None, **overrides: Any
) -> RunPlan[RunConfig]:
    model = write_tiny_checkpoint(folder / f"{arch}-{len(overrides)}", arch, **overrides)
    values = {"model": str(model), "output": str(folder / "out"), "data": {"path": str(folder / "x.jsonl")}}
    config = RunConfig.model_validate(values | (settings or {}))
    return check_run(config, config.parallel.tensor * config.parallel.context, overwrite=False)


def test_job_has_the_sizes_of_the_model(tmp_path, triton):
    run = plan(tmp_path)
    raw = json.loads((run.config.model / "config.json").read_text())
    job = job_of(run)
    groups = raw["num_key_value_heads"]
    assert job == Job(
        dtype="bfloat16",
        device=0,
        packed=(True, False),
        attention=Attention(groups, raw["num_attention_heads"] // groups, raw["head_dim"], raw["head_dim"], True, True),
        gated=raw["intermediate_size"],
        vocabulary=raw["vocab_size"],
        done_file=job.done_file,
    )
    assert Path(job.done_file).parent == triton
    assert Job.parse(job.to_text()) == job


@pytest.mark.parametrize(
    ("arch", "settings", "overrides", "attention", "gated"),
    [
        ("llama", {}, {}, True, True),
        ("qwen3", {"parallel": {"context": 2}}, {}, False, True),
        ("qwen3", {}, {"head_dim": 24}, False, True),
        ("qwen3", {}, {"hidden_act": "gelu"}, True, False),
        ("qwen3_moe", {}, {}, True, False),
    ],
)
def test_job_omits_kernels_that_are_not_used(tmp_path, arch, settings, overrides, attention, gated):
    job = job_of(plan(tmp_path, arch, settings, **overrides))
    assert (job.attention is not None, job.gated is not None) == (attention, gated)
    if arch == "llama":
        assert job.attention is not None
        assert not job.attention.norms


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Record the started processes. ``CDLL(None)`` stands in for CUDA's driver here, but not in those processes."""
    processes: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(compile_ahead, "DRIVER", None)
    monkeypatch.setattr(
        prefetch.subprocess,
        "Popen",
        lambda *arguments, **options: processes.append(popen(*arguments, **options)) or processes[-1],
    )
    return processes


def test_busy_process_is_killed(tmp_path, started, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/sleep")
    monkeypatch.setattr(Job, "to_text", lambda job: "100")
    popen = prefetch.subprocess.Popen
    monkeypatch.setattr(prefetch.subprocess, "Popen", lambda command, **options: popen([command[0], "100"], **options))
    with compiling_kernels(plan(tmp_path), Launch()):
        assert started[0].poll() is None
    assert started[0].returncode == -9


def test_no_process_is_started_if_it_is_useless(tmp_path, started, triton, monkeypatch):
    def begin(launch: Launch = Launch(), **settings: Any) -> None:  # noqa: B008  frozen
        with compiling_kernels(plan(tmp_path, settings=settings), launch):
            pass

    begin(platform="cpu")
    begin(engine="fsdp")
    begin(Launch(rank=1, local_rank=1, world_size=2, local_size=2))
    Path(job_of(plan(tmp_path)).done_file).touch()
    begin()
    monkeypatch.setattr(compile_ahead, "DRIVER", "libnosuchdriver.so.1")
    begin(precision="fp32")
    monkeypatch.setattr(compile_ahead, "DRIVER", None)
    with monkeypatch.context() as broken:
        broken.setattr(compile_ahead.metadata, "version", missing)
        begin(precision="fp32")
    assert started == []
    begin(precision="fp32")
    assert len(started) == 1


def missing(name: str) -> str:
    raise PackageNotFoundError(name)
