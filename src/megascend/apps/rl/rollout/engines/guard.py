"""Run a program, and end its session when its owner is gone. Uses only the standard library; see ``guarded.py``.

python guard.py PROCESS DESCRIPTOR COMMAND...

PROCESS is the owner of the program. DESCRIPTOR is the read end of a pipe whose write end the owner holds. The calling process
becomes the program; the watcher is its grandchild, in a separate session, and orphaned from the start.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

POLL_S = 2.0
"""Interval at which the watcher checks whether the program has ended, in seconds."""
TERMINATE_S, KILL_S = 10.0, 10.0
"""Seconds that processes have to end after SIGTERM, and after SIGKILL."""


def main() -> None:
    owner, pipe, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    session = os.getpid()
    between = os.fork()
    if between == 0:
        # Out of the program's session, which the watcher ends.
        os.setsid()
        # Orphaned, so that a program that kills the owner's process tree does not find the watcher in it.
        if os.fork() == 0:
            watch(owner, pipe, session)
        os._exit(0)
    # No zombie may be left: the program does not know of this child.
    os.waitpid(between, 0)
    os.close(pipe)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and so would the program
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
        os._exit(127)


def watch(owner: int, pipe: int, session: int) -> None:
    """Wait until the owner is gone or the session has ended; then end what is left of the session."""
    null = os.open(os.devnull, os.O_RDWR)
    # A reader of the program's output sees its end only when nobody holds it any more.
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    for descriptor in {int(name) for name in os.listdir("/dev/fd")} - {0, 1, 2, pipe}:
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            os.close(descriptor)  # or the program's pipes would stay open after its end
    watched = [pipe, *process_descriptor(owner)]
    while not select.select(watched, [], [], POLL_S)[0]:
        if not exists(session):
            return
    for number, patience in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, KILL_S)):
        # One by one: processes of the session may have groups of their own.
        for process in members(session):
            send(process, number)
        deadline = time.monotonic() + patience
        # Asked again each time: a process may have started another one meanwhile.
        while members(session) and time.monotonic() < deadline:
            time.sleep(0.05)


def process_descriptor(process: int) -> list[int]:
    """Open a pidfd, readable once the process has ended: a fork of it may hold the pipe longer. Empty before Linux 5.3."""
    try:
        return [os.pidfd_open(process)]
    except (AttributeError, OSError):
        return []


def exists(session: int) -> bool:
    """Check whether the session's first process group has a process; a zombie counts."""
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's processes
        return True
    return True


def members(session: int) -> list[int]:
    """Return the live processes of a session, of any group; without /proc only its group, as a negative number."""
    try:
        numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return [-session] if exists(session) else []
    processes = []
    for number in numbers:
        try:
            with open(f"/proc/{number}/stat", encoding="utf-8") as file:
                state, _, _, member_session = file.read().rpartition(")")[2].split()[:4]
        except OSError:  # ended meanwhile
            continue
        if int(member_session) == session and state not in "ZX":
            processes.append(number)
    return processes


def send(process: int, number: int) -> None:
    # A process may end, or its number may pass to another user's, after it was listed.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


if __name__ == "__main__":
    main()
