"""Choose GPUs and vLLM options for vLLM servers on the trainer's host. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megascend.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
BESIDE_TRAINER = 0.35
"""Share of a GPU's memory for all engines on it if the trainer uses it, too."""
EXCLUSIVE = 0.7
"""The same without the trainer. The rest is for CUDA graphs, and for a second, staged copy of the weights."""
MAX_SHARE = 0.95
"""Largest share of a GPU's memory for all engines on it."""


@dataclass(frozen=True)
class Placement:
    """The GPUs of one engine.

    Attributes:
        gpus: their names in ``CUDA_VISIBLE_DEVICES``; several for a tensor parallel engine.
        memory: share of their memory that the engine may take.
        with_trainer: one of them is used by a process of the trainer.
    """

    gpus: tuple[str, ...]
    memory: float
    with_trainer: bool

    def __str__(self) -> str:
        numbers = f"GPU {self.gpus[0]}" if len(self.gpus) == 1 else f"GPUs {', '.join(self.gpus)}"
        return f"{numbers}{', the trainer too' if self.with_trainer else ''}, {self.memory:.0%} of the memory"

    def environment(self) -> dict[str, str]:
        return {VISIBLE: ",".join(self.gpus)}

    def options(self) -> list[str]:
        parallel = [] if len(self.gpus) == 1 else [f"--tensor-parallel-size={len(self.gpus)}"]
        return [f"--gpu-memory-utilization={self.memory:.3g}", *parallel]


def visible_gpus(environment: Mapping[str, str], count: int) -> list[str]:
    """Return the names of this process's GPUs, as ``CUDA_VISIBLE_DEVICES`` of a child has them.

    Args:
        count: number of GPUs visible to this process (``torch.cuda.device_count()``).
    """
    if VISIBLE not in environment:
        return [str(index) for index in range(count)]
    # Names, not indices: they may be UUIDs, or a part of the host's GPUs.
    return [name.strip() for name in environment[VISIBLE].split(",")][:count]


def place_engines(
    gpus: Sequence[str],
    trainers: int,
    engines: int,
    *,
    trainer_gpus: Sequence[int] | None = None,
    engine_gpus: Sequence[Sequence[int]] | None = None,
    memory: float | None = None,
) -> list[Placement]:
    """Assign each engine GPUs: by default one that no trainer process uses or, if there is none, that of the trainer's rank 0.

    On the GPU of rank 0, which sends the weights, an engine can copy them from the sender's memory.

    Args:
        trainers: processes of the trainer on this host that use a GPU.
        trainer_gpus: positions in ``gpus`` of the trainer's GPUs, by local rank; default: the first ones.
        engine_gpus: positions in ``gpus`` of each engine's GPUs.
        memory: share of memory for one engine; default: :data:`EXCLUSIVE`, or :data:`BESIDE_TRAINER` on the trainer's GPUs,
            divided by the engines on a GPU.

    Returns:
        One for each engine; none without GPUs.
    """
    if not gpus:
        if trainer_gpus or engine_gpus:
            raise ConfigError("placement names GPUs, and this host shows none")
        return []
    used = _trainer_positions(gpus, trainers, trainer_gpus)
    if engine_gpus is None:
        free = [position for position in range(len(gpus)) if position not in used]
        # Beside a trainer most of the memory is the trainer's.
        candidates = free or [used[0]]
        engine_gpus = [[candidates[number % len(candidates)]] for number in range(engines)]
    elif len(engine_gpus) != engines:
        raise ConfigError(f"placement.engines has the GPUs of {len(engine_gpus)} engines, and {engines} are started")
    for number, positions in enumerate(engine_gpus):
        _check_positions(f"placement.engines[{number}]", positions, gpus)
    counts = {position: sum(position in other for other in engine_gpus) for position in range(len(gpus))}
    placements = []
    for positions in engine_gpus:
        shared = bool({*positions} & {*used})
        sharing = max(counts[position] for position in positions)
        share = (BESIDE_TRAINER if shared else EXCLUSIVE) / sharing if memory is None else memory
        if share * sharing > MAX_SHARE:
            raise ConfigError(
                f"placement.memory: {share:g} for each of {sharing} engines on one GPU; at most {MAX_SHARE:g} for all is possible"
            )
        placements.append(Placement(tuple(gpus[position] for position in positions), share, shared))
    return placements


def trainer_environment(gpus: Sequence[str], trainers: int, trainer_gpus: Sequence[int] | None) -> dict[str, str]:
    """Return the variables that give the trainer's local ranks their GPUs; empty if these are the first ones anyway."""
    if trainer_gpus is None:
        return {}
    return {VISIBLE: ",".join(gpus[position] for position in _trainer_positions(gpus, trainers, trainer_gpus))}


def _trainer_positions(gpus: Sequence[str], trainers: int, trainer_gpus: Sequence[int] | None) -> list[int]:
    if trainer_gpus is None:
        # More processes than GPUs: the bootstrap refuses that, with its own message.
        return list(range(min(trainers, len(gpus))))
    _check_positions("placement.trainer", trainer_gpus, gpus)
    if len(trainer_gpus) != trainers:
        raise ConfigError(
            f"placement.trainer has {len(trainer_gpus)} GPUs, and {trainers} processes of the trainer on this host use one each"
        )
    return list(trainer_gpus)


def _check_positions(setting: str, positions: Sequence[int], gpus: Sequence[str]) -> None:
    if not positions:
        raise ConfigError(f"{setting} is empty; name at least one GPU")
    if missing := [position for position in positions if not 0 <= position < len(gpus)]:
        raise ConfigError(f"{setting} names GPU {missing[0]}; visible are {len(gpus)}, 0 to {len(gpus) - 1}")
    if len({*positions}) < len(positions):
        raise ConfigError(f"{setting} names a GPU twice: {', '.join(map(str, positions))}")


def device_options(device: str) -> list[str]:
    """Return vLLM's options for a type of device: on a CPU fp32, which follows the trainer to 1e-5, without compiling."""
    return ["--enforce-eager", "--dtype=float32"] if device == "cpu" else ["--dtype=bfloat16"]
