"""Run a function on N real ranks of this machine: forked processes, real collectives, and a deadline.

The ranks are forked from the running process, so that imports (torch, Megatron: seconds) happen once, and the function may be a
closure. They connect through a file store and need no port.
"""

from __future__ import annotations

import functools
import gc
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import simnpu
from megascend.errors import DistributedTestError, ProcessGroupError
from megascend.testing._rank import RankFiles, RankOutcome, run_rank

T = TypeVar("T")

# Megatron-Core 0.19 and torch._inductor call torch.cuda.is_available() while they are imported. Without this variable that asks
# the CUDA driver, and no fork of the process can use a GPU from then on; with it, it asks NVML.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

POLL_S = 0.005
GRACE_S = 0.3  # after the first failure: time for failures that explain each other to arrive
LOST_PEER_S = 5.0  # the same where each failure so far is a connection that a peer has closed
LOST_PEER = re.compile(r"Connection (closed|reset) by peer")  # gloo's words
EXIT_S = 30.0  # for ranks that have started to exit: a busy machine may take a while
STACK_S = 10.0  # after the deadline: time for hanging ranks to write their stacks
PF_EXITING = 0x4  # linux/sched.h
OUTPUT_TAIL = 4000  # characters of a rank's output shown in an error


def run_distributed(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout_s: float = 180.0,
    backend: str = "gloo",
    init: bool = True,
    expect_lost: Collection[int] = (),
    **kwargs: Any,
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` on ``world_size`` ranks and return their results in rank order.

    Every rank has ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` set, one torch thread, and starts
    with a copy of the caller's memory (random states included). Import what ``fn`` needs before the call: it is then
    imported once instead of on every rank. Results come back pickled, tensors by value; they have to be on the CPU.

    Args:
        fn: any callable, closures included; nothing but its result is pickled.
        timeout_s: deadline of the whole call, in seconds.
        backend: backend of the default process group.
        init: create the default process group. With False, ``fn`` creates it itself; the environment variable
            ``MEGASCEND_STORE`` then holds the path for a ``torch.distributed.FileStore``, as
            :func:`megascend.runtime.distributed.process_groups.initialize` expects.
        expect_lost: ranks that are to die, stop or hang. The call does not wait for them, and their result is a
            :class:`Lost`. One that returns or raises after all is a failure.

    Raises:
        DistributedTestError: a rank raised, died or did not finish in time. The message holds, for each such rank, its
            traceback, signal or exit code, or Python stack, and the end of its output. Where a rank's exception can be
            pickled, it is the error's ``__cause__``. No rank survives the call.
        ProcessGroupError: the caller has a default process group or an initialised GPU, which a fork cannot share.

    On CUDA, import this module before Megatron-Core 0.19: it sets ``PYTORCH_NVML_BASED_CUDA_CHECK``, without which that import
    leaves a process whose forks cannot use a GPU.
    """
    _check_forkable(world_size)
    with tempfile.TemporaryDirectory(prefix="megascend-ranks-") as folder:
        ranks = [Rank(RankFiles(Path(folder), rank)) for rank in range(world_size)]
        # Ranks block in reading this pipe, and exit together when the parent closes its end.
        release_read, release_write = os.pipe()
        try:
            for rank in ranks:
                rank.pid = _fork(
                    functools.partial(fn, *args, **kwargs),
                    rank.files,
                    world_size,
                    backend if init else None,
                    timeout_s,
                    (release_read, release_write),
                )
            survivors = [rank for rank in ranks if rank.files.rank not in expect_lost]
            lost_ranks = [rank for rank in ranks if rank.files.rank in expect_lost]
            _wait(survivors, lost_ranks, time.monotonic() + timeout_s, timeout_s)
            _wait_for_exit(lost_ranks, GRACE_S)
            # Lets the ranks exit, while their results are unpickled.
            os.close(release_write)
            release_write = -1
            results: list[Any] = [
                pickle.loads(rank.outcome.result) if rank.outcome else Lost(rank.status) for rank in ranks
            ]
            _wait_for_exit(survivors)
        finally:
            for rank in ranks:
                rank.kill()
            os.close(release_read)
            if release_write >= 0:
                os.close(release_write)
    return results


@dataclass(frozen=True)
class Lost:
    """Result of a rank that was expected to be lost.

    Attributes:
        status: exit code of the rank, or minus the signal that killed it; None if it still ran, or was stopped, when all
            others had finished.
    """

    status: int | None


@dataclass
class Rank:
    """The parent's view of one rank."""

    files: RankFiles
    pid: int = 0
    status: int | None = None  # exit code, or minus the signal; None while it runs
    ended_at: float = 0.0
    outcome: RankOutcome | None = None

    def __post_init__(self) -> None:
        self._outcome = str(self.files.outcome)  # looked for every POLL_S

    def poll(self) -> None:
        """Read the outcome file if it is there, and reap the process if it has ended."""
        if self.status is None:
            # WNOWAIT leaves a zombie: its id stays reserved until the process group has been killed.
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                self._reap()
        if self.outcome is None and os.path.exists(self._outcome):
            self.outcome = pickle.loads(self.files.outcome.read_bytes())

    def kill(self) -> None:
        """End the process and everything it started. Harmless if it is gone."""
        if self.pid and self.status is None:
            self._kill_group()
            self._reap()

    def _kill_group(self) -> None:
        for kill in (os.killpg, os.kill):  # right after the fork the process is not yet a group of its own
            try:
                kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _reap(self) -> None:
        if self.status is None:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            self._kill_group()  # before reaping, while the id cannot belong to anybody else
            _, status = os.waitpid(self.pid, 0)
            self.status = os.waitstatus_to_exitcode(status)
            self.ended_at = time.monotonic() - 2 * POLL_S

    @property
    def failed_at(self) -> float | None:
        """Return when this rank failed, or None. A death counts a little earlier, being noticed late."""
        if self.outcome is not None:
            return self.outcome.ended_at if self.outcome.failure else None
        return self.ended_at if self.status is not None else None

    @property
    def lost_a_peer(self) -> bool:
        """Check whether this rank failed because another one closed its connections."""
        return self.outcome is not None and bool(LOST_PEER.search(self.outcome.failure or ""))

    def report(self) -> str:
        """Describe what went wrong on this rank."""
        rank = f"rank {self.files.rank}"
        if self.outcome is not None and self.outcome.failure:
            text = f"{rank} raised:\n{self.outcome.failure.rstrip()}"
        elif self.status is not None and self.status < 0:
            text = f"{rank} died by signal {-self.status} ({signal.Signals(-self.status).name})"
        elif self.status is not None:
            text = f"{rank} exited with code {self.status} before its function returned"
        else:
            stack = (
                _from_function(self.files.stack.read_text(errors="replace", encoding="utf-8"))
                if self.files.stack.exists()
                else ""
            )
            text = f"{rank} did not finish; its Python stack:\n{stack or '(none: it did not answer SIGUSR1)'}"
        output = self.files.output.read_text(errors="replace", encoding="utf-8") if self.files.output.exists() else ""
        return f"{text}\n--- output of {rank} ---\n{output[-OUTPUT_TAIL:].rstrip()}" if output.strip() else text


def _from_function(stack: str) -> str:
    """Return a faulthandler stack without the frames below the rank's function: the caller's own, copied by the fork."""
    result, below = [], False
    for line in stack.splitlines():
        below = (below or "in _run_call" in line) and line.startswith(" ")
        if not below:
            result.append(line)
    return "\n".join(result).rstrip()


def _check_forkable(world_size: int) -> None:
    if world_size < 1:
        raise ProcessGroupError(f"run_distributed needs world_size >= 1, got {world_size}")
    import torch
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        raise ProcessGroupError(
            "run_distributed forks ranks, and the calling process already has a default process group: "
            "call torch.distributed.destroy_process_group() first"
        )
    if torch.cuda.is_initialized() and not simnpu.is_active():  # the simulated device is CPU memory, which forks
        raise ProcessGroupError(
            "run_distributed forks ranks, and the calling process has already used CUDA, which does not survive a "
            "fork: keep GPU work inside the function that the ranks run"
        )


def _fork(
    call: Callable[[], Any],
    files: RankFiles,
    world_size: int,
    backend: str | None,
    timeout_s: float,
    release: tuple[int, int],
) -> int:
    parent = os.getpid()
    # Buffered output would be written once by the parent and once by each rank.
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+: a fork of a process with threads
        pid = os.fork()
    if pid == 0:
        gc.freeze()  # otherwise a collection would write to, and so copy, the pages of half a million objects of imports
        os.close(release[1])
        run_rank(call, files, world_size, backend, timeout_s, parent, release[0])
    return pid


def _wait(ranks: list[Rank], lost_ranks: list[Rank], deadline: float, timeout_s: float) -> None:
    """Return when every one of ``ranks`` has a result; raise on the first failure or at the deadline."""
    while True:
        for rank in [*ranks, *lost_ranks]:
            rank.poll()
        for rank in lost_ranks:
            if rank.outcome is not None:
                event = rank.report() if rank.outcome.failure else f"rank {rank.files.rank} returned"
                raise DistributedTestError(f"rank {rank.files.rank} was expected to be lost, but {event}")
        if any(rank.failed_at is not None for rank in ranks):
            raise _failure(ranks)
        if all(rank.outcome is not None for rank in ranks):
            return
        if time.monotonic() > deadline:
            raise _hang(ranks, timeout_s)
        time.sleep(POLL_S)


def _failure(ranks: list[Rank]) -> DistributedTestError:
    """Name the rank that failed first, then those that failed right after it, often because of it."""
    start = time.monotonic()

    def cause_is_missing() -> bool:
        return all(rank.failed_at is None or rank.lost_a_peer for rank in ranks)

    while time.monotonic() < start + (LOST_PEER_S if cause_is_missing() else GRACE_S):
        time.sleep(POLL_S)
        for rank in ranks:
            rank.poll()
    # A crash dump delays the end of a rank that died, so the error of a peer that lost its connection can come before it.
    failed = sorted(
        (rank for rank in ranks if rank.failed_at is not None),
        key=lambda rank: (rank.lost_a_peer, rank.failed_at or 0.0),
    )
    first, later = failed[0], failed[1:]
    message = f"{first.report()}\n(world size {len(ranks)}; the other ranks were killed)"
    for rank in later:
        message += f"\n\nlater, {rank.report()}"
    error = DistributedTestError(message)
    if first.outcome is not None and first.outcome.error:
        error.__cause__ = pickle.loads(first.outcome.error)
    return error


def _hang(ranks: list[Rank], timeout_s: float) -> DistributedTestError:
    hanging = [rank for rank in ranks if rank.outcome is None]
    for rank in hanging:
        os.kill(rank.pid, signal.SIGUSR1)  # not reaped yet, so the id still belongs to this rank
    until, previous = time.monotonic() + STACK_S, []
    while time.monotonic() < until:
        sizes = [rank.files.stack.stat().st_size if rank.files.stack.exists() else 0 for rank in hanging]
        if all(sizes) and sizes == previous:  # the writers have reached the end of their stacks
            break
        previous = sizes
        time.sleep(0.1)
    numbers = ", ".join(str(rank.files.rank) for rank in hanging)
    reports = "\n\n".join(rank.report() for rank in hanging)
    return DistributedTestError(
        f"ranks {numbers} of {len(ranks)} did not finish within {timeout_s:g} s and were killed\n\n{reports}"
    )


def _wait_for_exit(ranks: list[Rank], timeout_s: float = 2.0) -> None:
    """Wait a moment for finished ranks to exit; ranks that have started to exit get more time."""
    start = time.monotonic()
    while survivors := [rank.pid for rank in ranks if rank.status is None]:
        left = start + timeout_s - time.monotonic()
        # Freeing the memory of a rank can take seconds on a busy machine; killing it then would count as a failure.
        if left < -EXIT_S or (left < 0 and not any(map(_is_exiting, survivors))):
            return
        for rank in ranks:
            rank.poll()
        time.sleep(POLL_S)


def _is_exiting(pid: int) -> bool:
    """Check whether the kernel is already cleaning up a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    # After the last ")": the command in field 2 may contain spaces and parentheses. Field 9 has the flags (proc_pid_stat(5)).
    return bool(int(stat.rpartition(")")[2].split()[6]) & PF_EXITING)
