"""Start and stop the ranks of a run on this machine, with torch's elastic launcher, the one below ``torchrun``.

On a signal the launcher would signal its workers, kill them 30 seconds later even if they are saving, and fail itself. It runs in
a thread here, where it installs no signal handlers; the main thread forwards signals and waits for the workers' results.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import json
import logging
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend import errors
from megascend.apps.cli.messages import show_messages
from megascend.errors import ConfigError, MegascendError, PlatformError, WorkerError
from megascend.runtime.stop_signals import STOPPING, SignalRecorder
from megascend.surroundings import announce

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, start it again
EXIT_INTERRUPTED = 130
POLL_S = 0.2
"""Seconds between two checks for workers that have not been signalled yet."""
SEMAPHORES = 64 * 1024
"""Maximum shared memory of the launcher's semaphores per process, in bytes."""


def under_torchrun(nproc: int | None = None) -> bool:
    """Return True if the ranks have been started already."""
    started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if started and nproc is not None:
        raise ConfigError(f"--nproc {nproc} under torchrun: torchrun has started the processes already; leave it out")
    return started


def start_ranks(function: Callable[..., Any], *args: Any, nproc: int) -> Any:
    """Call ``function(*args)`` in this process, or with ``nproc`` above 1 in as many others; return rank 0's result."""
    if nproc == 1:
        return function(*args)
    announce(f"starting {nproc} processes")
    return launch(function, *args, nproc=nproc)


def on_ranks(function: Callable[..., Any], *args: Any, nproc: int) -> Any:
    """Call ``function(*args)`` as a rank that torchrun has started, or start the ranks; return rank 0's result."""
    return function(*args) if under_torchrun() else start_ranks(function, *args, nproc=nproc)


def launch(function: Callable[..., Any], *args: Any, nproc: int) -> Any:
    """Call ``function(*args)`` in ``nproc`` fresh processes that see torchrun's environment; return rank 0's result.

    ``function`` must be importable by name. OMP_NUM_THREADS is 1 in the workers unless it is set, as under torchrun.
    Signals that stop a run are forwarded to the workers (SIGINT as SIGTERM). The workers may take as long as they need to finish
    a step and save.

    Raises:
        KeyboardInterrupt: on a second SIGINT, or one before the workers could handle it; the workers have ended.
        SystemExit: on another stop signal before the workers could handle it; the code is 128 plus the signal's number.
        PlatformError: the processes cannot be started, for example because ``/dev/shm`` is full.
        MegascendError: the first megascend error that a worker raised, with the worker's message.
        WorkerError: a worker failed in another way; the message holds its traceback or its signal.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with (
        tempfile.TemporaryDirectory(prefix="megascend-launch-") as folder,
        _environment_default("OMP_NUM_THREADS", "1"),
        # torch sets this variable itself and leaves it set: set here, it is removed at the end.
        _environment_default("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
        _quiet("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing"),
    ):
        # torch's own launcher, so that runs with --nproc and under torchrun start in the same way.
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            # Port 0: any free one, so that two runs on one host do not collide.
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            # A failed run ends with its error; `--resume auto` starts it again.
            max_restarts=0,
            # fork would copy a process that may have threads and an initialised device.
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        with StopLaunch() as stop:
            try:
                return call_in_thread(elastic_launch(config, run_worker), function, args, os.getpid(), stop=stop)[0]
            except ChildFailedError as failure:
                cause = root_cause(failure, Path(folder))
                # Workers that were still starting are ended by the signal itself, which is no failure to report.
                if stop.received and isinstance(cause, WorkerError) and ended_by_signal(failure):
                    stop.exit()
            except OSError as error:
                raise PlatformError(start_failure(error, nproc)) from error
    raise cause


def start_failure(error: OSError, nproc: int, semaphores: Path = Path("/dev/shm")) -> str:
    """Describe why the launcher could not start ``nproc`` processes; a container's ``/dev/shm`` is often too small."""
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


def run_worker(function: Callable[..., Any], args: tuple[Any, ...], launcher_pid: int) -> Any:
    """Call ``function(*args)`` in a worker; end the process if the launcher, which reads the result, has ended."""
    atexit.register(gc.freeze)  # as in the command's own process
    show_messages()
    try:
        result = function(*args)
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None  # on KeyboardInterrupt the launcher would wait for the worker
    # Another parent: the launcher was killed, and init has adopted this process.
    if os.getppid() != launcher_pid:
        raise SystemExit(EXIT_INTERRUPTED)
    return result


def root_cause(failure: ChildFailedError, folder: Path) -> MegascendError:
    """Return the root cause: a MegascendError if a worker recorded one, else the launcher's first failure.

    A rank that dies makes its peers fail too (a closed connection, SIGTERM from the launcher), often at almost the same time, and
    the launcher reports only one of them; ``folder`` has the error that each worker recorded.
    """
    # torch's record decorator writes the file; the earliest of megascend's own errors is the cause.
    for path in sorted(folder.rglob("error.json"), key=lambda path: path.stat().st_mtime_ns):
        error = _megascend_error(_message(json.loads(path.read_text(encoding="utf-8"))["message"]))
        if error is not None:
            return error
    rank, worker = failure.get_first_failure()
    message: Any = worker.message  # the worker's record, or the launcher's own text if it recorded nothing
    if isinstance(message, dict):
        trace = message.get("extraInfo", {}).get("py_callstack", "").rstrip()
        return WorkerError(f"rank {rank} raised {_message(message)}\n{trace}")
    ending = worker.signal_name() if worker.exitcode < 0 else f"exit code {worker.exitcode}"
    return WorkerError(f"rank {rank} (pid {worker.pid}) ended with {ending} and left no Python error")


def _message(recorded: Any) -> str:
    return str(recorded.get("message", "")) if isinstance(recorded, dict) else str(recorded)


def _megascend_error(message: str) -> MegascendError | None:
    """Parse ``"ConfigError: text"`` to ``ConfigError("text")``; None if the class is no MegascendError."""
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


# --- signals ---


class StopLaunch(SignalRecorder):
    """Recorder of the launcher's signals, which forwards them to the workers."""

    def __init__(self) -> None:
        super().__init__()
        self._interrupted = False
        self._notified: set[int] = set()

    def forward(self) -> None:
        """Signal each worker once. Workers that are still starting have no handler yet, and end."""
        # SIGTERM for SIGINT: a terminal has sent SIGINT to the workers too, and a second one would end them at once.
        if self.received:
            new = workers() - self._notified
            self._notified |= new
            send(signal.SIGTERM if self.received is signal.SIGINT else self.received, new)

    def exit(self) -> None:
        """End this process as the received signal would have."""
        assert self.received is not None
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.received)

    def interrupt(self) -> None:
        """Kill the workers on the second SIGINT, and raise KeyboardInterrupt."""
        if self._interrupted:
            send(signal.SIGKILL, workers())  # Python handlers do not run while a rank waits in a collective
            raise KeyboardInterrupt
        self._interrupted = True


def call_in_thread(function: Callable[..., Any], *args: Any, stop: StopLaunch) -> Any:
    """Call ``function(*args)`` in a thread and return its result; meanwhile forward signals to this process's children.

    Raises:
        Exception: what the function raises.
        KeyboardInterrupt: on a second SIGINT; the children have been killed.
    """
    # Python runs signal handlers on the main thread only, between bytecodes, so that thread must not wait in the launcher.
    with ThreadPoolExecutor(1, "megascend-launch") as pool:
        future = pool.submit(function, *args)
        while not wait([future], POLL_S).done:
            stop.forward()
        return future.result()


def workers() -> set[int]:
    """Return the process ids of this process's children, without multiprocessing's resource tracker."""
    import psutil

    children = set()
    for child in psutil.Process().children():
        # A child may end between the listing and this query.
        with contextlib.suppress(psutil.Error):
            if not any("resource_tracker" in part for part in child.cmdline()):
                children.add(child.pid)
    return children


def send(number: signal.Signals, pids: set[int]) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def ended_by_signal(failure: ChildFailedError) -> bool:
    """Return True if the worker that failed first was ended by a stop signal, not by an error."""
    code = failure.get_first_failure()[1].exitcode
    return code == EXIT_INTERRUPTED or -code in STOPPING
