"""Choose GPUs and vLLM options for vLLM servers on the trainer's host. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VISIBLE = "CUDA_VISIBLE_DEVICES"
BESIDE_TRAINER = 0.35
"""Share of a GPU's memory for all engines on it if the trainer uses it, too."""
EXCLUSIVE = 0.7
"""The same without the trainer. The rest is for CUDA graphs, and for a second, staged copy of the weights."""


@dataclass(frozen=True)
class Placement:
    """The GPU of one engine.

    Attributes:
        gpu: its name in ``CUDA_VISIBLE_DEVICES``.
        memory: share of its memory that the engine may take.
        with_trainer: shared with rank 0 of the trainer.
    """

    gpu: str
    memory: float
    with_trainer: bool

    def environment(self) -> dict[str, str]:
        """Return the variables that restrict the engine to this GPU."""
        return {VISIBLE: self.gpu}

    def options(self) -> list[str]:
        """Return vLLM's options for its share of memory."""
        return [f"--gpu-memory-utilization={self.memory:.3g}"]


def visible_gpus(environment: Mapping[str, str], count: int) -> list[str]:
    """Return the names of this process's GPUs, as ``CUDA_VISIBLE_DEVICES`` of a child has them.

    Args:
        count: number of GPUs visible to this process (``torch.cuda.device_count()``).
    """
    if VISIBLE not in environment:
        return [str(index) for index in range(count)]
    # Names, not indices: they may be UUIDs, or a part of the host's GPUs.
    return [name.strip() for name in environment[VISIBLE].split(",")][:count]


def place_engines(gpus: Sequence[str], trainers: int, engines: int) -> list[Placement]:
    """Assign each engine a GPU that no trainer process uses or, if there is none, that of the trainer's rank 0.

    On the GPU of rank 0, which sends the weights, an engine can copy them from the sender's memory.

    Args:
        gpus: names of this host's GPUs; a trainer process uses the one at its local rank.
        trainers: processes of the trainer on this host that use a GPU.

    Returns:
        One for each engine; none without GPUs.
    """
    if not gpus:
        return []
    free = list(gpus[trainers:])
    # Beside a trainer most of the memory is the trainer's.
    candidates, total = free or [gpus[0]], EXCLUSIVE if free else BESIDE_TRAINER
    names = [candidates[number % len(candidates)] for number in range(engines)]
    return [Placement(name, total / names.count(name), not free) for name in names]


def device_options(device: str) -> list[str]:
    """Return vLLM's options for a type of device: on a CPU fp32, which follows the trainer to 1e-5, without compiling."""
    return ["--enforce-eager", "--dtype=float32"] if device == "cpu" else ["--dtype=bfloat16"]
