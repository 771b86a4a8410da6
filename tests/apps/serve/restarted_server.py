"""``megascend serve`` on ranks that are killed and restarted, as torchrun would restart them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support.forked_programs import environment
from support.waiting import free_port

START_S = 300.0
FOLDER = Path(__file__).parent


class RestartedServer:
    """The command, on one port and one storage.

    Args:
        options: of the command.
        ranks: processes.
        keys: value of MEGASCEND_API_KEYS.
        log: where its output goes.

    Attributes:
        url: of the server, whichever processes it is now.
        back_s: of each start, seconds until all was as it was.
        codes: exit codes of ranks that were not killed themselves.
    """

    def __init__(self, options: list[str], ranks: int, keys: str, log: Path) -> None:
        self._port, self._ranks, self._log = free_port(), ranks, log
        self.url, self.back_s, self.codes = f"http://127.0.0.1:{self._port}", [], []
        self._arguments = ["serve", *options, "--port", str(self._port)]
        self._keys = keys
        self._alive: list[int] = []
        self._forker = subprocess.Popen(
            [sys.executable, str(FOLDER / "forking_ranks.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment(),
        )  # fmt: skip

    def _ask(self, command: dict[str, Any]) -> int:
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        self._forker.stdin.write(json.dumps(command) + "\n")
        self._forker.stdin.flush()
        return int(self._forker.stdout.readline())

    def start(self) -> None:
        """Start all ranks, without waiting for them."""
        variables = {"MEGASCEND_API_KEYS": self._keys}
        if self._ranks > 1:
            variables |= {"WORLD_SIZE": str(self._ranks), "LOCAL_WORLD_SIZE": str(self._ranks)}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self._start_time = time.monotonic()
        for rank in range(self._ranks):
            rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if self._ranks > 1 else {}
            self._alive.append(
                self._ask(
                    {"arguments": self._arguments, "variables": variables | rank_variables, "log": str(self._log)}
                )
            )

    def answers(self, path: str) -> bool:
        """Check whether a health path answers 200; ``/readyz`` does once recovery has finished."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def wait(self, path: str) -> None:
        """Wait until it answers."""
        while not self.answers(path):
            for pid in self._alive:
                assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z", (
                    self._log.read_text()[-4000:]
                )
            assert time.monotonic() - self._start_time < START_S, f"not there after {START_S} s"
            time.sleep(0.05)
        if path == "/readyz":
            self.back_s.append(time.monotonic() - self._start_time)

    def kill(self, ranks: str) -> None:
        """Send SIGKILL to ``all`` ranks, the ``first`` or the ``last``; the others must end without it."""
        killed = {"all": self._alive, "first": self._alive[:1], "last": self._alive[-1:]}[ranks]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        codes = {pid: self._ask({"wait": pid}) for pid in self._alive}
        self.codes += [code for pid, code in codes.items() if pid not in killed]
        self._alive = []

    def end(self) -> None:
        """Leave no process behind."""
        for pid in self._alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self._forker.stdin is not None
        self._forker.stdin.close()
        self._forker.wait(60)
