"""``megascend job``: files that shells, schemas and operators accept, what they do on signals and failures, and runs by them.

Slurm is a stand-in (tests/doubles/slurm); pods and nodes are processes with the variables that an operator sets.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from megascend.apps.plan.hardware import load
from megascend.apps.train.job_file import ClusterRequest, job_file
from megascend.config import load_config, parsed
from megascend.config.rl import RlConfig
from megascend.errors import ConfigError
from support import forked_programs
from support.job_runs import DEADLINE_S, events_of, started, steps_of, wait_for_step, write_run

SLURM = Path(__file__).parents[2] / "doubles" / "slurm"
H100_RUN = {"platform": "cuda", "parallel": {"tensor": 2}}


def rendered(kind: str, folder: Path, nodes: int = 1, **request: Any) -> str:
    """Write the job file of ``run.yaml`` in ``folder`` to ``job``, and return it."""
    config = load_config(folder / "run.yaml")
    device = {"cpu": None, "npu": "ascend-910b"}.get(config.platform, "h100")
    hardware = None if device is None else load(device)
    cards = 1 if hardware is None else hardware.cards_per_node
    values: dict[str, Any] = {"cards": cards, "hardware": hardware, "directory": folder} | request
    path = folder / "job"
    path.write_text(job_file(kind, config, ClusterRequest(Path("run.yaml"), nodes, **values), path))
    return path.read_text()


# --- Slurm ---


def directives(script: str) -> dict[str, str]:
    """Return the options that sbatch reads: comments before the first command."""
    options = {}
    for line in script.splitlines():
        if line and not line.startswith("#"):
            break
        if match := re.fullmatch(r"#SBATCH --([\w-]+)(?:=(\S+))?", line):
            options[match[1]] = match[2] or ""
    return options


def slurm_environment(script: str, folder: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a batch script: Slurm's variables, and the stand-ins before everything on PATH."""
    options = directives(script)
    paths = [str(folder / "bin"), str(SLURM), str(Path(sys.executable).parent), os.environ["PATH"]]
    return forked_programs.environment(
        PATH=os.pathsep.join(paths),
        SLURM_JOB_ID=str(os.getpid()),
        SLURM_NNODES=options["nodes"],
        SLURM_JOB_NODELIST=",".join(["localhost"] * int(options["nodes"])),
        SLURM_NTASKS_PER_NODE=options["ntasks-per-node"],
        SLURM_CPUS_PER_TASK=options["cpus-per-task"],
        REQUEUED=str(folder / "requeued"),
        **variables,
    )


RANK = """\
#!/bin/bash
# Stand-in for a rank: START is the number of this start; PLAN has an action for each.
echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $*" >> ranks
trap 'echo stopped >> ranks; exit 75' USR1 USR2
start=$(ls starts-"$RANK"-* 2> /dev/null | wc -l)
touch starts-"$RANK"-"$start"
actions=($PLAN)
case ${actions[$start]} in
  end) exit 0 ;;
  fail) exit 2 ;;
  save-and-fail) mkdir -p runs/job/checkpoints; echo "step-$start" > runs/job/checkpoints/latest; kill -KILL $$ ;;
  wait) touch waiting-"$RANK"; while :; do sleep 0.02; done ;;
esac
"""


def run_batch(folder: Path, plan: str, number: signal.Signals | None = None) -> int:
    """Run a batch script whose ranks follow ``plan``, send it a signal while they wait, and return its exit code."""
    write_run(folder)
    script = rendered("slurm", folder, nodes=2)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").write_text(RANK)
    (folder / "bin" / "python").chmod(0o755)
    with started(["bash", "job"], folder, slurm_environment(script, folder, PLAN=plan)) as batch:
        while number is not None and not all((folder / f"waiting-{rank}").exists() for rank in (0, 1)):
            assert batch.poll() is None, (folder / "log").read_text()
        if number is not None:
            batch.send_signal(number)
        return batch.wait(DEADLINE_S)


def test_slurm_ranks_get_their_places_and_the_command(tmp_path: Path) -> None:
    assert run_batch(tmp_path, "end") == 0
    port = 20000 + os.getpid() % 10000
    assert sorted((tmp_path / "ranks").read_text().splitlines()) == [
        f"{rank}/2 0/1 localhost:{port} -m megascend train run.yaml --resume auto" for rank in (0, 1)
    ]


def test_slurm_time_limit_stops_the_ranks_and_queues_the_job_again(tmp_path: Path) -> None:
    assert run_batch(tmp_path, "wait", signal.SIGUSR1) == 0
    assert (tmp_path / "ranks").read_text().count("stopped") == 2
    assert (tmp_path / "requeued").read_text() == f"{os.getpid()}\n"


def test_slurm_job_that_is_stopped_by_hand_is_not_queued_again(tmp_path: Path) -> None:
    assert run_batch(tmp_path, "wait", signal.SIGUSR2) == 75
    assert (tmp_path / "ranks").read_text().count("stopped") == 2
    assert not (tmp_path / "requeued").exists()


def test_slurm_failure_after_a_new_checkpoint_starts_again_and_others_end(tmp_path: Path) -> None:
    plan = "save-and-fail save-and-fail fail end"
    assert run_batch(tmp_path, plan) == 2
    assert len(list(tmp_path.glob("starts-0-*"))) == 3
    log = (tmp_path / "log").read_text()
    assert log.count("exit code 137 after a new checkpoint; starting again from it") == 2
    assert "exit code 2, without a new checkpoint; see: megascend doctor --run runs/job" in log


def test_slurm_script_asks_for_the_cards_of_the_layout(tmp_path: Path) -> None:
    write_run(tmp_path, **H100_RUN)
    script = rendered("slurm", tmp_path, nodes=2)
    options = directives(script)
    assert options | {"nodes": "2", "ntasks-per-node": "8", "gpus-per-node": "8"} == options
    assert options | {"signal": "B:USR1@600", "requeue": "", "open-mode": "append"} == options
    assert "WORLD_SIZE=16 " in script
    assert "export NCCL_SOCKET_IFNAME" not in re.sub(r"^#.*", "", script, flags=re.MULTILINE)
    write_run(tmp_path, platform="npu")
    assert directives(rendered("slurm", tmp_path))["gres"] == "npu:8"


def test_slurm_script_passes_shellcheck(tmp_path: Path) -> None:
    program = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        pytest.skip("shellcheck is not installed: pip install -e '.[dev]'")
    write_run(tmp_path)
    script = rendered("slurm", tmp_path, directory=Path("/a folder/with 'quotes'"), overrides=("data.path=a b",))
    for command in (["bash", "-n"], [program]):
        completed = subprocess.run(
            [*command, "job"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "cd '/a folder/with '\"'\"'quotes'\"'\"''" in script


@pytest.mark.nightly
@pytest.mark.slow
def test_slurm_job_trains_to_the_end_through_a_time_limit_and_a_lost_rank(small_model: Path, tmp_path: Path) -> None:
    write_run(tmp_path, model=str(small_model), steps=400)
    script = rendered("slurm", tmp_path, nodes=2)
    variables = slurm_environment(script, tmp_path, GLOO_SOCKET_IFNAME="lo")
    run = tmp_path / "runs" / "job"
    with started(["bash", "job"], tmp_path, variables) as batch:
        wait_for_step(15, tmp_path, batch)
        batch.send_signal(signal.SIGUSR1)
        assert batch.wait(DEADLINE_S) == 0
    assert (tmp_path / "requeued").exists()
    assert events_of(run)[-1] == "stopped"
    stopped_at = steps_of(run)[-1]
    with started(["bash", "job"], tmp_path, variables) as batch:  # as Slurm starts it again
        wait_for_step(stopped_at + 15, tmp_path, batch)
        (task, *_) = ranks_of(batch.pid)
        os.kill(task, signal.SIGKILL)
        assert batch.wait(DEADLINE_S) == 0, (tmp_path / "log").read_text()[-4000:]
    assert "after a new checkpoint; starting again from it" in (tmp_path / "log").read_text()
    assert steps_of(run) == [*range(1, 401)]
    assert events_of(run)[-1] == "finished"
    assert (run / "hf" / "model.safetensors").is_file()


def ranks_of(pid: int) -> list[int]:
    """Return the process ids of the ranks below a process."""
    import psutil

    below = psutil.Process(pid).children(recursive=True)
    return [process.pid for process in below if "megascend" in process.cmdline() and "RANK" in process.environ()]


# --- Kubernetes ---

COUNT = {"type": "integer", "minimum": 0}
TEXT = {"type": "string", "minLength": 1}


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    """Return the schema of a mapping that has no other keys."""
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required}


CONTAINER = closed(
    ["name", "image"],
    name={"const": "pytorch"},
    image=TEXT,
    workingDir=TEXT,
    command={"type": "array", "items": TEXT},
    env={"type": "array", "items": closed(["name"], name=TEXT, value={"type": "string"})},
    resources=closed([], limits={"type": "object", "additionalProperties": {"type": ["integer", "string"]}}),
    volumeMounts={"type": "array", "items": closed(["name", "mountPath"], name=TEXT, mountPath=TEXT)},
)
VOLUME = closed(
    ["name"],
    name=TEXT,
    persistentVolumeClaim=closed(["claimName"], claimName=TEXT),
    emptyDir=closed([], medium={"enum": ["", "Memory"]}),
)
POD = closed(
    ["containers"],
    terminationGracePeriodSeconds=COUNT,
    containers={"type": "array", "items": CONTAINER, "minItems": 1, "maxItems": 1},
    volumes={"type": "array", "items": VOLUME},
)
REPLICAS = closed(
    ["template"],
    replicas={"type": "integer", "minimum": 1},
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=closed(["spec"], spec=POD),
)
PYTORCH_JOB = closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "PyTorchJob"},
    metadata=closed(["name"], name={"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"}),
    spec=closed(
        ["pytorchReplicaSpecs"],
        nprocPerNode={"type": "string", "pattern": "^([0-9]+|auto|cpu|gpu)$"},
        elasticPolicy=closed(
            [],
            rdzvBackend=TEXT,
            rdzvId=TEXT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            maxRestarts=COUNT,
        ),
        runPolicy=closed([], backoffLimit=COUNT, cleanPodPolicy={"enum": ["Running", "All", "None", ""]}),
        # An elastic policy needs Worker: the operator's webhook.
        pytorchReplicaSpecs=closed(["Worker"], Worker=REPLICAS),
    ),
)
"""Part of the CRD's schema that job files use, in kubeflow/training-operator 1.7 to 1.9, with the rules of its webhook."""


def pytorch_job(folder: Path, nodes: int = 1, **request: Any) -> dict[str, Any]:
    """Return a job file of Kubernetes, checked against the schema; MEGASCEND_PYTORCHJOB_CRD: also against the operator's own."""
    job = yaml.safe_load(rendered("kubernetes", folder, nodes, **request))
    jsonschema.validate(job, PYTORCH_JOB)
    if crd := os.environ.get("MEGASCEND_PYTORCHJOB_CRD"):
        (version,) = yaml.safe_load(Path(crd).read_text())["spec"]["versions"]
        jsonschema.validate(job, version["schema"]["openAPIV3Schema"])
    return job


def test_kubernetes_job_has_the_pods_and_cards_of_the_layout(tmp_path: Path) -> None:
    write_run(tmp_path, **H100_RUN)
    job = pytorch_job(tmp_path, nodes=4, image="registry/megascend:1", name="first-run")
    spec, worker = job["spec"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert (job["metadata"]["name"], spec["nprocPerNode"], worker["replicas"]) == ("first-run", "8", 4)
    assert spec["elasticPolicy"]["minReplicas"] == spec["elasticPolicy"]["maxReplicas"] == 4
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "registry/megascend:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert container["workingDir"] == str(tmp_path)
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert not {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} & set(environment)
    write_run(tmp_path, platform="npu")
    (container,) = pytorch_job(tmp_path)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"huawei.com/Ascend910": 8}


# --- SkyPilot ---


def test_skypilot_task_has_nodes_cards_and_a_script(tmp_path: Path) -> None:
    write_run(tmp_path, **H100_RUN)
    task = yaml.safe_load(rendered("skypilot", tmp_path, nodes=2))
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
    assert task["volumes"] == {str(tmp_path): "megascend"}
    assert all(isinstance(value, str) for value in task["envs"].values())
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True, timeout=60)
    write_run(tmp_path, platform="npu")
    with pytest.raises(ConfigError, match="SkyPilot rents no Ascend cards"):
        rendered("skypilot", tmp_path)


# --- Ray, and the command ---


def test_ray_driver_reserves_a_node_for_each_worker(tmp_path: Path) -> None:
    write_run(tmp_path, **H100_RUN)
    constants = {}
    for node in ast.parse(rendered("ray", tmp_path, nodes=2)).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):  # made from others
                constants[node.targets[0].id] = ast.literal_eval(node.value)
    assert (constants["NODES"], constants["PROCESSES"]) == (2, 8)
    assert constants["RESOURCES"] == {"CPU": 1, "GPU": 8}
    assert constants["COMMAND"] == ["-m", "megascend", "train", "run.yaml", "--resume", "auto"]
    write_run(tmp_path, platform="npu")
    assert 'RESOURCES = {"CPU": 1, "NPU": 8}' in rendered("ray", tmp_path)


def test_command_writes_a_file_beside_the_run_file(megascend, tmp_path: Path) -> None:
    write_run(tmp_path, **H100_RUN)
    arguments = ("kubernetes", "run.yaml", "--nodes", "2", "--device", "h200", "--set", "lr=1e-4")
    completed = megascend("job", *arguments, cwd=tmp_path)
    assert "run.kubernetes.yaml: 2 x 8 NVIDIA H200" in completed.stdout
    assert "kubectl apply -f run.kubernetes.yaml" in completed.stdout
    text = (tmp_path / "run.kubernetes.yaml").read_text()
    assert "--set, lr=1e-4" in text
    assert "The layout was not compared with the model" in text


def test_placement_of_rl_gives_the_ranks_of_a_node(tmp_path: Path) -> None:
    settings = {"platform": "cuda", "placement": {"trainer": [0, 1], "engines": [[2], [3]]}}
    write_run(tmp_path, rollout={"prompts": "p.jsonl", "reward": "r.py:f"}, engines=["vllm", "vllm"], **settings)
    values = yaml.safe_load((tmp_path / "run.yaml").read_text())
    del values["data"]
    config = parsed(RlConfig, values, "run.yaml")
    request = ClusterRequest(Path("run.yaml"), 1, 4, load("h100"), tmp_path)
    script = job_file("slurm", config, request, Path("job"))
    options = directives(script)
    assert (options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "4")
    assert "python -m megascend rl run.yaml" in script
    for change, message in (({"nodes": 2}, "--nodes 2: placement"), ({"cards": 3}, "names card 3")):
        with pytest.raises(ConfigError, match=message):
            job_file("slurm", config, replace(request, **change), Path("job"))
