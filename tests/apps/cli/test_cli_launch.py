"""Local launch of ranks: the result, and the root cause of several failures."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megascend.apps.cli.launch import WorkerError, launch, start_failure
from megascend.apps.train.preflight import check_processes
from megascend.errors import ConfigError, DataError, PlatformError
from megascend.runtime.platforms.cpu import CpuPlatform
from megascend.testing import faults


def ranks_see_torchrun_variables(word: str) -> tuple[str, str, str, str]:
    return word, os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"]


def rank_1_finds_a_mistake(sign: Path) -> None:
    if os.environ["RANK"] == "1":
        sign.touch()
        raise DataError("chat.jsonl:7: broken")
    while not sign.exists():
        time.sleep(0.001)
    raise RuntimeError("Connection closed by peer")


def rank_0_is_killed() -> None:
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_full_shared_memory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a container whose /dev/shm is full, so that no semaphore can be created."""
    from multiprocessing import synchronize

    def no_room(self: object, *arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(synchronize.SemLock, "__init__", no_room)
    with pytest.raises(PlatformError, match=r"--nproc 2: the processes cannot be started: .*No space left on device"):
        launch(ranks_see_torchrun_variables, "hello", nproc=2)
    with faults.full_disk(4096) as disk:
        message = start_failure(OSError(errno.ENOSPC, "No space left on device"), 2, disk)
    assert f"{disk} is full, and about 128 KiB of it are needed" in message
    assert "--shm-size" in message


@pytest.mark.nightly  # covered: killed worker is named
def test_root_cause_wins_over_its_consequences(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^chat\.jsonl:7: broken$"):
        launch(rank_1_finds_a_mistake, tmp_path / "sign", nproc=2)


def test_killed_worker_is_named() -> None:
    with pytest.raises(WorkerError, match=r"rank 0 .* SIGKILL"):
        launch(rank_0_is_killed, nproc=2)


def test_process_limit_is_devices_or_four_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    check_processes("cpu", 8)
    with pytest.raises(
        ConfigError, match=r"--nproc 9: .* may use 2 cores, .* 4 processes a core, 8 in all: start fewer"
    ):
        check_processes("cpu", 9)
    monkeypatch.setattr("megascend.runtime.platforms.choose", lambda name: TwoDevices())
    check_processes("auto", 2)
    with pytest.raises(
        ConfigError, match="--nproc 3: platform cpu has 2 devices on this host, and every process needs one"
    ):
        check_processes("auto", 3)


class TwoDevices(CpuPlatform):
    def device_count(self) -> int:
        return 2


def test_signal_during_start_ends_launcher_and_ranks(tmp_path: Path) -> None:
    """Send a signal while 8 ranks import torch, before they can handle signals."""
    program = (
        "from megascend.apps.cli.launch import launch\n"
        "from test_cli_launch import ranks_see_torchrun_variables\n"
        "launch(ranks_see_torchrun_variables, 'hello', nproc=8)"
    )
    command = [sys.executable, "-c", program]
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}) as launcher:
        process = psutil.Process(launcher.pid)
        deadline = time.monotonic() + 120
        while len(workers := process.children()) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        launcher.terminate()
        assert launcher.wait(timeout=60) == 143
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []
