"""Runs a program, and ends its session when the process that wanted it is gone. Standard library alone; see ``guarded.py``.

python guard.py PROCESS DESCRIPTOR COMMAND...

PROCESS is the one that wants the program. DESCRIPTOR is the reading end of a pipe whose writing end that one holds. The calling
process becomes the program; the watcher is a grandchild of it, in a session of its own, and an orphan from the start.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

POLL_S = 2.0
"""How often the watcher looks whether the program has ended by itself."""
TERMINATE_S, KILL_S = 10.0, 10.0
"""How long processes have to end when they are asked to, and when they are killed."""


def main() -> None:
    wanting, pipe, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    session = os.getpid()
    between = os.fork()
    if between == 0:
        os.setsid()
        if os.fork() == 0:
            watch(wanting, pipe, session)
        os._exit(0)
    os.waitpid(between, 0)
    os.close(pipe)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and so would the program
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
        os._exit(127)


def watch(wanting: int, pipe: int, session: int) -> None:
    """Return when no process of ``session`` is left."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    for descriptor in {int(name) for name in os.listdir("/dev/fd")} - {0, 1, 2, pipe}:
        with contextlib.suppress(OSError):  # the listing's own
            os.close(descriptor)  # what the program talks through ends with the program
    watched = [pipe, *process_descriptor(wanting)]
    while not select.select(watched, [], [], POLL_S)[0]:
        if not exists(session):
            return
    for number, patience in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, KILL_S)):
        for each in members(session):
            send(each, number)
        deadline = time.monotonic() + patience
        while members(session) and time.monotonic() < deadline:
            time.sleep(0.05)


def process_descriptor(process: int) -> list[int]:
    """One that can be read once the process has ended: another one that it has forked may hold the pipe longer. Linux 5.3."""
    try:
        return [os.pidfd_open(process)]
    except (AttributeError, OSError):
        return []


def exists(session: int) -> bool:
    """Whether its first process group has a process; one that has ended counts until its parent knows."""
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # others' processes
        return True
    return True


def members(session: int) -> list[int]:
    """Processes of a session that have not ended, whatever their group; without /proc the group alone, as its negative."""
    try:
        numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return [-session] if exists(session) else []
    found = []
    for number in numbers:
        try:
            with open(f"/proc/{number}/stat", encoding="utf-8") as file:
                state, _, _, its_session = file.read().rpartition(")")[2].split()[:4]
        except OSError:  # it has ended meanwhile
            continue
        if int(its_session) == session and state not in "ZX":
            found.append(number)
    return found


def send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


if __name__ == "__main__":
    main()
