"""What a closed backend leaves in its process: nothing."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from megascend.backends import make_backend
from megascend.bootstrap.runtime import Runtime
from megascend.testing import run_distributed, write_tiny_checkpoint


@pytest.mark.parametrize("engine", ["megatron"])
def test_threads_and_files_do_not_grow_with_closed_backends(engine: str, tmp_path: Path, runtime: Runtime) -> None:
    model = write_tiny_checkpoint(tmp_path / "model", "qwen3")

    def work() -> list[tuple[int, int]]:
        counts = []
        for _ in range(3):
            make_backend(engine, model=model, precision="fp32", self_check=False).close()
            gc.collect()
            counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
        return counts

    (counts,) = run_distributed(work, 1, init=False)
    assert counts[1] == counts[2]
