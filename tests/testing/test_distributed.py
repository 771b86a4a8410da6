"""Results and errors of forked ranks in run_distributed. Every failure names its rank and leaves no process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from megascend.errors import DistributedTestError
from megascend.testing import run_distributed

pytestmark = pytest.mark.waiting


def has_ended(pid: int) -> bool:
    """Check that no process, or only a zombie, has this id."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def write_pid(folder: Path) -> None:
    (folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("pid-*"))]


def test_exception_is_reported_with_rank_traceback_output_and_cause(tmp_path: Path) -> None:
    def fail_on_one() -> None:
        write_pid(tmp_path)
        print("about to work", flush=True)
        if dist.get_rank() == 1:
            raise KeyError("lost shard")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(DistributedTestError) as caught:
        run_distributed(fail_on_one, 3, timeout_s=200)
    assert time.monotonic() - start < 100
    message = str(caught.value)
    assert message.startswith("rank 1 raised:\nTraceback")
    assert "KeyError: 'lost shard'" in message
    assert "fail_on_one" in message
    assert "about to work" in message
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(pids(tmp_path)) == 3
    assert all(has_ended(pid) for pid in pids(tmp_path))


def test_hanging_ranks_are_named_with_their_stacks_and_killed(tmp_path: Path) -> None:
    def sleep_for_ever() -> None:
        time.sleep(1000)

    def hang_on_two() -> None:
        write_pid(tmp_path)
        if dist.get_rank() == 2:
            sleep_for_ever()

    start = time.monotonic()
    with pytest.raises(DistributedTestError, match=r"ranks 2 of 3 did not finish within 6 s") as caught:
        run_distributed(hang_on_two, 3, timeout_s=6)
    assert time.monotonic() - start < 100  # the ranks sleep for 1000
    assert "in sleep_for_ever" in str(caught.value)
    assert "pytest" not in str(caught.value).split("in hang_on_two")[1]
    assert "rank 0" not in str(caught.value)
    assert all(has_ended(pid) for pid in pids(tmp_path))


def test_ranks_die_with_a_killed_parent(tmp_path: Path) -> None:
    program = f"""
import os, time
from pathlib import Path
from megascend.testing import run_distributed
def hang():
    Path({str(tmp_path)!r}, "pid-" + os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(1000)
run_distributed(hang, 2, timeout_s=1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 200
    while len([path for path in tmp_path.glob("pid-*") if path.read_text()]) < 2:
        assert time.monotonic() < deadline, "the ranks did not start"
        assert parent.poll() is None, "the parent ended before it was killed"
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    while not all(has_ended(pid) for pid in pids(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(has_ended(pid) for pid in pids(tmp_path))
