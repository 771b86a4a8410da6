"""Commented job files that start a run on a cluster, for ``megascend job``: Slurm, Kubernetes, SkyPilot and Ray Train."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megascend.apps.plan.hardware import Hardware
from megascend.config import TrainerConfig
from megascend.config.commented import comment, yaml_value
from megascend.config.rl import RlConfig
from megascend.errors import ConfigError
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.runtime.topology.topology import Topology, plan

TEMPLATES = Path(__file__).with_name("job_templates")
GRACE_S = 600
"""Seconds between a scheduler's signal and the end of the job, for a step and a checkpoint."""
KILL_MARGIN_S = 30
"""Seconds by which torchrun kills ranks that have not saved before the scheduler kills torchrun."""
LATE_S = 300
"""Seconds beyond the run's ``timeout_s`` after which Slurm ends ranks that outlive another one."""
NAME_LENGTH = 40
"""Longest name: Kubernetes appends ``-worker-N`` to it, and takes 63 characters."""
INTERFACES = {
    "cpu": ("GLOO_SOCKET_IFNAME",),
    "cuda": ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    "npu": ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"),
}
"""Variables that name the network interface between hosts, by platform (docs/parallelism.md)."""


@dataclass(frozen=True)
class ClusterRequest:
    """Cluster that a run is to be started on.

    Attributes:
        run_file: as the command on the nodes names it.
        nodes: number of nodes; ``cards``: devices of a node, on CPUs processes.
        hardware: kind of device; None on CPUs.
        directory: working directory, on a file system that all nodes share.
        name: of the job; None: made from the run file's.
        image: container with megascend; None: that of ``containers/`` for the platform.
        overrides: further settings, ``a.b=value``.
    """

    run_file: Path
    nodes: int
    cards: int
    hardware: Hardware | None
    directory: Path
    name: str | None = None
    image: str | None = None
    overrides: tuple[str, ...] = ()


def job_file(kind: str, config: TrainerConfig, request: ClusterRequest, path: Path) -> str:
    """Return a job file of a kind in :data:`KINDS` for a run, whose layout is checked for the cluster.

    Args:
        path: path of the job file, which its comments name.
    """
    check_kind(kind)
    job = _ClusterJob(config, request, path)
    values = job.common(kind) | KINDS[kind].substitutions(job)
    template = (TEMPLATES / f"{kind}.template").read_text(encoding="utf-8")
    # A part that is empty and has a line to itself takes the line along.
    for name in (name for name, value in values.items() if not value):
        template = re.sub(rf"^<<{name}>>\n", "", template, flags=re.MULTILINE)
    return re.sub(r"<<(\w+)>>", lambda match: values[match[1]], template)


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of job {kind!r}; known: {', '.join(KINDS)}")


@dataclass(frozen=True)
class _ClusterJob:
    """A run on a cluster, with the values that job files are filled with."""

    config: TrainerConfig
    request: ClusterRequest
    path: Path

    @property
    def platform(self) -> str:
        return "cpu" if self.request.hardware is None else self.request.hardware.platform

    @cached_property
    def processes(self) -> int:
        """Return the processes that train on each node: one a card, of ``rl`` those that its placement gives to the trainer."""
        nodes, cards = self.request.nodes, self.request.cards
        placement = self.config.placement if isinstance(self.config, RlConfig) else None
        if placement is None or placement.trainer is None:
            return cards
        if nodes > 1:
            raise ConfigError(
                f"--nodes {nodes}: placement names cards of one host; leave it out, and name the addresses of engines that run "
                "elsewhere"
            )
        highest = max(*placement.trainer, *(card for engine in placement.engines or () for card in engine))
        if highest >= cards:
            raise ConfigError(f"placement names card {highest}, and --cards-per-node {cards} has 0 to {cards - 1}")
        return len(placement.trainer)

    @cached_property
    def topology(self) -> Topology:
        """Return the layout, checked with the model where it is on this machine."""
        model = self.config.model
        shape = inspect_checkpoint(model, mtp=self.config.mtp).shape if model.exists() else None
        return plan(self.config.parallel, self.request.nodes * self.processes, shape)

    @property
    def command(self) -> list[str]:
        """Return Python's arguments for a rank: a run that is started again resumes."""
        command = "rl" if isinstance(self.config, RlConfig) else "train"
        settings = [part for override in self.request.overrides for part in ("--set", override)]
        return ["-m", "megascend", command, str(self.request.run_file), *settings, "--resume", "auto"]

    @property
    def caches(self) -> dict[str, str]:
        """Return variables that place caches on the shared file system."""
        folder = self.request.directory / ".cache"
        return {"MEGASCEND_CACHE": str(folder / "megascend"), "TRITON_CACHE_DIR": str(folder / "triton")}

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables of torchrun's environment: with time to save, and a workaround for hosts that return."""
        return self.caches | {
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_S - KILL_MARGIN_S),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }

    @property
    def interfaces(self) -> dict[str, str]:
        return dict.fromkeys(INTERFACES[self.platform], "eth0")

    def common(self, kind: str) -> dict[str, str]:
        name = self.request.name or job_name(self.request.run_file.stem)
        if len(name) > NAME_LENGTH or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
            raise ConfigError(
                f"--name {name}: takes lower-case letters, digits and hyphens, a letter first, at most {NAME_LENGTH} characters"
            )
        return {
            "header": "\n".join(line for remark in self._remarks(kind) for line in comment(remark)),
            "file": str(self.path),
            "name": name,
            "nodes": str(self.request.nodes),
            "processes": str(self.processes),
            "grace": str(GRACE_S),
            "image": self.request.image or f"megascend:{self.platform}",
        }

    def _remarks(self, kind: str) -> list[str]:
        request, model = self.request, self.config.model
        device = "CPU process" if request.hardware is None else request.hardware.title
        remarks = [
            f"{request.run_file} on {request.nodes} x {request.cards} x {device}, written by `megascend job {kind}`.",
            f"Layout: {self.topology.describe().partition(chr(10))[0]}.",
        ]
        if not model.exists():
            remarks.append(f"The layout was not compared with the model: {model} was not there when this was written.")
        if not self.config.checkpoint.every:
            remarks.append(
                "checkpoint.every is 0: a checkpoint is saved only when a signal stops the run, and a lost node loses all of it."
            )
        return remarks

    def slurm(self) -> dict[str, str]:
        cards = {"cuda": "#SBATCH --gpus-per-node={}", "npu": "#SBATCH --gres=npu:{}"}.get(self.platform, "")
        output = str(self.config.output)
        return {
            "resources": cards.format(self.request.cards),
            "exports": "\n".join(f"export {name}={shlex.quote(value)}" for name, value in self.caches.items()),
            "interfaces": " ".join(f"{name}={value}" for name, value in self.interfaces.items()),
            "directory": shlex.quote(str(self.request.directory)),
            "world": str(self.topology.world_size),
            "wait": f"{self.config.timeout_s + LATE_S:.0f}",
            "command": shlex.join(["python", *self.command]),
            "latest": shlex.quote(f"{output}/checkpoints/latest"),
            "diagnosis": shlex.quote(f"see: megascend doctor --run {shlex.quote(output)}"),
        }

    def kubernetes(self) -> dict[str, str]:
        def entries(variables: Mapping[str, str], begin: str) -> str:
            lines = [yaml_value({"name": name, "value": value}) for name, value in variables.items()]
            return "\n".join(f"{' ' * 16}{begin}{line}" for line in lines)

        cards = {"cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}.get(self.platform, "cpu")
        return {
            "command": yaml_value(["torchrun", *self.command]),
            "environment": entries(self.variables, "- "),
            "interfaces": entries(self.interfaces, "# - "),
            "limits": f"{' ' * 18}{cards}: {self.request.cards}",
            "directory": yaml_value(str(self.request.directory)),
        }

    def skypilot(self) -> dict[str, str]:
        hardware, cards = self.request.hardware, self.request.cards
        if hardware is not None and hardware.platform == "npu":
            raise ConfigError(
                f"--device {hardware.name}: SkyPilot rents no Ascend cards; megascend job knows slurm and kubernetes for them"
            )
        resource = f"cpus: {cards}+" if hardware is None else f"accelerators: {hardware.name.upper()}:{cards}"
        return {
            "resources": f"  {resource}",
            "environment": "\n".join(f"  {name}: {yaml_value(value)}" for name, value in self.variables.items()),
            "interfaces": "\n".join(f"  # {name}: {value}" for name, value in self.interfaces.items()),
            "volume": yaml_value(str(self.request.directory)),
            "directory": shlex.quote(str(self.request.directory)),
            "command": shlex.join(self.command),
        }

    def ray(self) -> dict[str, str]:
        cards = {"cuda": "GPU", "npu": "NPU"}.get(self.platform)
        return {
            "resources": json.dumps({"CPU": 1} | ({} if cards is None else {cards: self.request.cards})),
            "environment": _literal(self.variables),
            "interfaces": json.dumps(self.interfaces),
            "directory": json.dumps(str(self.request.directory)),
            "output": json.dumps(str(self.config.output)),
            "command": json.dumps(self.command),
        }


def job_name(text: str) -> str:
    """Return a name that Slurm, Kubernetes and SkyPilot accept, made from a text."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (name if name[:1].isalpha() else f"run-{name}")[:NAME_LENGTH].rstrip("-")


def _literal(values: Mapping[str, str]) -> str:
    return "\n".join(["{", *(f"    {json.dumps(name)}: {json.dumps(value)}," for name, value in values.items()), "}"])


@dataclass(frozen=True)
class JobKind:
    """Kind of job file: the ending of its name, its start, and the substitutions in its template."""

    suffix: str
    start: str
    substitutions: Callable[[_ClusterJob], dict[str, str]]


KINDS = {
    "slurm": JobKind(".slurm.sh", "sbatch", _ClusterJob.slurm),
    "kubernetes": JobKind(".kubernetes.yaml", "kubectl apply -f", _ClusterJob.kubernetes),
    "skypilot": JobKind(".skypilot.yaml", "sky jobs launch", _ClusterJob.skypilot),
    "ray": JobKind(".ray.py", "python", _ClusterJob.ray),
}
"""Kinds of job files by name."""
