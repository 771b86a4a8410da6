"""Programs that compute a reference: plain torch, transformers and peft on the CPU, on any platform of the caller.

They run in processes of their own because building an mcore-bridge model changes what transformers builds afterwards. Each is a
fork of one process that has imported these packages and done nothing with them, so that they are imported once and not by every
program: seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megascend.runtime.distributed.launch import plain_environment

IMPORTED = {
    "torch": ("torch",),
    "transformers": ("transformers", "transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
    "peft": ("peft",),
    "safetensors": ("safetensors.torch",),
}
"""Modules that are imported once for all programs, by the package that a program imports."""


KERNEL_PACKAGES = ("fla", "causal_conv1d", "mamba_ssm")
"""Packages whose kernels of linear attention and state spaces transformers calls if it finds them; they need accelerators."""
READ_AT_START = (
    *("PYTHON", "LD_", "LANG", "LC_", "PATH", "HOME", "XDG_", "TMP", "MPL"),
    *("OMP_", "MKL_", "ONEDNN_", "ATEN_", "TORCH", "CUDA", "NVTE_", "ASCEND", "SIMNPU", "HF_", "TRANSFORMERS_"),
)
"""Beginnings of variables that an interpreter or a package reads once: a fork cannot be given others."""
READ_LATER = ("SIMNPU_LOG",)
"""Variables of these beginnings that are read at every use."""
SET_IN_PROCESS = (
    *("TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_CACHE_DIR"),
    *("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"),
)
"""Variables that the bootstrap, torch and Megatron's models set in their process."""
MAX_PROCESSES = 2
"""Processes that a server keeps: one for most programs, and one for those with other variables in between."""


class ProgramServer:
    """Runs programs one after the other, in forks of a process that it starts for the first one.

    It starts another one when a program needs other variables that are read at the start (:data:`READ_AT_START`), and in a
    process that was forked from the caller's. It keeps :data:`MAX_PROCESSES`, those that were used last. What it has started
    ends with the caller.

    Args:
        imports: modules that are imported before every program, beside those of :data:`IMPORTED` that it imports itself.
    """

    def __init__(self, imports: Sequence[str] = ()) -> None:
        self._imports = list(imports)
        self._lock = threading.Lock()
        # By variables, the one that was used last at the end.
        self._processes: dict[frozenset[tuple[str, str]], subprocess.Popen[str]] = {}
        self._owner = 0

    def run(
        self,
        program: Path | str,
        arguments: Sequence[object],
        environment: Mapping[str, str],
        stdin: str = "",
        timeout_s: float = 240.0,
        modules: Sequence[str] = (),
        directory: Path | None = None,
        hidden: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python script, or a program given as text, and wait for its end.

        Args:
            arguments: ``sys.argv[1:]`` of the program.
            environment: its environment variables.
            directory: working directory; default: the current one.
            stdin: its standard input.
            timeout_s: deadline in seconds, imports included.
            modules: imported before the program runs, by it alone: those that make an architecture known to transformers.
            hidden: packages that the program finds missing.

        Raises:
            subprocess.TimeoutExpired: the program took longer; it is killed.
        """
        text = program.read_text(encoding="utf-8") if isinstance(program, Path) else program
        # One request at a time: the protocol has no numbers to match answers with.
        with self._lock, tempfile.TemporaryDirectory(prefix="megascend-program-") as folder:
            files = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
            files[0].write_text(stdin, encoding="utf-8")
            request = {
                "imports": self._imports + [module for name in _packages(text) for module in IMPORTED[name]],
                "modules": [*modules],
                "hidden": [*hidden],
                "program": str(program) if isinstance(program, Path) else None,
                "text": text,
                "arguments": [str(argument) for argument in arguments],
                "directory": str(directory or os.getcwd()),
                "environment": dict(environment),
                "files": [str(file) for file in files],
            }
            status = self._ask(json.dumps(request), environment, timeout_s)
            output, errors = (file.read_text(encoding="utf-8") if file.exists() else "" for file in files[1:])
        return subprocess.CompletedProcess([str(program), *request["arguments"]], status, output, errors)

    def close(self) -> None:
        """End the server's processes. The next program starts another."""
        while self._processes:
            self._end(self._processes.popitem()[1])

    def _end(self, process: subprocess.Popen[str]) -> None:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        # In a fork of the caller only the pipes are closed: the process belongs to the parent.
        if self._owner == os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _ask(self, line: str, environment: Mapping[str, str], timeout_s: float) -> int:
        process = self._started(environment)
        assert process.stdin is not None
        assert process.stdout is not None
        answer = ""
        deadline = time.monotonic() + timeout_s
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            with selectors.DefaultSelector() as waiting:  # select() takes no descriptor above 1023
                waiting.register(process.stdout, selectors.EVENT_READ)
                if not waiting.select(max(0.0, deadline - time.monotonic())):
                    raise subprocess.TimeoutExpired("a reference program", timeout_s)
            answer = process.stdout.readline()
        finally:
            if not answer:  # still busy, or dead
                self._processes.popitem()
                self._end(process)
        if not answer:
            raise RuntimeError("the process that forks reference programs has ended")
        return int(answer)

    def _started(self, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Return a process with these variables, the last of those that are kept."""
        if self._owner != os.getpid():
            self.close()
            # Registered again, so that it runs once, and in the process that started the server.
            atexit.unregister(self.close)
            atexit.register(self.close)
            self._owner = os.getpid()
        at_start = frozenset(
            entry for entry in environment.items() if entry[0].startswith(READ_AT_START) and entry[0] not in READ_LATER
        )
        process = self._processes.pop(at_start, None)
        if process is None:
            if len(self._processes) == MAX_PROCESSES:
                self._end(self._processes.pop(next(iter(self._processes))))
            process = subprocess.Popen(
                [sys.executable, "-c", Path(__file__).with_name("_program_server.py").read_text(encoding="utf-8")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=dict(environment),
                # A group of its own: close() kills the running program with it, and Ctrl-C does not reach it twice.
                start_new_session=True,
                encoding="utf-8",
                errors="replace",
            )
        self._processes[at_start] = process
        return process


_SERVER = ProgramServer()


def run_reference(
    program: Path | str, *arguments: object, stdin: str = "", timeout_s: float = 240.0, modules: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a Python script, or a program given as text, in a process without NPU (real or simulated), network or a second thread.

    The arguments, and the error after ``timeout_s``, are those of :meth:`ProgramServer.run`.
    """
    environment = as_at_start(plain_environment())
    return _SERVER.run(program, arguments, environment, stdin, timeout_s, modules, hidden=KERNEL_PACKAGES)


def as_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what packages of this process have added, for which programs would need another server."""
    path = environment.get("PYTHONPATH", "").split(os.pathsep)
    kept = {name: value for name, value in environment.items() if name not in (*SET_IN_PROCESS, "PYTEST_CURRENT_TEST")}
    return kept | {"PYTHONPATH": os.pathsep.join(entry for entry in path if not entry.endswith("setuptools/_vendor"))}


def _packages(text: str) -> list[str]:
    """Return names of :data:`IMPORTED` that a program imports, in that order."""
    imported = set(re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.MULTILINE))
    return [name for name in IMPORTED if name in imported]
