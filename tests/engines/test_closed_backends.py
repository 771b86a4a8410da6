"""What a closed backend leaves in its process: nothing that grows with their number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megascend.testing import write_tiny_checkpoint
from support.forked_programs import run_forked

PROGRAM = """
import gc, json, os, sys
import megascend
engine, model, folder = sys.argv[1:]
closed = []
megascend.bootstrap("cpu", engine=engine)
for number in range(3):
    backend = megascend.make_backend(engine, model=model, precision="fp32", self_check=False)
    backend.forward_backward(backend.shard([megascend.Sample.causal([5, 6, 7])]), loss="cross_entropy")
    backend.optimizer_step()
    backend.save(f"{folder}/{number}")
    backend.close()
    if engine == "single":  # what is closed is gone, although a program still has the object
        closed.append(backend)
    del backend
    gc.collect()
    print(json.dumps([len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))]))
"""


@pytest.mark.parametrize("engine", ["megatron", "fsdp", "single"])
@pytest.mark.nightly_cases("single")  # covered: fsdp, of which it has a part
def test_threads_and_files_do_not_grow_with_closed_backends(engine: str, tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model", "qwen3")
    completed = run_forked(PROGRAM, engine, model, tmp_path)
    assert completed.returncode == 0, completed.stderr[-3000:]
    counts = [json.loads(line) for line in completed.stdout.splitlines() if line.startswith("[")]
    assert counts[1] == counts[2], counts
