"""Parameters, and LoRA factors with their gradients and moments, of a rank, by the shapes of a checkpoint's weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megascend.config import Lora
from megascend.huggingface.files import TensorHeader
from megascend.memory.sizes import layer_of
from megascend.topology.topology import Topology

ROW_PARALLEL = ("o_proj", "down_proj", "dense_4h_to_h", "out_proj", "w2", "dense")
"""Linear layers whose input is divided over tensor parallel ranks; of all others the output is."""
REPLICATED = (
    "mlp.gate.weight",
    "router.weight",
    "shared_expert_gate.weight",
    "kv_a_proj_with_mqa.weight",
    "q_a_proj.weight",
)
"""Matrices of which every tensor parallel rank has all."""


@dataclass(frozen=True)
class StageParameters:
    """Elements that a rank of one pipeline stage holds.

    Attributes:
        dense: of everything but experts.
        experts: of the routed experts that are on the rank.
        vocabulary: rows of the output layer on the rank, 0 where it is not.
        embedding: elements of the largest of embedding and output layer on the rank; 0 without them.
        layer_matrix: elements of the largest matrix of a layer on the rank, experts one by one.
        layers: numbers of the layers.
    """

    dense: int
    experts: int
    vocabulary: int
    embedding: int
    layer_matrix: int
    layers: tuple[int, ...]

    @property
    def total(self) -> int:
        """All elements."""
        return self.dense + self.experts


def stages(headers: Mapping[str, TensorHeader], topology: Topology, layers: int, tied: bool) -> list[StageParameters]:
    """The parameters of a rank of each pipeline stage, as Megatron divides them."""
    return [_stage(headers, topology, layers, tied, stage) for stage in range(topology.pipeline)]


def layers_of_stage(stage: int, layers: int, topology: Topology) -> tuple[int, ...]:
    """Numbers of the layers on a pipeline stage: equal chunks, dealt out in turn."""
    chunk = max(1, layers // (topology.pipeline * topology.virtual_pipeline))
    return tuple(layer for layer in range(layers) if layer // chunk % topology.pipeline == stage)


def _stage(
    headers: Mapping[str, TensorHeader], topology: Topology, layers: int, tied: bool, stage: int
) -> StageParameters:
    mine = set(layers_of_stage(stage, layers, topology))
    first, last = stage == 0, stage == topology.pipeline - 1
    dense = experts = vocabulary = embedding = matrix = 0
    for name, header in headers.items():
        layer = layer_of(name)
        if layer is not None:
            if layer not in mine:
                continue
            if ".experts." in name:
                held = _held(header.shape, topology.expert_tensor * topology.expert)
                experts += held
                # A fused weight of all experts counts as one matrix an expert.
                matrix = max(matrix, held // (header.shape[0] // topology.expert if len(header.shape) == 3 else 1))
            else:
                held = local_elements(name, header.shape, topology.tensor)
                dense += held
                matrix = max(matrix, held)
            continue
        held = local_elements(name, header.shape, topology.tensor)
        is_embedding = name.endswith(("embed_tokens.weight", "wte.weight"))
        is_head = name.endswith("lm_head.weight")
        if (
            (is_embedding and (first or (tied and last)))
            or (is_head and last)
            or not (is_embedding or is_head or not last)
        ):
            dense += held
        if (is_embedding and (first or (tied and last))) or (is_head and last):
            embedding = max(embedding, held)
        if (is_head or (is_embedding and tied)) and last:
            vocabulary = -(-header.shape[0] // topology.tensor)
    return StageParameters(dense, experts, vocabulary, embedding, matrix, tuple(sorted(mine)))


def local_elements(name: str, shape: tuple[int, ...], tensor: int) -> int:
    """Elements of a weight outside of experts on a tensor parallel rank."""
    divided = len(shape) > 1 and not name.endswith(REPLICATED)
    return _held(shape, tensor if divided else 1)


def elements(headers: Mapping[str, TensorHeader]) -> int:
    """Elements of all weights."""
    return sum(math.prod(header.shape) for header in headers.values())


def _held(shape: tuple[int, ...], parts: int) -> int:
    return -(-math.prod(shape) // parts)


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
    """Return the bytes of an adapter on a pipeline stage's layers: fp32 factors, gradients and two moments.

    ``element``: bytes of an activation; ``fused``: fused projections have their factors side by side; ``stacked``: layers compute
    with a copy of the factors in the model's precision, which has fp32 gradients of its own.
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
