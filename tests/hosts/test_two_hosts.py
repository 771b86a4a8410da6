"""Two hosts under torchrun: a lost host, a silent host, and separate disks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hosts.namespaces import Hosts, hosts, torchrun, wait_until, why_not

REASON = why_not() if sys.platform == "linux" else "Linux only"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.torchrun,
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=f"no namespaces here: {REASON}"),
]
DEADLINE_S = 240


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Hosts]:
    with hosts(tmp_path) as pair:
        yield pair


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a directory with data and settings that both hosts share."""
    work = tmp_path / "work"
    work.mkdir()
    sizes = ["--hidden", "32", "--layers", "2", "--context", "256"]
    subprocess.run(
        [sys.executable, "-m", "megascend", "new-model", "model", *sizes],
        cwd=work, env=environment(), check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    pairs = [("one?", "two"), ("red?", "blue and green"), ("up?", "down"), ("left?", "right, as ever")]
    lines = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in pairs]
    (work / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "model": "model",
        "output": "out",
        "data": {"path": "chat.jsonl", "global_batch_size": 2},
        "steps": 40,
        "platform": "cpu",
        "precision": "fp32",
        "optimizer": {"lr": 0.001},
        "plot": False,
        "timeout_s": 20,
        "checkpoint": {"every": 20, "asynchronous": False},
    }
    (work / "run.yaml").write_text(yaml.safe_dump(settings))
    return work


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    names = ("GLOO_SOCKET_IFNAME", "RANK", "WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if name not in names} | {
        "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **more,
    }  # fmt: skip


def steps(folder: Path) -> list[int]:
    path = folder / "out" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def logs(folder: Path) -> list[Path]:
    return [folder / "a.log", folder / "b.log"]


def start_both(two: Hosts, folder: Path, *arguments: str, restarts: int = 0, own_disk: Path | None = None):
    command = torchrun(*arguments, restarts=restarts)
    return [two.start(n, command, logs(folder)[n], environment(), folder, own_disk) for n in (0, 1)]


def test_run_resumes_from_checkpoint_after_lost_host_returns(two, folder) -> None:
    settings = ("--resume", "auto", "--set", "steps=2000")
    a, b = start_both(two, folder, *settings, restarts=3)
    saved = folder / "out" / "checkpoints" / "latest"
    wait_until(lambda: saved.exists() and len(steps(folder)) > 22, DEADLINE_S, [a, b], logs(folder))
    two.kill(1)
    errors = folder / "out" / "errors"
    wait_until(lambda: errors.exists() and any(errors.glob("*rank-0.json")), 90, [a], logs(folder))
    (error,) = [json.loads(line) for line in next(errors.glob("*rank-0.json")).read_text().splitlines()]
    assert "ank 1 on host-b" in error["message"], error
    assert error["error"] in ("PeerLostError", "CheckpointError"), error  # the second, if it was saving
    assert error["host"] == "host-a"
    before = max(steps(folder))

    b = two.start(1, torchrun(*settings, restarts=3), logs(folder)[1], environment(), folder)
    message = "resumed from"
    wait_until(lambda: message in logs(folder)[0].read_text(), DEADLINE_S, [a, b], logs(folder))
    wait_until(lambda: max(steps(folder), default=0) > before, DEADLINE_S, [a, b], logs(folder))
    steps_run = steps(folder)
    assert steps_run == list(range(1, len(steps_run) + 1))


def test_host_with_link_down_is_named_and_both_hosts_exit(two, folder) -> None:
    """Limit TCP retransmissions: on the silent host torchrun waits for the rendezvous as long as TCP does."""
    two.give_up_after(1, retransmissions=5)
    a, b = start_both(two, folder, "--set", "steps=2000")
    wait_until(lambda: len(steps(folder)) > 3, DEADLINE_S, [a, b], logs(folder))
    two.link(1, "down")
    assert a.wait(120) != 0
    assert b.wait(120) != 0
    errors = [path.read_text() for path in sorted((folder / "out" / "errors").glob("*.json"))]
    assert len(errors) == 2
    assert "on host-b" in errors[0]
    assert "at host-a:" in errors[1]


def test_ranks_of_silent_host_exit_before_torchrun(two, folder) -> None:
    a, b = start_both(two, folder, "--set", "steps=2000")
    wait_until(lambda: len(steps(folder)) > 3, DEADLINE_S, [a, b], logs(folder))
    two.link(1, "down")
    ranks = [line for line in two.running_on(1) if "torch.distributed.run" not in line]
    assert len(ranks) == 1, ranks
    wait_until(lambda: all("torch.distributed.run" in line for line in two.running_on(1)), 120, [b], logs(folder))
    assert b.poll() is None
    assert "at host-a:" in "".join(path.read_text() for path in (folder / "out" / "errors").glob("*rank-1.json"))
    two.link(1, "up")
    assert b.wait(120) != 0


def test_separate_disks_are_rejected_before_first_step(two, folder) -> None:
    disk = folder / "out"
    disk.mkdir()
    a, b = start_both(two, folder, own_disk=disk)
    assert a.wait(DEADLINE_S) != 0
    assert b.wait(DEADLINE_S) != 0
    text = "".join(log.read_text() for log in logs(folder))
    assert f"output: {disk} on host-" in text
    assert "is another directory than on host-" in text
    assert "set output to a directory that all hosts share" in text
    assert "step 1" not in text
