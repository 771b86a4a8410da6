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

from megascend.errors import ConfigError, EngineError, EngineLostError
from megascend.rollout.engines.guarded import GuardedProcess

MODULE = "weightwire.vllm"
ON_A_CPU = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""What a vLLM for the CPU needs beside other processes: one thread, on no particular core, 1 GiB of cache, and, if it has one
worker, that worker in the engine's process. A process of its own imports vLLM once more, and both poll without a pause."""
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
        environment: further variables, beside this process's own. A process that is in a Ray cluster hands its address on.
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
        if not os.access(python, os.X_OK):
            raise ConfigError(f"no interpreter at {python}: bash scripts/vllm_env.sh makes vLLM's environment")
        self._log, self._port = Path(log), port
        self._command = [str(python), "-m", module, "--model", str(model), *options]
        self._variables = {
            **ray_address(sys.modules.get("ray")),
            **os.environ,
            **ON_A_CPU,
            **(environment or {}),
            **({} if key_file is None else {"WEIGHTWIRE_KEY_FILE": str(key_file)}),
        }
        self._variables.pop("WEIGHTWIRE_KEY", None)
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
            tail = self._log.read_text(errors="replace")[-TAIL:]
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
                if self._port is not None or PORT_TAKEN not in self._log.read_text(errors="replace"):
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
