"""Hosts on one machine: network namespaces, each with a host name and optionally a separate disk."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NAMES = ("host-a", "host-b")


def why_not() -> str | None:
    """Return the system's reason why hosts cannot be created here; None if they can."""
    name = f"mg{secrets.token_hex(3)}"
    try:
        completed = subprocess.run(
            ["ip", "netns", "add", name], capture_output=True, text=True, timeout=20, check=False
        )
        if completed.returncode == 0:
            completed = subprocess.run(
                ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "true"],
                capture_output=True, text=True, timeout=20, check=False,
            )  # fmt: skip
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"ip netns: {error}"
    return None if completed.returncode == 0 else f"ip netns and unshare: {completed.stderr.strip()}"


@dataclass
class Hosts:
    """Two hosts, ``host-a`` (10.77.0.1) and ``host-b`` (10.77.0.2), made by :func:`hosts`."""

    tag: str
    folder: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def namespace(self, number: int) -> str:
        return f"{self.tag}-{number}"

    def start(
        self,
        number: int,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        cwd: Path,
        own_disk: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Run a command on a host in a new session; its output is appended to ``log``.

        Args:
            own_disk: a directory with separate, initially empty content on this host.
        """
        names = self.folder / f"hosts-{number}"
        names.write_text("127.0.0.1 localhost\n10.77.0.1 host-a\n10.77.0.2 host-b\n")
        inside = f"hostname {NAMES[number]}; mount --bind {names} /etc/hosts; ip link set lo up; "
        if own_disk is not None:
            inside += f"mount -t tmpfs none {own_disk}; "
        shell = ["unshare", "--uts", "--mount", "bash", "-c", inside + 'exec "$@"', "bash", *command]
        with log.open("ab") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace(number), *shell],
                stdout=file, stderr=file, cwd=cwd, env=dict(env), start_new_session=True,
            )  # fmt: skip
        self.running.append(process)
        return process

    def link(self, number: int, state: str) -> None:
        """Take a host's network link ``down`` or ``up``: it neither closes connections nor refuses them."""
        _ip("-n", self.namespace(number), "link", "set", "eth0", state)

    def give_up_after(self, number: int, retransmissions: int) -> None:
        """Set the number of TCP retransmissions of a host; 5 take 13 s on this link, Linux's 15 take 15 minutes."""
        setting = f"net.ipv4.tcp_retries2={retransmissions}"
        _ip("netns", "exec", self.namespace(number), "sysctl", "-q", "-w", setting)

    def running_on(self, number: int) -> list[str]:
        """Return the command lines of a host's processes."""
        command_lines = []
        for pid in _ip("netns", "pids", self.namespace(number)).split():
            with contextlib.suppress(OSError):  # the process has ended
                command_lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        return command_lines

    def kill(self, number: int) -> None:
        """End every process of a host at once."""
        pids = _ip("netns", "pids", self.namespace(number)).split()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@contextlib.contextmanager
def hosts(folder: Path) -> Iterator[Hosts]:
    """Create two hosts for a block; remove their processes and namespaces afterwards."""
    pair = Hosts(f"mg{secrets.token_hex(2)}", folder)
    try:
        for number in (0, 1):
            _ip("netns", "add", pair.namespace(number))
        a, b = pair.namespace(0), pair.namespace(1)
        _ip("-n", a, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", b)
        for number in (0, 1):
            _ip("-n", pair.namespace(number), "address", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            _ip("-n", pair.namespace(number), "link", "set", "lo", "up")
            pair.link(number, "up")
        yield pair
    finally:
        for number in (0, 1):
            with contextlib.suppress(subprocess.CalledProcessError):
                pair.kill(number)
        for process in pair.running:
            process.wait(30)
        for number in (0, 1):
            subprocess.run(["ip", "netns", "del", pair.namespace(number)], capture_output=True, timeout=20, check=False)


def torchrun(*arguments: str, restarts: int = 0, nproc: int = 1) -> list[str]:
    """Return the command for each of two hosts; the rendezvous is on host-a."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={nproc}", f"--max-restarts={restarts}",
        "--rdzv-backend=c10d", "--rdzv-endpoint=host-a:29400", "--rdzv-id=run-1",
        "-m", "megascend", "train", "run.yaml", *arguments,
    ]  # fmt: skip


def wait_until(true, seconds: float, processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
    """Wait until ``true()``; fail with the end of the logs if a process ends first or the time is up."""
    until = time.monotonic() + seconds
    while not true():
        ended = [process.returncode for process in processes if process.poll() is not None]
        if ended or time.monotonic() > until:
            texts = "\n".join(f"== {log}\n{log.read_text()[-3000:]}" for log in logs if log.exists())
            raise AssertionError(f"not in {seconds} s, or ended with {ended}\n{texts}")
        time.sleep(0.2)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=True).stdout
