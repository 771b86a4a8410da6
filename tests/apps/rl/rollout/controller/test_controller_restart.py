"""A controller in a separate process that is killed, stopped by signals, and restarted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from controller_doubles import KEY, BlockingClient, ManualClock, a_seal, an_offer

from megascend.apps.rl.rollout.controller.address import Address, read_address, unbracketed
from megascend.errors import ControllerRestartedError, EngineError, EngineLostError, RolloutTaskError
from support.waiting import wait_until
from weightwire.engine_calls import LoopThread
from weightwire.keys import ENVIRONMENT, Key

pytestmark = pytest.mark.waiting


class LeasedEngine:
    """An engine in the test's process, called over a socket; its pauses lapse on a manual clock."""

    def __init__(self, thread: LoopThread) -> None:
        self.clock = ManualClock()
        self.calls: list[str] = []
        self.holds: set[str] = set()
        self.paused = False
        self._thread = thread
        self._pauses = 0
        self.port = thread.run(self._listen())

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call, *arguments = (await reader.readline()).decode().split()
        self.calls.append(" ".join([call, *arguments]))
        while call in self.holds:
            await asyncio.sleep(0.01)
        if call == "pause":
            self.paused = True
            self._pauses += 1
            this = self._pauses
            self.clock.call_at(self.clock.time() + float(arguments[0]), lambda: self._lapse(this))
        if call == "resume":
            self.paused = False
        writer.write(b"done\n")
        writer.close()

    def _lapse(self, pause: int) -> None:
        if pause == self._pauses:
            self.paused = False

    def advance(self, seconds: float) -> None:
        self._thread.run(self.clock.advance(seconds))


class Job:
    """A controller's process, which can be started again, its engine and its address file."""

    def __init__(self, folder: Path, thread: LoopThread) -> None:
        self.publish = folder / "controller.json"
        self.engine = LeasedEngine(thread)
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        program = Path(__file__).with_name("controller_program.py")
        environment = {**os.environ, ENVIRONMENT: KEY, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, str(program), str(self.publish), str(self.engine.port)]
        former = read_address(self.publish).instance if self.publish.exists() else ""
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: self.publish.exists() and read_address(self.publish).instance != former)

    def kill(self, number: signal.Signals) -> tuple[int, str]:
        """Send a signal and wait for the end; return the exit status and stderr."""
        assert self.process is not None
        self.process.send_signal(number)
        _, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stderr

    def client(self, timeout_s: float = 60.0) -> BlockingClient:
        return BlockingClient(self.publish, Key(KEY), caller="trainer", timeout_s=timeout_s)


@contextmanager
def _job(folder: Path) -> Iterator[Job]:
    thread = LoopThread("engine")
    job = Job(folder, thread)
    try:
        job.start()
        yield job
    finally:
        if job.process is not None and job.process.poll() is None:
            job.kill(signal.SIGKILL)
        thread.close()


def test_killed_controller_restarts_and_accepts_claims(tmp_path: Path) -> None:
    """Report the restart to callers, repeat no call, resume by the engine's own lease, and accept the next claim."""
    with _job(tmp_path) as job, job.client() as client, job.client() as worker:
        client.expect(["r1"], deadline_s=600)
        first = client.instance
        worker.status()
        with client.claim("trainer", lease_s=600) as claim:
            claim.pause(lease_s=30)
            job.engine.holds.add("verify")
            claim.begin_update(an_offer("a", 1))
            update = client.submit(claim.target.verify(a_seal("a"), timeout_s=60))
            wait_until(lambda: job.engine.calls == ["pause 30", "begin a", "verify a"])
            assert job.kill(signal.SIGKILL)[0] == -signal.SIGKILL
            assert job.publish.exists()  # it had no time to remove it
            job.engine.holds.clear()
            assert job.engine.paused
            job.engine.advance(30)
            assert not job.engine.paused

            job.start()
            with pytest.raises(EngineLostError, match=f"verify: .*not {first}: it was restarted"):
                update.result(60)
            assert job.engine.calls == ["pause 30", "begin a", "verify a"]
            with pytest.raises(ControllerRestartedError, match="restarted"):
                worker.complete("r1", {})  # a rollout of the former process
            with pytest.raises(RolloutTaskError, match="'r1' is not expected here"):
                worker.complete("r1", {})
            with pytest.raises(EngineError, match="'trainer' has no update 'a': none is open"):
                claim.commit("a")  # of a new claim
            claim.begin_update(an_offer("b", 1))
            claim.verify(a_seal("b"), timeout_s=60)
            claim.commit("b")
        assert job.engine.calls[3:] == ["begin b", "verify b", "commit b"]


@pytest.mark.nightly_cases("2")  # SIGINT; covered: SIGTERM
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_resumes_engines_and_ends_the_controller(tmp_path: Path, number: signal.Signals) -> None:
    with _job(tmp_path) as job, job.client() as client:
        with client.claim("trainer", lease_s=600) as claim:
            claim.pause(lease_s=600)
            claim.begin_update(an_offer("a", 1))
            assert job.engine.paused
            claim.target._client._timeout_s = 0.3  # the controller does not answer any more
            status, stderr = job.kill(number)
        assert (status, job.engine.paused) == (128 + number, False)
        assert job.engine.calls == ["pause 600", "begin a", "drop a", "resume"]
        assert not job.publish.exists()
        assert "Traceback" not in stderr
        assert KEY not in stderr


@pytest.mark.parametrize("host", ["::1", "fd00::2", "10.0.0.1", "node-3"])
def test_brackets_around_an_address_are_left_out(host: str) -> None:
    """Read the address of a node with or without brackets, as different versions of Ray return it."""
    assert unbracketed(host) == host
    if ":" in host:
        assert unbracketed(f"[{host}]") == host
        assert read_address(f"[{host}]:80") == Address(host, 80)
