"""A process and its environment: the user's home, which may be missing, packages, open files, the parent process."""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import importlib.util
import logging
import os
import resource
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from megascend.errors import ConfigError

PHASES = logging.getLogger(__name__)
"""Logger of the phases of a start, from level INFO on; a program that wants silence sets another level."""
PHASES.setLevel(logging.INFO)


def announce(phase: str) -> None:
    """Log on the first rank that a phase begins which may take long: on stderr, or to the log handlers of the program, if any."""
    if os.environ.get("RANK", "0") != "0" or PHASES.getEffectiveLevel() > logging.INFO:
        return
    if PHASES.hasHandlers():
        # Not info(): another thread may have disabled logging while it imports Megatron, and this phase would be lost.
        PHASES.handle(PHASES.makeRecord(PHASES.name, logging.INFO, __file__, 0, "megascend: %s", (phase,), None))
    elif sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # a closed terminal, a full disk, a closed stream
            print(f"megascend: {phase}", file=sys.stderr, flush=True)


def is_installed(package: str) -> bool:
    """Check whether ``package`` can be imported, without importing it.

    A folder of that name beside the run, such as W&B's ``wandb``, can be imported, too, as a package without any content (a
    namespace package): it does not count.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # somebody has put a module without a spec into sys.modules
        return True
    except ModuleNotFoundError:  # a parent is missing, or a module in sys.modules that is no package
        return False
    if spec is None:
        return False
    return spec.origin is not None or spec.submodule_search_locations is None or not _is_namespace(spec.loader)


def _is_namespace(loader: object) -> bool:
    return loader is None or type(loader).__name__.lstrip("_") == "NamespaceLoader"


PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, however that ends (Linux). For child processes.

    Args:
        parent: the parent's process id, where it is known: this process ends now if the parent has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the kernel was asked; then no signal will come.
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def process_status(name: str, base: int) -> int | None:
    """Return a number of this process in ``/proc/self/status``; None where there is none (other systems than Linux)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1], base)
    return None


def process_start(pid: int) -> int | None:
    """Return when a process began, in clock ticks since the start of the system; None without ``/proc`` (other than Linux).

    Unlike a time of day, it does not change when the clock is set.
    """
    with contextlib.suppress(OSError):
        # The second field is the program's name in parentheses, which may hold spaces; this is the 22nd, proc_pid_stat(5).
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[19])
    return None


def process_lives(host: object, pid: object, since: object, start_ticks: object = None) -> bool | None:
    """Check whether process ``pid`` of ``host``, which ran at ``since`` (seconds since 1970), still runs; None: unknown here.

    A process that began later has been given the same number, and a zombie has ended.

    Args:
        start_ticks: :func:`process_start` of the process, if it is known: the clock may have been set since.
    """
    if host != socket.gethostname() or not isinstance(pid, int) or not isinstance(since, (int, float)):
        return None
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if isinstance(start_ticks, int):
            return process_start(pid) == start_ticks
        # A second of tolerance: the two clocks are read by different means.
        return process.create_time() <= since + 1.0
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return None


def open_file_limit(required: int) -> int:
    """Return how many files and sockets this process may have open, after raising the limit to ``required`` as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Infinity is -1 on Linux.
    if soft == resource.RLIM_INFINITY or soft >= required:
        return sys.maxsize if soft == resource.RLIM_INFINITY else soft
    raised = required if hard == resource.RLIM_INFINITY else min(required, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return raised


def private_folder(path: Path) -> Path:
    """Make the folder ``path`` where everyone may write, as in ``/tmp``, unless it is there already; return it.

    Raises:
        ConfigError: it is a link, another user's, or others may write to it, so that what it holds may be a stranger's.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(f"{path} is a link, another user's, or open to others: set TMPDIR to a folder of yours")
    if status.st_mode & 0o077:
        path.chmod(0o700)  # made by an earlier version
    return path


def home() -> Path:
    """Return the user's home, or a folder of this user in the system's for temporary files.

    The latter where there is none: HOME is not set, and the user has no entry in the system's list, as in a container that was
    started with a number for its user; or nothing can be written to it, as to ``/``, which container engines set then, to
    ``/nonexistent`` of the user nobody, or to another user's.
    """
    return _known_home() or private_folder(_temporary_home())


def _temporary_home() -> Path:
    return Path(tempfile.gettempdir()) / f"megascend-home-{os.getuid()}"


def _known_home() -> Path | None:
    try:
        path = Path.home()
    except RuntimeError:
        return None
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return path if os.access(existing, os.W_OK | os.X_OK) else None


def set_user_variables(environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set HOME and USER for this process and its children where the system knows neither: torch, transformers and triton ask for
    them and fail, or make a folder called ``~``.

    Returns:
        A line for each change.
    """
    changes = []
    if _known_home() is None:
        folder = _temporary_home()
        try:
            private_folder(folder)
        except ConfigError:  # somebody else has put it there
            folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
        environment["HOME"] = str(folder)
        changes.append(f"HOME={folder}: this user has no home")
    try:
        getpass.getuser()
    except (KeyError, OSError):
        environment["USER"] = f"uid-{os.getuid()}"
        changes.append(f"USER={environment['USER']}: this user has no name")
    return changes
