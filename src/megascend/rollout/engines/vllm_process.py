"""Starts vLLM's server in an environment of its own, and ends it."""

from __future__ import annotations

import os
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

from megascend.distributed.launch import child_environment
from megascend.errors import ConfigError, EngineError, EngineLostError
from megascend.rollout.engines.guarded import GuardedProcess

MODULE = "weightwire.vllm"
TRAINERS_OWN = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "HCCL_HOST_SOCKET_PORT_RANGE",
    "HCCL_IF_BASE_PORT",
    "MEGASCEND_FAULTS",
    "OMP_NUM_THREADS",
    "TORCHDYNAMO_DISABLE",
    "WEIGHTWIRE_KEY",
)
"""Variables that are set for a trainer and would slow an engine down, take its ports, or show its key."""
INTERPRETERS_OWN = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables that belong to this process's interpreter: another one would import this one's torch."""
PROBE = "from weightwire.vllm.contract import device_type; print(device_type())"
PROBE_S = 120.0
RAY_ADDRESS = "RAY_ADDRESS"
"""Where a process finds the Ray cluster that it belongs to; without it, it joins whatever this machine shows or starts one."""
PORT_TAKEN = "Address already in use"
TAIL = 3000
"""Characters of its log that an error shows."""


class VllmProcess:
    """A server of vLLM on this machine, with processes of its own that end with it. A context manager.

    They end, too, when this process is gone without having closed it, as one that was killed.

    Args:
        python: the interpreter of vLLM's environment (``scripts/vllm_env.sh`` makes one).
        model: a Hugging Face checkpoint directory.
        key_file: of the job's key, mode 0600; a server without weightwire's parts needs none.
        log: file that its output goes to.
        options: further options of vLLM.
        environment: further variables, beside those of :func:`engine_environment`.
        port: default: a free one.
        module: that is run; vLLM's own server is ``vllm.entrypoints.openai.api_server``.

    Raises:
        ConfigError: there is no such interpreter.
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
        port: int | None = None,
        module: str = MODULE,
    ) -> None:
        require_interpreter(python)
        self._log, self._port = Path(log), port
        self._command = [str(python), "-m", module, "--model", str(model), *options]
        self._variables = {
            **engine_environment(python),
            **(environment or {}),
            **({} if key_file is None else {"WEIGHTWIRE_KEY_FILE": str(key_file)}),
        }
        self._guarded = self._start()

    def _start(self) -> GuardedProcess:
        self.port = self._port or _free_port()
        with self._log.open("wb") as output:
            return GuardedProcess(
                [*self._command, "--port", str(self.port)], output=output, environment=self._variables
            )

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        return self._guarded.process

    @property
    def address(self) -> str:
        """``http://127.0.0.1:PORT``; settled when it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the server, which leads a process group of its own."""
        return self._process.pid

    def check(self) -> None:
        """Raises EngineLostError if the server has ended, with the end of its log."""
        if (code := self._process.poll()) is not None:
            tail = self._log.read_text(errors="replace", encoding="utf-8")[-TAIL:]
            raise EngineLostError(f"vLLM has ended with code {code}; the end of {self._log}:\n{tail}")

    def wait_until_listening(self, timeout_s: float) -> None:
        """Return when the server takes connections: its model is loaded then. If its port was taken meanwhile, it gets another.

        Raises:
            EngineLostError: it has ended.
            EngineError: it does not listen after ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                self.check()
            except EngineLostError:
                if self._port is not None or PORT_TAKEN not in self._log.read_text(errors="replace", encoding="utf-8"):
                    raise
                self._guarded.release()
                self._guarded = self._start()  # somebody was faster
            with socket.socket() as probe:
                probe.settimeout(1.0)
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.2)
        raise EngineError(f"vLLM does not listen at {self.address} after {timeout_s:g} s; its log: {self._log}")

    def close(self, timeout_s: float = 20.0) -> None:
        """End the server and all its processes; those that do not end are killed. May be called twice."""
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


def engine_environment(python: str | Path, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of a process of an engine's interpreter: this process's, without what is the trainer's own.

    It is no rank (:func:`megascend.distributed.launch.child_environment`), and an interpreter of another environment does not
    search this one's packages. A process that is in a Ray cluster hands its address on. What an engine on a CPU needs is set by
    ``weightwire.vllm``, which knows the device of its vLLM.

    Args:
        environment: default: this process's.
    """
    dropped = {*TRAINERS_OWN, *(() if Path(python).absolute() == Path(sys.executable) else INTERPRETERS_OWN)}
    inherited = child_environment(environment)
    return ray_address(sys.modules.get("ray")) | {
        name: value for name, value in inherited.items() if name not in dropped
    }


def vllm_device(python: str | Path) -> str:
    """Return the type of device that the vLLM of an interpreter is built for: ``cpu``, ``cuda`` or ``npu``. Takes a second.

    Raises:
        ConfigError: there is no such interpreter, or no vLLM with weightwire in its environment.
    """
    require_interpreter(python)
    command, environment = [str(python), "-c", PROBE], engine_environment(python)
    try:
        done = subprocess.run(
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
        raise ConfigError(f"{python} has not told the device of its vLLM within {PROBE_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(
            f"{python} has no vLLM that takes weights ({last}): install vLLM, and weightwire beside it (pip install ./receiver)"
        )
    return done.stdout.split()[-1]


def require_interpreter(python: str | Path) -> None:
    """Raise ConfigError unless there is an interpreter."""
    if not os.access(python, os.X_OK):
        raise ConfigError(f"no interpreter at {python}: bash scripts/vllm_env.sh makes vLLM's environment")


def ray_address(ray: Any | None) -> dict[str, str]:
    """``RAY_ADDRESS`` of the cluster that this process has joined, which Ray itself sets for jobs only; nothing without one.

    Args:
        ray: the module, if it has been imported.
    """
    if ray is None or not ray.is_initialized():
        return {}
    return {RAY_ADDRESS: ray.get_runtime_context().gcs_address}


def _free_port() -> int:
    """A port that nothing listened on a moment ago: vLLM cannot tell which one the system gave it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
