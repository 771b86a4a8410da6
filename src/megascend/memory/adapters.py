"""Factors of a LoRA adapter, their gradients and moments."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megascend.config import Lora
from megascend.huggingface.files import TensorHeader
from megascend.memory.parameters import ROW_PARALLEL, StageParameters
from megascend.memory.sizes import layer_of
from megascend.topology.topology import Topology

RANK_MULTIPLE = 8
"""Ranks are padded to a multiple in the copy that layers compute with (:mod:`megascend.lora.stacked_adapters`)."""
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "fc1", "up_proj": "fc1"}
"""Projections that Megatron computes as one."""


def adapter_bytes(
    lora: Lora,
    headers: Mapping[str, TensorHeader],
    held: StageParameters,
    topology: Topology,
    element: int,
    *,
    fused: bool,
    stacked: bool,
) -> int:
    """Of one adapter on the layers of a pipeline stage: fp32 factors, gradients and two moments.

    Args:
        element: bytes of an element of activations.
        fused: some projections are computed as one, and their factors side by side.
        stacked: layers compute with a copy of the factors in the model's precision, which has fp32 gradients of its own.
    """
    factors = copies = 0.0
    padded = -(-lora.rank // RANK_MULTIPLE) * RANK_MULTIPLE
    layers: dict[str, list[tuple[float, float]]] = {}
    for name, header in headers.items():
        layer = layer_of(name)
        if layer not in held.layers or not is_target(name, header.shape, lora):
            continue
        count, rows, columns = _local(name, header.shape, topology)
        factors += count * lora.rank * (rows + columns)
        kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
        key = re.sub(rf"{kind}(\.weight)?$", FUSED.get(kind, kind) if fused else kind, name)
        layers.setdefault(key, []).append((count * rows, count * columns))
    for parts in layers.values():
        # A of each slice, and a B that reaches over all slices' rows and outputs.
        slices = len(parts)
        copies += padded * (sum(columns for _, columns in parts) + slices * sum(rows for rows, _ in parts))
    return int(16 * factors + (4 + element) * copies * stacked)


def is_target(name: str, shape: tuple[int, ...], lora: Lora) -> bool:
    """Whether the adapter acts on the layer of a weight inside the model's layers."""
    module = name.removesuffix(".weight")
    if len(shape) < 2 or module.endswith("gate"):
        return False
    return lora.targets == "all-linear" or any(f".{module}".endswith(f".{target}") for target in lora.targets)


def _local(name: str, shape: tuple[int, ...], topology: Topology) -> tuple[float, float, float]:
    """(experts, rows, columns) of a weight that a rank holds."""
    rows, columns = float(shape[-2]), float(shape[-1])
    experts = ".experts." in name
    parts = topology.expert_tensor if experts else topology.tensor
    module = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if module in ROW_PARALLEL:
        columns /= parts
    else:
        rows /= parts
    count = (shape[0] if len(shape) == 3 else 1) / (topology.expert if experts else 1)
    return count, rows, columns
