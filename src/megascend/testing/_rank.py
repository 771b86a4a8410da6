"""The forked side of :func:`megascend.testing.run_distributed`: one rank, from the fork to its ``os._exit``."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from megascend.apps.cli.messages import RankFormatter
from megascend.runtime.io.atomic import replacing
from megascend.surroundings import die_with_parent

STORE_VARIABLE = "MEGASCEND_STORE"


@dataclass(frozen=True)
class RankFiles:
    """Paths of the files that one rank writes for its parent."""

    folder: Path
    rank: int

    @property
    def outcome(self) -> Path:
        return self.folder / f"rank-{self.rank}.outcome"

    @property
    def output(self) -> Path:
        return self.folder / f"rank-{self.rank}.output"

    @property
    def stack(self) -> Path:
        return self.folder / f"rank-{self.rank}.stack"


@dataclass(frozen=True)
class RankOutcome:
    """Outcome of a rank's function. ``ended_at`` is ``time.monotonic()``, which all processes of a machine share.

    Exactly one of ``result`` (pickled) and ``failure`` (a formatted traceback) is meaningful; ``error`` is the pickled
    exception where it can be pickled.
    """

    ended_at: float
    result: bytes = b""
    failure: str = ""
    error: bytes = b""


def run_rank(
    call: Callable[[], Any],
    files: RankFiles,
    world_size: int,
    backend: str | None,
    timeout_s: float,
    parent: int,
    release: int,
) -> NoReturn:
    """Run ``call`` as rank ``files.rank``, write its outcome to a file, wait for the other ranks, exit. Never returns.

    Args:
        backend: backend of the default group to create, or None to leave that to ``call``.
        parent: process id of the process that forked this one.
        release: descriptor that reads end-of-file when every rank has finished. A rank waits for it, since a peer may
            still be reading from this rank's sockets.
    """
    try:
        die_with_parent(parent)
        gc.freeze()  # garbage of the parent may own threads (process groups), which a fork does not copy: never collect it here
        os.setpgid(0, 0)  # a process group of its own, so that it can be killed together with everything it starts
        _capture_output(files.output)
        with open(files.stack, "w", encoding="utf-8") as stack:
            faulthandler.enable(sys.stderr)  # a crash shows its stack in this rank's output
            faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
            outcome = _run_call(call, files, world_size, backend, timeout_s)
            # Written by a rename: the parent reads the file as soon as it exists.
            with replacing(files.outcome) as fresh:
                fresh.write_bytes(pickle.dumps(outcome))
            sys.stdout.flush()
            sys.stderr.flush()
            os.read(release, 1)
        os._exit(0)
    finally:
        os._exit(70)  # EX_SOFTWARE: reached only if the lines above failed


def _run_call(
    call: Callable[[], Any], files: RankFiles, world_size: int, backend: str | None, timeout_s: float
) -> RankOutcome:
    try:
        _set_environment(files, world_size)
        _log_to_output()
        _set_up_torch(files, world_size, backend, timeout_s)
        return RankOutcome(result=pickle.dumps(call()), ended_at=time.monotonic())
    except BaseException as error:  # noqa: BLE001  SystemExit and pytest's outcomes are failures of the rank too
        time_s = time.monotonic()
        try:
            pickled = pickle.dumps(error)
            # Some exceptions can be pickled and not be loaded again, because their constructor takes other arguments.
            pickle.loads(pickled)
        except Exception:  # noqa: BLE001  an exception that cannot travel: its traceback does
            pickled = b""
        return RankOutcome(failure=traceback.format_exc(), error=pickled, ended_at=time_s)


def _set_environment(files: RankFiles, world_size: int) -> None:
    # Left by a launcher around the tests: torch would connect to its store.
    for stale in ("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(stale, None)
    os.environ.update(
        RANK=str(files.rank),
        LOCAL_RANK=str(files.rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    os.environ[STORE_VARIABLE] = str(files.folder / "store")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; a host name may not resolve


def _log_to_output() -> None:
    """Write this rank's log messages to its output, independent of the parent's handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(RankFormatter())
    logging.getLogger("megascend").addHandler(handler)


def _set_up_torch(files: RankFiles, world_size: int, backend: str | None, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    # Ranks share the machine's cores.
    torch.set_num_threads(1)
    if backend is not None:
        dist.init_process_group(
            backend,
            store=dist.FileStore(str(files.folder / "store"), world_size),
            rank=files.rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )


def _capture_output(path: Path) -> None:
    """Send this process's output, Python's and C++'s, to ``path``."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    # On the descriptors, not only sys.stdout: libraries in C++ write there directly.
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
