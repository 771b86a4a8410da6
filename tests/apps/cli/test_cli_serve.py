"""``megascend serve`` as a process that loses its output or its terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from support.forked_programs import environment

DEADLINE_S = 240


@pytest.mark.nightly_cases("1")  # SIGHUP; covered: SIGTERM
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_server_survives_lost_output_and_stops_cleanly(number: signal.Signals, tmp_path: Path) -> None:
    command = [
        "env",
        "--default-signal=HUP",
        sys.executable,
        "-m",
        "megascend",
        "serve",
        "--demo",
        "--storage",
        str(tmp_path),
        "--port",
        "0",
    ]
    with open("/dev/full", "w", encoding="utf-8") as full_disk:
        server = subprocess.Popen(
            [*command, "--set", "platform=cpu"], stdout=subprocess.PIPE, stderr=full_disk, text=True, env=environment()
        )
    try:
        assert server.stdout is not None
        address = re.search(r"at (http://\S+)", server.stdout.readline())
        assert address is not None
        lines = [server.stdout.readline() for _ in range(4)]  # export, the demo's client, checkpoints, page
        assert lines[2] == f"checkpoints: {tmp_path / 'checkpoints'}\n"
        assert re.match(rf"status page: {address[1]}/#tml-\S+ ", lines[3])
        server.stdout.close()  # as `| head -1` does
        assert httpx.get(f"{address[1]}/api/v1/healthz", timeout=60).status_code == 200
        server.send_signal(number)
        assert server.wait(DEADLINE_S) == 0
    finally:
        if server.poll() is None:
            os.kill(server.pid, signal.SIGKILL)
            server.wait()
