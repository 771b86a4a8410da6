"""What the server's process finds in its environment. The servers are programs that write it down and end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megascend.rollout.engines.vllm_process import VllmProcess

ROOT = Path(__file__).parents[3]
VERL_PYTHON = Path(os.environ.get("MEGASCEND_VERL_PYTHON") or ROOT / ".venv-verl" / "bin" / "python")


def environment_of_a_server(folder: Path, **options: Any) -> dict[str, str]:
    server = folder / "server"
    server.write_text('#!/bin/sh\nexec env -0 > "$REPORT"\n')
    server.chmod(0o755)
    report = folder / "report"
    settings: dict[str, Any] = {"key_file": folder / "key", "log": folder / "log"} | options
    settings["environment"] = {"REPORT": str(report), **settings.get("environment", {})}
    process = VllmProcess(server, "model", **settings)
    try:
        process._process.wait(30)
    finally:
        process.close()
    return dict(line.split("=", 1) for line in report.read_text().split("\0") if line)


def in_a_cluster(monkeypatch: pytest.MonkeyPatch, address: str, initialized: bool = True) -> None:
    """``ray`` imported, as this process would see it."""
    ray = SimpleNamespace(
        is_initialized=lambda: initialized, get_runtime_context=lambda: SimpleNamespace(gcs_address=address)
    )
    monkeypatch.setitem(sys.modules, "ray", ray)


def test_a_server_finds_this_processes_variables_and_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_KEY", "must not be seen")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("OF_THE_TRAINER", "1")
    found = environment_of_a_server(tmp_path, environment={"FURTHER": "2"})
    assert (found["OF_THE_TRAINER"], found["FURTHER"]) == ("1", "2")
    assert found["WEIGHTWIRE_KEY_FILE"] == str(tmp_path / "key")
    assert not {"WEIGHTWIRE_KEY", "RAY_ADDRESS"} & found.keys()


def test_the_address_of_the_ray_cluster_is_handed_on(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    in_a_cluster(monkeypatch, "10.0.0.7:6379")
    assert environment_of_a_server(tmp_path)["RAY_ADDRESS"] == "10.0.0.7:6379"
    given = {"environment": {"RAY_ADDRESS": "named:1"}}
    assert environment_of_a_server(tmp_path, **given)["RAY_ADDRESS"] == "named:1"
    monkeypatch.setenv("RAY_ADDRESS", "variable:2")
    assert environment_of_a_server(tmp_path)["RAY_ADDRESS"] == "variable:2"


def test_ray_that_was_imported_alone_is_in_no_cluster(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    in_a_cluster(monkeypatch, "10.0.0.7:6379", initialized=False)
    assert "RAY_ADDRESS" not in environment_of_a_server(tmp_path)


@pytest.mark.nightly
def test_a_real_ray_cluster_tells_its_address(tmp_path):
    """An actor, which finds no RAY_ADDRESS in its environment, starts a process that finds the cluster with it."""
    if not VERL_PYTHON.exists():
        pytest.skip(
            f"no ray: {VERL_PYTHON} does not exist; bash scripts/verl_env.sh makes it, or set MEGASCEND_VERL_PYTHON"
        )
    program = """
import json, os, subprocess, sys
import ray

@ray.remote
class Trainer:
    def child(self):
        from megascend.rollout.engines.vllm_process import ray_address
        handed = ray_address(sys.modules.get("ray"))
        code = "import ray; ray.init(logging_level='error'); print(ray.get_runtime_context().gcs_address)"
        done = subprocess.run([sys.executable, "-c", code], env=os.environ | handed, capture_output=True, text=True, timeout=120)
        return "RAY_ADDRESS" in os.environ, handed, done.stdout.split()[-1:]

ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="error")
own = ray.get_runtime_context().gcs_address
print(json.dumps([own, *ray.get(Trainer.remote().child.remote(), timeout=150)]))
"""
    done = subprocess.run(
        [VERL_PYTHON, "-c", program],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "RAY_TMPDIR": "/tmp"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    own, found_before, handed, of_child = json.loads(done.stdout.strip().splitlines()[-1])
    assert handed == {"RAY_ADDRESS": own}
    assert of_child == [own]
    assert not found_before
