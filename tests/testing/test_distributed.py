"""Results and errors of forked ranks in run_distributed. Every failure names its rank and leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from megascend.errors import DistributedTestError, ProcessGroupError
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


def test_results_are_returned_in_rank_order() -> None:
    offset = torch.arange(3.0)

    def add(factor: float, *, shift: float) -> tuple[int, torch.Tensor]:
        value = offset * factor + shift + dist.get_rank()
        dist.all_reduce(value)
        return dist.get_rank(), value

    results = run_distributed(add, 3, 2.0, shift=1.0, timeout_s=30)
    assert [rank for rank, _ in results] == [0, 1, 2]
    for _, value in results:
        assert value.tolist() == [6.0, 12.0, 18.0]


def test_every_rank_has_its_environment_and_one_thread() -> None:
    def environment() -> tuple[str, ...]:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        return (*(os.environ[name] for name in names), str(torch.get_num_threads()))

    before = dict(os.environ)
    assert run_distributed(environment, 2, timeout_s=30) == [("0", "0", "2", "2", "1"), ("1", "1", "2", "2", "1")]
    assert dict(os.environ) == before


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


def test_death_by_signal_is_reported(tmp_path: Path) -> None:
    def die() -> None:
        write_pid(tmp_path)
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        dist.barrier()

    with pytest.raises(DistributedTestError, match=r"^rank 0 died by signal 11 \(SIGSEGV\)"):
        run_distributed(die, 2, timeout_s=30)
    assert all(has_ended(pid) for pid in pids(tmp_path))


def test_processes_started_by_a_rank_die_with_it(tmp_path: Path) -> None:
    def start_child() -> None:
        child = subprocess.Popen(["sleep", "1000"])
        (tmp_path / "pid-child").write_text(str(child.pid))

    run_distributed(start_child, 1, timeout_s=30)
    deadline = time.monotonic() + 60
    while not all(has_ended(pid) for pid in pids(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.01)
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


def test_caller_with_a_process_group_raises_process_group_error() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ProcessGroupError, match="already has a default process group"):
            run_distributed(dist.get_rank, 2)
    finally:
        dist.destroy_process_group()
