"""SkyRL's Tinker server on megascend as docs/integrations/skyrl.md starts it, for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.integration_programs import environment
from support.waiting import free_port

DEADLINE_S = 600


@contextmanager
def served(folder: Path, **backend: Any) -> Iterator[str]:
    """Yield the address of a server for a model in ``folder``; its whole process group is ended with it.

    Args:
        backend: settings of ``--backend-config`` beside fp32 on the CPU.
    """
    port = free_port()
    settings = {"platform": "cpu", "precision": "fp32", "max_lora_rank": 16, **backend}
    options = {
        "base-model": folder / "model",
        "port": port,
        "checkpoints-base": folder / "checkpoints",
        "database-url": f"sqlite:///{folder}/tinker.db",
        "backend-config": json.dumps(settings),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "megascend.integrations.skyrl.launch", *words],
            cwd=folder,
            env=environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(address, server, folder)
        yield address
    finally:
        server.terminate()
        server.wait(60)
        left = _end_group(server.pid)
    assert not left, f"processes of the server were left: {left}"


def _wait(address: str, server: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        assert server.poll() is None, (folder / "server.log").read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{address}/api/v1/healthz", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
    raise TimeoutError(f"no server after {DEADLINE_S} s: {(folder / 'server.log').read_text()[-4000:]}")


def _end_group(group: int, patience_s: float = 10) -> list[str]:
    """Return command lines of a process group's remaining processes after a while, and end them."""
    import psutil

    deadline = time.monotonic() + patience_s
    while True:
        left = [process for process in psutil.process_iter() if _in_group(process.pid, group)]
        if not left:
            return []
        if time.monotonic() > deadline:
            names = [" ".join(process.cmdline()) for process in left]
            os.killpg(group, signal.SIGKILL)
            return names
        time.sleep(0.2)


def _in_group(process: int, group: int) -> bool:
    try:
        return os.getsid(process) == group
    except ProcessLookupError:
        return False
