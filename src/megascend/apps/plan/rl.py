"""Split of a cluster's devices between inference engines and the trainer, for asynchronous RL. Pure.

Both work at the same time, so a step takes as long as the slower of them. Decoding is limited by the memory's bandwidth: a step
of all sequences of an engine reads its weights, and the keys and values of every sequence. Prompts, prefix caches, environments
and weight updates are not counted; nothing was compared with measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megascend.apps.plan.hardware import Hardware
from megascend.apps.plan.search import Candidate, PlannedModel, PlanRequest, search
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.models.memory.parameters import elements
from megascend.models.memory.sizes import ModelSizes

BF16 = 2
CACHE_SHARE = 0.85
"""Share of a device's memory that weights and keys and values of an engine may take."""
DECODE_SHARE = 0.7
"""Share of the memory's bandwidth at which an engine decodes."""


@dataclass(frozen=True)
class PlannedEngines:
    """Inference engines on some devices.

    Attributes:
        devices: of all engines; ``tensor``: of one of them.
        sequences: that one engine decodes at a time.
        tokens_per_second: that all engines sample.
    """

    devices: int
    tensor: int
    sequences: int
    tokens_per_second: float


@dataclass(frozen=True)
class Split:
    """Devices of engines and trainer, and the seconds in which each does its part of a step."""

    engines: PlannedEngines
    trainer: Candidate
    generation_s: float

    @property
    def seconds(self) -> float:
        return max(self.generation_s, self.trainer.time.seconds)

    @property
    def idle(self) -> float:
        """Share of a step in which the faster of the two waits."""
        return 1 - min(self.generation_s, self.trainer.time.seconds) / self.seconds


def cache_bytes(sizes: ModelSizes) -> int:
    """Return the bytes of keys and values that an engine keeps of a token."""
    layers = sizes.attention_layers
    width = 2 * sizes.key_value
    if sizes.latent is not None:
        width = sizes.latent.key_value_latent + sizes.latent.rotated
    return BF16 * layers * width


def touched_share(sizes: ModelSizes, sequences: int) -> float:
    """Return the share of experts that at least one of these sequences chooses, if it chooses at random."""
    return 1 - (1 - sizes.topk / sizes.experts) ** sequences if sizes.experts else 1.0


def engines_on(
    info: ModelInfo, sizes: ModelSizes, devices: int, length: int, batch: int, hardware: Hardware
) -> PlannedEngines | None:
    """Return the engines of some devices; None if the weights do not fit.

    Args:
        length: tokens of a response, of which half are in the cache on average.
        batch: responses of a step, which the engines divide.
    """
    weights = BF16 * elements(info.tensors)
    experts = BF16 * elements({name: header for name, header in info.tensors.items() if ".experts." in name})
    room = CACHE_SHARE * hardware.memory
    tensor = 1
    while tensor <= devices and (devices % tensor or weights / tensor > 0.8 * room):
        tensor *= 2
    if tensor > devices:
        return None
    count = devices // tensor
    cached = cache_bytes(sizes) * length
    fitting = math.inf if not cached else (tensor * room - weights) / cached
    sequences = int(max(1, min(fitting, math.ceil(batch / count))))
    read = weights - experts * (1 - touched_share(sizes, sequences)) + sequences * cached / 2
    step_s = read / (tensor * hardware.bytes_per_s * DECODE_SHARE)
    return PlannedEngines(devices, tensor, sequences, count * sequences / step_s)


def splits(model: PlannedModel, request: PlanRequest, hardware: Hardware) -> list[Split]:
    """Return divisions of the devices, the one with the shortest step first.

    Engines get whole nodes, or powers of two of the devices of a node.
    """
    cards, node = request.cards, hardware.cards_per_node
    sizes = [2**power for power in range(int(math.log2(node)) + 1)] + list(range(2 * node, cards, node))
    divisions = []
    for devices in (size for size in sizes if size < cards):
        engines = engines_on(model.info, model.sizes, devices, request.length, request.global_batch, hardware)
        if engines is None:
            continue
        plan = search(model, replace(request, cards=cards - devices), hardware, best=1)
        if plan.candidates:
            divisions.append(Split(engines, plan.candidates[0], request.tokens / engines.tokens_per_second))
    return sorted(divisions, key=lambda split: split.seconds)
