"""Starting the ranks of a run on this machine, with torch's own elastic launcher (the one under ``torchrun``)."""

from __future__ import annotations

import atexit
import errno
import gc
import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend import errors
from megascend.cli.stop_launch import EXIT_INTERRUPTED, StopLaunch, ended_by_signal, in_a_thread
from megascend.errors import MegascendError, PlatformError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


SEMAPHORES = 64 * 1024
"""Bytes of shared memory that the launcher's semaphores for a process take at most."""


class WorkerError(MegascendError, RuntimeError):
    """A worker process ended in a way that is not one of our own errors: an exception, a signal, an exit code."""


def under_torchrun() -> bool:
    """True if somebody else already started the ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(function: Callable[..., Any], *args: Any, nproc: int) -> Any:
    """Call ``function(*args)`` in ``nproc`` fresh processes that see torchrun's environment; return rank 0's result.

    ``function`` must be importable by name. OMP_NUM_THREADS is 1 in the workers unless it is set, as under torchrun.
    Signals that stop a run are passed on to the workers (SIGINT as SIGTERM), and their results waited for: they may take as long
    as they need to finish a step and save.

    Raises:
        KeyboardInterrupt: SIGINT came a second time, or before the workers could handle it; they are gone.
        SystemExit: another of them came before the workers could handle it; the code is 128 and its number.
        PlatformError: the processes cannot be started: ``/dev/shm`` is full, for example.
        MegascendError: the first error of our hierarchy that a worker raised, with the worker's message.
        WorkerError: a worker failed in another way; the message holds its traceback or its signal.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with (
        tempfile.TemporaryDirectory(prefix="megascend-launch-") as folder,
        _environment_default("OMP_NUM_THREADS", "1"),
        _environment_default(
            "TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
        ),  # set by torch, for good
        _quiet("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing"),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        with StopLaunch() as stop:
            try:
                return in_a_thread(elastic_launch(config, call), function, args, os.getpid(), stop=stop)[0]
            except ChildFailedError as failure:
                cause = root_cause(failure, Path(folder))
                if stop.received and isinstance(cause, WorkerError) and ended_by_signal(failure):
                    stop.exit()
            except OSError as error:
                raise PlatformError(why_not_started(error, nproc)) from error
    raise cause


def why_not_started(error: OSError, nproc: int, semaphores: Path = Path("/dev/shm")) -> str:
    """Say why the launcher could not start ``nproc`` processes: where semaphores lie, containers have little room."""
    text = f"--nproc {nproc}: the processes cannot be started: {error}"
    if (
        error.errno != errno.ENOSPC
        or not semaphores.is_dir()
        or shutil.disk_usage(semaphores).free > SEMAPHORES * nproc
    ):
        return text
    return (
        f"{text}; {semaphores} is full, and about {SEMAPHORES * nproc // 1024} KiB of it are needed: empty it, give "
        "the container more (docker run --shm-size=1g, or --ipc=host), or start the processes with torchrun, which needs none"
    )


def call(function: Callable[..., Any], args: tuple[Any, ...], launcher: int) -> Any:
    """Call ``function(*args)`` in a worker; ends the process if there is nobody left to tell the result."""
    atexit.register(gc.freeze)  # as in the command's own process
    try:
        result = function(*args)
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None  # the launcher would take this for a worker that is still busy
    if os.getppid() != launcher:
        raise SystemExit(EXIT_INTERRUPTED)
    return result


def root_cause(failure: ChildFailedError, folder: Path) -> MegascendError:
    """The error that started it: one of ours if any worker recorded one, else the failure that the launcher saw first.

    A rank that dies makes its peers fail too (a closed connection, SIGTERM from the launcher), often within the same
    moment, and the launcher reports a single one; what each worker recorded lies in ``folder``.
    """
    for path in sorted(folder.rglob("error.json"), key=lambda path: path.stat().st_mtime_ns):
        ours = _our_error(_message(json.loads(path.read_text(encoding="utf-8"))["message"]))
        if ours is not None:
            return ours
    rank, worker = failure.get_first_failure()
    message: Any = worker.message  # what the worker recorded, or a sentence of the launcher's if it recorded nothing
    if isinstance(message, dict):
        trace = message.get("extraInfo", {}).get("py_callstack", "").rstrip()
        return WorkerError(f"rank {rank} raised {_message(message)}\n{trace}")
    ending = worker.signal_name() if worker.exitcode < 0 else f"exit code {worker.exitcode}"
    return WorkerError(f"rank {rank} (pid {worker.pid}) ended with {ending} and left no Python error")


def _message(recorded: Any) -> str:
    return str(recorded.get("message", "")) if isinstance(recorded, dict) else str(recorded)


def _our_error(message: str) -> MegascendError | None:
    """``"ConfigError: text"`` back to ``ConfigError("text")``; None if the class is not of our hierarchy."""
    name, _, text = message.partition(": ")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, MegascendError):
        return kind(text)
    return None


@contextmanager
def _environment_default(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the processes started inside, unless the user has set it."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Keep the launcher from logging every worker's traceback: :func:`launch` reports the one that matters."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
