"""Starts ranks of ``megascend serve`` as forks of a process that has imported what others wrote, which is most of a start.

    python forking_ranks.py < COMMANDS

A command is a line of JSON: ``{"arguments": [...], "variables": {...}, "log": FILE}`` starts a process and answers with its id;
``{"wait": ID}`` answers with its exit code once it has ended. When the input ends, whatever is left is killed.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import threading

from support.forked_programs import PACKAGES

for name in [
    *PACKAGES,
    "uvicorn",
    "uvicorn.protocols.http.h11_impl",
    "starlette.applications",
    "zstandard",
    "tinker.proto.tinker_public_pb2",
]:
    importlib.import_module(name)
assert threading.active_count() == 1, "a process with threads cannot be forked"


def run(command: dict) -> None:
    """Act as the requested process."""
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    os.environ.update(command["variables"])
    sys.argv = ["megascend", *command["arguments"]]
    runpy.run_module("megascend.apps.cli.main", run_name="__main__", alter_sys=True)


left = set()
try:
    for line in sys.stdin:
        command = json.loads(line)
        if "wait" in command:
            left.discard(command["wait"])
            print(os.waitstatus_to_exitcode(os.waitpid(command["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            left.clear()
            try:
                run(command)
            except SystemExit as end:
                os._exit(end.code if isinstance(end.code, int) else 1)
            except BaseException:  # noqa: BLE001  the exit code reports it
                import traceback

                traceback.print_exc()
                os._exit(70)
            os._exit(0)
        left.add(pid)
        print(pid, flush=True)
finally:
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
