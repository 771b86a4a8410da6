"""Run programs in forks of one process that has imported their packages. A script; imports no megascend.

Reads a JSON request a line: ``imports`` (modules to have before the fork), ``program`` (a file, or None with its ``text``),
``modules`` (imported in the fork, before it runs), ``hidden`` (packages that it finds missing), ``arguments``, ``directory`` (to
run in), ``environment`` (its variables) and ``files`` (paths of the standard input, output and error output). Answers each with a
line: the exit code, or minus the signal. Ends at the end of its input, that is, with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import inspect
import json
import os
import sys
import threading
import traceback
import types
from typing import Any


def main() -> None:
    gc.disable()  # imports create half a million permanent objects, which each collection would traverse
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of imports must not mix with the answers
    for line in sys.stdin:
        request = json.loads(line)
        for name in request["imports"]:
            with contextlib.suppress(Exception):  # the program reports it when it imports the module itself
                importlib.import_module(name)
        # Fills inspect's table of module files, which torch needs for its operators: otherwise every fork would fill its own.
        inspect.getmodule(sys._getframe())
        # Keeps the collector of a fork from writing to, and so copying, the pages of all these objects.
        gc.freeze()
        print(_run(request), file=answers, flush=True)


def _run(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 70  # nothing below returns without setting it
        try:
            code = _program(request)
        finally:
            # Not sys.exit(): the exit handlers of the server must not run in a fork.
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _program(request: dict[str, Any]) -> int:
    """Run the program in this process as ``python PROGRAM`` or ``python -c TEXT`` would; return its exit code."""
    for number, (path, mode) in enumerate(zip(request["files"], ("r", "w", "w"), strict=True)):
        with open(path, mode) as file:
            os.dup2(file.fileno(), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the process's own
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(request["directory"])
    # In place: os.environ is the object that other modules have imported.
    os.environ.clear()
    os.environ.update(request["environment"])
    path = request["program"]
    sys.argv = [path or "-c", *request["arguments"]]
    module = types.ModuleType("__main__")
    if path is not None:
        module.__file__ = path
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # the program's neighbours are imported first
    # pickle and dataclasses look up classes of the program by this name.
    sys.modules["__main__"] = module
    code = 0
    try:
        for name in request["hidden"]:
            # Importing it then raises ModuleNotFoundError.
            sys.modules[name] = None  # type: ignore[assignment]
        for name in request["modules"]:
            importlib.import_module(name)
        exec(compile(request["text"], path or "<string>", "exec"), vars(module))
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception:  # noqa: BLE001 - printed as the interpreter would
        traceback.print_exc()
        code = 1
    # os._exit() in _run() skips what the interpreter does at its end: waiting for threads, exit handlers, flushing.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
