"""Job files in the environments of their schedulers: Ray Train runs a driver, SkyPilot checks a task."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megascend.apps.plan.hardware import load
from megascend.apps.train.job_file import ClusterRequest, job_file
from megascend.config import load_config
from support import forked_programs
from support.job_runs import DEADLINE_S, events_of, started, steps_of, wait_for_step, write_run

pytestmark = pytest.mark.nightly
SCRIPT = "bash scripts/test_integrations.sh jobs"
CHECK = """
import sys, yaml
from sky.utils import common_utils, schemas

task = yaml.safe_load(open(sys.argv[1]))
common_utils.validate_schema(task, schemas.get_task_schema(), "task: ")
common_utils.validate_schema(task["resources"], schemas.get_resources_schema(), "resources: ")
"""


def write_job(kind: str, folder: Path, **request: object) -> Path:
    path = folder / "job.py"
    config = load_config(folder / "run.yaml")
    values = {"nodes": 2, "cards": 1, "hardware": None, "directory": folder} | request
    path.write_text(job_file(kind, config, ClusterRequest(Path("run.yaml"), **values), path))
    return path


def test_skypilot_accepts_the_task(tmp_path: Path) -> None:
    python = os.environ.get("MEGASCEND_SKYPILOT_PYTHON")
    if python is None:
        pytest.skip(f"no SkyPilot here (MEGASCEND_SKYPILOT_PYTHON): {SCRIPT}")

    def check(path: Path) -> subprocess.CompletedProcess[str]:
        variables = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        command = [python, "-c", CHECK, str(path)]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=DEADLINE_S, check=False)

    write_run(tmp_path, platform="cuda")
    path = write_job("skypilot", tmp_path, cards=8, hardware=load("h200"))
    completed = check(path)
    assert completed.returncode == 0, completed.stderr
    path.write_text(path.read_text().replace("num_nodes:", "nodes:"))
    assert "num_nodes" in check(path).stderr


@dataclass
class Cluster:
    """Two Ray nodes on this machine: their processes, and the environment of a driver."""

    nodes: list[subprocess.Popen]
    variables: dict[str, str]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    pytest.importorskip("ray.train.torch", reason=f"no Ray here: {SCRIPT}", exc_type=ImportError)
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    # Paths of sockets have at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    # Ray 2.60's head asks for a token if the user has one, which any ray.init() without a cluster writes; other nodes send none.
    variables = forked_programs.environment(
        GLOO_SOCKET_IFNAME="lo", RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=str(folder), RAY_AUTH_MODE="disabled"
    )
    common = ["--block", "--num-cpus=1", "--disable-usage-stats", "--object-store-memory=100000000"]
    head = [*ray, "start", "--head", "--port=0", "--include-dashboard=false", *common]
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        nodes = [start_node(head, tmp_path, variables, stack)]
        variables["RAY_ADDRESS"] = (folder / "ray" / "ray_current_cluster").read_text().strip()
        nodes.append(
            start_node([*ray, "start", f"--address={variables['RAY_ADDRESS']}", *common], tmp_path, variables, stack)
        )
        yield Cluster(nodes, variables)


def start_node(
    command: list[str], folder: Path, variables: dict[str, str], stack: contextlib.ExitStack
) -> subprocess.Popen:
    """Start a Ray node until the end of ``stack``; on a busy machine it may need more than the 30 s that Ray allows it."""
    log = folder / "log"
    for _ in range(4):
        before = log.read_text().count("Ray runtime started") if log.exists() else 0
        node = stack.enter_context(started(command, folder, variables))
        stack.callback(end_below, node.pid)
        while node.poll() is None:
            if log.read_text().count("Ray runtime started") > before:
                return node
            time.sleep(0.1)
    raise AssertionError(log.read_text()[-4000:])


def end_below(pid: int) -> None:
    """End the processes that a node has started: workers have sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.slow
@pytest.mark.torchrun
def test_ray_trains_on_two_nodes_through_a_lost_rank(cluster: Cluster, tmp_path: Path) -> None:
    model = tmp_path / "model"
    created = forked_programs.run_command("new-model", model, "--hidden", "32", "--layers", "2", "--context", "256")
    assert created.returncode == 0, created.stderr
    write_run(tmp_path, model=str(model), steps=100)
    driver = write_job("ray", tmp_path)
    run = tmp_path / "runs" / "job"
    with started([sys.executable, driver], tmp_path, cluster.variables) as process:
        wait_for_step(15, tmp_path, process, *cluster.nodes)
        starts = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        os.kill(next(event["pid"] for event in starts if event["event"] == "start"), signal.SIGKILL)
        assert process.wait(2 * DEADLINE_S) == 0, (tmp_path / "log").read_text()[-4000:]
    assert steps_of(run) == [*range(1, 101)]
    assert events_of(run).count("start") == 2
    assert events_of(run)[-1] == "finished"
    (result,) = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.startswith('{"')]
    assert result["step"] == 100
