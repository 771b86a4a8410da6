"""Kernels compiled ahead of time, without a device context, are all that a run's first step needs. Needs a CUDA GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megascend.apps.train.prefetch import job_of
from megascend.apps.train.preflight import check_run
from megascend.config import RunConfig

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")

LINE = {"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two, three, four."}]}
LORA = {"lora": {"rank": 4}}


def run(*command: str) -> None:
    completed = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stdout[-1000:] + completed.stderr[-3000:]


def compiled(folder: Path) -> dict[str, str]:
    """List Triton's cache: device code by kernel name, and launcher stubs."""
    files = [path for pattern in ("*.cubin", "*.so") for path in folder.rglob(pattern)]
    return {str(path.relative_to(folder)): path.name for path in files}


@pytest.mark.parametrize("settings", [{}, LORA, {"batching": {"packing": False}}], ids=["whole", "adapter", "padded"])
def test_run_compiles_nothing_after_compile_ahead(tmp_path, monkeypatch, settings):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("MEGASCEND_CACHE", str(tmp_path / "cache"))
    run("megascend", "new-model", str(tmp_path / "model"), "--hidden", "32", "--layers", "2")
    (tmp_path / "chat.jsonl").write_text(16 * (json.dumps(LINE) + "\n"))
    config = {
        "model": str(tmp_path / "model"),
        "output": str(tmp_path / "out"),
        "steps": 1,
        "platform": "cuda",
        "data": {"path": str(tmp_path / "chat.jsonl"), "global_batch_size": 4},
        **settings,
    }
    job = job_of(check_run(RunConfig.model_validate(config), 1, overwrite=False))
    run("megascend.training.kernels.compile_ahead", job.to_text())
    assert Path(job.done_file).is_file()
    precompiled = compiled(tmp_path / "triton")
    assert (
        len(precompiled) >= 10
    )  # two kernels each of attention, SwiGLU and softmax, their stubs, and that of the driver

    (tmp_path / "run.yaml").write_text(json.dumps(config))
    run("megascend", "train", str(tmp_path / "run.yaml"))
    after = compiled(tmp_path / "triton")
    assert set(precompiled) <= set(after)
    assert {name: after[name] for name in set(after) - set(precompiled)} == {}


def test_compile_ahead_creates_no_context(tmp_path):
    """Check that no context exists: on a device in exclusive mode it would block the run."""
    program = (
        "import ctypes, sys\nfrom megascend.training.kernels import compile_ahead as ahead\n"
        "job = ahead.Job('bfloat16', 0, (True,), ahead.Attention(2, 2, 16, 16, True, True), 64, 512, '')\n"
        "assert ahead.compile_all(job, ahead.capability(0)) == 6\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "cuda, active, flags = ctypes.CDLL(ahead.DRIVER), ctypes.c_int(-1), ctypes.c_uint()\n"
        "assert cuda.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0\n"
        "assert active.value == 0, active\n"
    )
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, env=environment
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
