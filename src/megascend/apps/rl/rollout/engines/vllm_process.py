"""Start and stop vLLM's server in a separate Python environment."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from megascend.apps.rl.rollout.engines.guarded import GuardedProcess
from megascend.errors import ConfigError, EngineError, EngineLostError
from megascend.runtime.distributed.launch import child_environment

MODULE = "weightwire.vllm"
TRAINER_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "HCCL_HOST_SOCKET_PORT_RANGE",
    "HCCL_IF_BASE_PORT",
    "MEGASCEND_FAULTS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCHDYNAMO_DISABLE",
    "WEIGHTWIRE_KEY",
)
"""Variables that are set for a trainer and would slow an engine down, occupy its ports, or expose the key. The allocator's
expandable segments exclude the sleep of vLLM."""
TRAINER_PREFIXES = ("OMP_", "KMP_", "GOMP_")
"""Prefixes of settings for the trainer's threads: their number, and the cores to which they are bound."""
INTERPRETER_VARIABLES = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables of this process's interpreter, with which another one would import this one's torch."""
PROBE = "from weightwire.vllm.contract import device_type; print(device_type())"
PROBE_S = 120.0
RAY_ADDRESS = "RAY_ADDRESS"
"""Address of a process's Ray cluster; without it Ray joins any cluster on this machine, or starts one."""
PORT_TAKEN = "Address already in use"
TAIL = 3000
"""Characters of the log's end in an error."""
CAUSE = 1500
"""Characters of the first error."""
ERROR_LINE = re.compile(
    r"(?P<source>(?:\([^)]*\) |\[[^\]]*\] )*)ERROR \d\d-\d\d [\d:]{8} (?P<place>\[[^\]]*\]) ?(?P<text>.*)"
)
"""A line of vLLM's log: ``(EngineCore_DP0 pid=123) ERROR 11-25 21:00:00 [core.py:708] EngineCore failed to start.``"""


class VllmProcess:
    """A vLLM server on this machine and its worker processes. A context manager.

    They also end if this process is killed without closing it.

    Args:
        python: the interpreter of vLLM's environment (``scripts/vllm_env.sh`` creates one).
        key_file: file with the job's key, mode 0600; not needed for a server without weightwire.
        environment: additional variables, beside those of :func:`engine_environment`.
        module: module to run; vLLM's own server is ``vllm.entrypoints.openai.api_server``.
    """

    def __init__(
        self,
        python: str | Path,
        model: str | Path,
        *,
        key_file: str | Path | None = None,
        log: str | Path,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        module: str = MODULE,
    ) -> None:
        require_interpreter(python)
        self._log = Path(log)
        self._command = [str(python), "-m", module, "--model", str(model), *options]
        self._variables = {
            **engine_environment(python),
            **(environment or {}),
            **({} if key_file is None else {"WEIGHTWIRE_KEY_FILE": str(key_file)}),
        }
        self._guarded = self._start()

    def _start(self) -> GuardedProcess:
        self.port = _free_port()
        # Emptied: with a second start on another port, the first one's error must not be found again.
        with self._log.open("wb") as output:
            return GuardedProcess(
                [*self._command, "--port", str(self.port)], output=output, environment=self._variables
            )

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        return self._guarded.process

    @property
    def address(self) -> str:
        """Return ``http://127.0.0.1:PORT``; final once the server listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the server, which leads its process group."""
        return self._process.pid

    def check(self) -> None:
        """Raise EngineLostError, with the first error in the log and its end, if the server has ended."""
        # Checked by every call that waits: nothing else notices that a server has ended.
        if (code := self._process.poll()) is not None:
            text = self._log.read_text(errors="replace", encoding="utf-8")
            end, cause = text[-TAIL:], first_error(text)
            # vLLM's API server ends with "See root cause above": the engine core has logged it before, often far above the end.
            first = "" if not cause or cause in end else f"the first error in {self._log}:\n{cause}\n"
            raise EngineLostError(f"vLLM has ended with code {code}; {first}the end of {self._log}:\n{end}")

    @property
    def ended(self) -> bool:
        """Return whether the server has ended; processes of it may be left."""
        return self._process.poll() is not None

    def restart(self) -> None:
        """Start the server again, on another port. The log of the one before gets the suffix ``.lost.log``."""
        self.close()
        self._log.replace(self._log.with_suffix(f".lost{self._log.suffix}"))
        self._guarded = self._start()

    def wait_until_listening(self, timeout_s: float) -> None:
        """Wait until the server accepts connections, after loading its model. If its port was taken meanwhile, use another.

        Raises:
            EngineLostError: the server has ended.
            EngineError: it does not listen after ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                self.check()
            except EngineLostError:
                if PORT_TAKEN not in self._log.read_text(errors="replace", encoding="utf-8"):
                    raise
                self._guarded.release()
                self._guarded = self._start()  # another process took the port first
            with socket.socket() as probe:
                # A connection, not a request: the server listens only when its engine has loaded the model.
                probe.settimeout(1.0)
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.2)
        raise EngineError(f"vLLM does not listen at {self.address} after {timeout_s:g} s; its log: {self._log}")

    def close(self, timeout_s: float = 20.0) -> None:
        """End the server and all its processes; those that do not end are killed. May be called twice."""
        # The group: vLLM's workers would survive their server.
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()
        self._guarded.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def first_error(log: str) -> str:
    """Return the first error that vLLM has logged, with its traceback but without prefixes; empty if there is none.

    Only lines of the process and place in the code that logged it belong to it: several workers write to the log at once.
    """
    lines = [match for line in log.splitlines() if (match := ERROR_LINE.match(line)) is not None]
    if not lines:
        return ""
    origin = lines[0].group("source", "place")
    text = [match["text"] for match in lines if match.group("source", "place") == origin]
    if sum(map(len, text)) <= CAUSE:
        return "\n".join(text)
    # A traceback says what has failed in its first line, and why in its last ones.
    tail, size = [], 0
    for line in reversed(text[1:]):
        size += len(line)
        if tail and size > CAUSE:
            break
        tail.append(line[-CAUSE:])
    return "\n".join([text[0], "[...]", *reversed(tail)])


def engine_environment(python: str | Path, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of an engine's process: this process's, without the trainer's variables.

    The variables of a rank are removed (:func:`megascend.runtime.distributed.launch.child_environment`), and those that would
    make an interpreter of another environment search this one's packages. The address of this process's Ray cluster is added.
    ``weightwire.vllm`` sets the variables for engines on a CPU, since it knows the device of its vLLM.

    Args:
        environment: default: this process's.
    """
    dropped = {*TRAINER_VARIABLES, *(() if Path(python).absolute() == Path(sys.executable) else INTERPRETER_VARIABLES)}
    inherited = child_environment(environment)
    # Not imported: a process without Ray should not load it for this.
    return ray_address(sys.modules.get("ray")) | {
        name: value
        for name, value in inherited.items()
        if name not in dropped and not name.startswith(TRAINER_PREFIXES)
    }


def vllm_device(python: str | Path) -> str:
    """Return the type of device that the vLLM of an interpreter is built for: ``cpu``, ``cuda`` or ``npu``. Takes a second."""
    require_interpreter(python)
    command, environment = [str(python), "-c", PROBE], engine_environment(python)
    try:
        completed = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{python} did not report the device of its vLLM within {PROBE_S:g} s") from None
    if completed.returncode:
        last = (completed.stderr.strip().splitlines() or [f"exit code {completed.returncode}"])[-1]
        raise ConfigError(
            f"{python} has no vLLM that takes weights ({last}): install vLLM, and weightwire beside it (pip install ./receiver)"
        )
    return completed.stdout.split()[-1]


def require_interpreter(python: str | Path) -> None:
    if not os.access(python, os.X_OK):
        raise ConfigError(f"no interpreter at {python}: bash scripts/vllm_env.sh makes vLLM's environment")


def ray_address(ray: Any | None) -> dict[str, str]:
    """Return ``RAY_ADDRESS`` of this process's cluster, which Ray sets only for jobs; empty without a cluster.

    Args:
        ray: the module, if it has been imported.
    """
    if ray is None or not ray.is_initialized():
        return {}
    return {RAY_ADDRESS: ray.get_runtime_context().gcs_address}


def _free_port() -> int:
    """Find a free port: vLLM cannot report one that the system chose. Another process may take it first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
