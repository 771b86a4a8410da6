"""Child processes that are not ranks inherit no variable of the launcher."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megascend.apps.cli.checks import run_python
from megascend.apps.rl.rollout.engines.guarded import GuardedProcess
from megascend.apps.rl.rollout.engines.vllm_process import engine_environment
from megascend.runtime.distributed.launch import plain_environment
from npu_acceptance import processes

pytestmark = pytest.mark.waiting

RANK = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "0",
    "ROLE_NAME": "default",
    "ROLE_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29400",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_ERROR_FILE": "/none",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "PET_NPROC_PER_NODE": "1",
    "OMPI_COMM_WORLD_RANK": "0",
    "PMI_RANK": "0",
    "PMIX_RANK": "0",
    "MV2_COMM_WORLD_RANK": "0",
    "OMPI_MCA_orte_ess_vpid": "0",
    "PRTE_LAUNCHED": "1",
    "HYDI_CONTROL_FD": "7",
    "NCCL_COMM_ID": "127.0.0.1:1",
    "NODE_RANK": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEPID": "0",
    "MEGASCEND_STORE": "/none",
}
"""Variables of torchrun (torch.distributed.elastic, ``LocalElasticAgent``), MPI launchers, srun and ``run_distributed``."""
REPORT = "import json, os; print(json.dumps(dict(os.environ)))"


def guarded_environment(folder: Path) -> dict[str, str]:
    with (folder / "out").open("wb") as output:
        guarded = GuardedProcess([sys.executable, "-c", REPORT], output=output)
        assert guarded.process.wait(60) == 0
        guarded.release()
    return json.loads((folder / "out").read_text())


def acceptance_environment(folder: Path) -> dict[str, str]:
    return json.loads(processes.run([sys.executable, "-c", REPORT], folder / "log", 60.0).tail)


def doctor_environment(folder: Path) -> dict[str, str]:
    return run_python(["-c", REPORT], 60.0)


CHILDREN: dict[str, Callable[[Path], dict[str, str]]] = {
    "local engine and other guarded processes": guarded_environment,
    "vLLM": lambda folder: engine_environment(sys.executable),
    "self-check and reference programs": lambda folder: plain_environment(),
    "acceptance": acceptance_environment,
    "doctor": doctor_environment,
}


@pytest.mark.parametrize("child", CHILDREN)
def test_child_process_sees_no_variable_of_the_launcher(
    child: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**RANK, "USER_VARIABLE": "1"}.items():
        monkeypatch.setenv(name, value)
    variables = CHILDREN[child](tmp_path)
    assert sorted(RANK.keys() & variables.keys()) == []
    assert variables["USER_VARIABLE"] == "1"


def test_engines_do_not_inherit_thread_and_allocator_settings() -> None:
    settings = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "MKL_NUM_THREADS")
    trainer = dict.fromkeys((*settings, "PYTORCH_CUDA_ALLOC_CONF"), "1") | {"SLURM_JOB_ID": "7", "USER_VARIABLE": "1"}
    # A job's own variables stay: a child may ask for its allocation.
    assert engine_environment("/other/python", trainer) == {"SLURM_JOB_ID": "7", "USER_VARIABLE": "1"}
