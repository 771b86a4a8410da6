"""Sizes of a rank's parameters and LoRA state, from the shapes of a checkpoint's weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megascend.config import Adam, BaseWeights, Lora, VisionTower
from megascend.models import Images
from megascend.models.checkpoint_files.files import TensorHeader
from megascend.models.checkpoint_files.hidden_matrices import MATRIX_OPTIMIZERS, ROUND_ELEMENTS, is_hidden_matrix
from megascend.models.checkpoint_files.info import EMBEDDINGS, NON_TARGET_ENDS
from megascend.models.checkpoint_files.scalar_head import WEIGHT
from megascend.models.memory.sizes import LAYER, layer_of
from megascend.runtime.topology.topology import Topology

ROW_PARALLEL = ("o_proj", "down_proj", "dense_4h_to_h", "out_proj", "w2", "dense")
"""Row parallel linear layers, whose input is divided over tensor parallel ranks; all others are column parallel."""
REPLICATED = (
    ".gate.weight",
    "router.weight",
    "shared_expert_gate.weight",
    "kv_a_proj_with_mqa.weight",
    "q_a_proj.weight",
    "latent_proj.weight",
)
"""Matrices that are replicated on tensor parallel ranks."""
EXPERT = re.compile(r"\.experts\.(?:\d+\.)?(gate_proj|up_proj|down_proj|w1|w2|w3)$")
"""End of the module of an expert's weight; transformers has one parameter of all experts for gate and up, and one for down."""
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "fc1", "up_proj": "fc1"}
"""Projections that Megatron fuses."""


@dataclass(frozen=True)
class AdapterSizes:
    """Elements of an adapter on a rank.

    Attributes:
        factors: elements of the factors of all targets.
        stacked: elements of a copy of the factors in which fused projections are stacked, with padded ranks.
    """

    factors: float = 0.0
    stacked: float = 0.0

    def bytes(self, element: int) -> int:
        """Return the bytes of fp32 factors, gradients and two moments, and of the layers' copy with its fp32 gradients.

        Args:
            element: bytes of an element in the model's precision, which the copy has.
        """
        return int(16 * self.factors + (4 + element) * self.stacked)


@dataclass(frozen=True)
class StageParameters:
    """Elements on a rank of one pipeline stage.

    Attributes:
        dense: parameters other than experts.
        experts: parameters of the rank's routed experts.
        vocabulary: rows of the output layer on the rank, 0 without it.
        embedding: elements of the larger of embedding and output layer on the rank; 0 without them.
        layer_matrix: elements of the largest matrix of a layer on the rank: of one expert, with what the engine fuses.
        layers: indices of the layers; a head for multi-token prediction follows the last one.
        tower: elements of a vision tower, which is not divided; 0 on later stages.
        dense_matrices, expert_matrices: elements among ``dense`` and ``experts`` that Muon would train.
        adapter: elements of the run's adapter.
    """

    dense: int
    experts: int
    vocabulary: int
    embedding: int
    layer_matrix: int
    layers: tuple[int, ...]
    tower: int = 0
    dense_matrices: int = 0
    expert_matrices: int = 0
    adapter: AdapterSizes = AdapterSizes()

    @property
    def total(self) -> int:
        """All elements."""
        return self.dense + self.experts + self.tower

    def trained(self, tower: VisionTower) -> StageParameters:
        """Return the parameters without a tower that is not trained; a trained one is as other dense ones."""
        return replace(self, dense=self.dense + (self.tower if tower == "train" else 0), tower=0)


@dataclass(frozen=True)
class LayerTensors:
    """Tensors of a checkpoint by layer. Layers with the same tensors are of one kind, and are counted once.

    Attributes:
        kinds: tensors of a layer of each kind.
        layer_kinds: kind of each layer that has tensors, by its index; a head for multi-token prediction follows the last layer.
        outside: tensors outside layers.
        tower: tensors of a vision tower.
    """

    kinds: tuple[tuple[tuple[str, TensorHeader], ...], ...]
    layer_kinds: Mapping[int, int]
    outside: tuple[tuple[str, TensorHeader], ...]
    tower: Mapping[str, TensorHeader] = field(default_factory=dict)

    @classmethod
    def sorted_by_layer(
        cls, headers: Mapping[str, TensorHeader], layers: int, images: Images | None = None
    ) -> LayerTensors:
        """Sort the tensors of a checkpoint; ``images``: declaration of a model's images, None if it takes none."""
        tower = {} if images is None else {name: h for name, h in headers.items() if name.startswith(images.tower)}
        by_layer: dict[int | None, list[tuple[str, TensorHeader]]] = {}
        for name, header in headers.items():
            if name not in tower:
                # Heads that are named outside the layers are numbered from 0.
                by_layer.setdefault(layers if ".mtp." in f".{name}" else layer_of(name), []).append((name, header))
        outside = tuple(by_layer.pop(None, ()))
        kinds: dict[tuple[tuple[str, tuple[int, ...]], ...], int] = {}
        tensors, layer_kinds = [], {}
        for layer, entries in by_layer.items():
            assert layer is not None
            key = tuple(sorted((LAYER.sub(".layers.", name, count=1), header.shape) for name, header in entries))
            if key not in kinds:
                kinds[key] = len(kinds)
                tensors.append(tuple(entries))
            layer_kinds[layer] = kinds[key]
        return cls(tuple(tensors), layer_kinds, outside, tower)


def stages(
    headers: Mapping[str, TensorHeader],
    topology: Topology,
    layers: int,
    tied: bool,
    *,
    prediction_head: bool = False,
    images: Images | None = None,
    fused: bool = True,
    tensors: LayerTensors | None = None,
    lora: Lora | None = None,
    adapted_tower: Images | None = None,
) -> list[StageParameters]:
    """Return the parameters of a rank of each pipeline stage, as Megatron divides them.

    Args:
        images: declaration of a model's images; None: it takes none.
        fused: projections of one input are one matrix, as in Megatron.
        tensors: ``headers`` by layer, where they are sorted already: plans count one model for many layouts.
        lora: an adapter of the model's layers; ``adapted_tower``: declaration of images whose tower it acts on, too.
    """
    tensors = tensors or LayerTensors.sorted_by_layer(headers, layers, images)
    counts = [
        LayerParameters(
            *_layer_parameters(kind, topology, fused),
            AdapterSizes() if lora is None else _adapter(lora, kind, topology, fused),
        )
        for kind in tensors.kinds
    ]
    parameters = [
        _stage(tensors, counts, topology, layers, tied, stage, prediction_head) for stage in range(topology.pipeline)
    ]
    first = replace(parameters[0], tower=elements(tensors.tower))
    if lora is not None and adapted_tower is not None:
        linear = [
            (name, header)
            for name, header in tensors.tower.items()
            if name.removesuffix(".weight").removeprefix(adapted_tower.tower) not in adapted_tower.not_linear
        ]
        # The tower is not divided.
        added = _adapter(lora, linear, None, fused)
        first = replace(first, adapter=_sum_of_adapters([first.adapter, added]))
    return [first, *parameters[1:]]


class LayerParameters(NamedTuple):
    """Elements of a layer on a rank: as of :class:`StageParameters`."""

    dense: int
    experts: int
    dense_matrices: int
    expert_matrices: int
    matrix: int
    adapter: AdapterSizes


def _layer_parameters(
    tensors: Sequence[tuple[str, TensorHeader]], topology: Topology, fused: bool
) -> tuple[int, int, int, int, int]:
    """Return a layer's elements on a rank: dense ones, experts', of each the matrices, and of the largest matrix."""
    dense = experts = dense_matrices = expert_matrices = 0
    matrices: dict[str, int] = {}
    for name, header in tensors:
        hidden = is_hidden_matrix(name, header.shape)
        if ".experts." in name:
            count = _shard_size(header.shape, topology.expert_tensor * topology.expert)
            experts += count
            expert_matrices += count if hidden else 0
            # An expert is on one expert parallel rank, whether or not one tensor of the checkpoint has all experts.
            count = _shard_size(header.shape[-2:], topology.expert_tensor)
        else:
            count = local_elements(name, header.shape, topology.tensor)
            dense += count
            dense_matrices += count if hidden else 0
        prefix, _, kind = name.removesuffix(".weight").rpartition(".")
        key = f"{prefix}.{FUSED.get(kind, kind)}" if fused else name
        matrices[key] = matrices.get(key, 0) + count
    return dense, experts, dense_matrices, expert_matrices, max(matrices.values(), default=0)


def _stage(
    tensors: LayerTensors,
    counts: Sequence[LayerParameters],
    topology: Topology,
    layers: int,
    tied: bool,
    stage: int,
    prediction_head: bool,
) -> StageParameters:
    """Return a stage's parameters; ``counts``: of a layer of each kind."""
    stage_layers = [layer for chunk in topology.layers_of(stage, layers) for layer in chunk]
    first, last = stage == 0, stage == topology.pipeline - 1
    if prediction_head and last:
        stage_layers.append(layers)
    # Megatron has a copy of a tied embedding on the last stage, where it is the output layer; a head for multi-token
    # prediction embeds tokens there.
    embeds = first or (last and (tied or prediction_head))
    layer_counts = [counts[tensors.layer_kinds[layer]] for layer in stage_layers if layer in tensors.layer_kinds]
    dense = sum(layer.dense for layer in layer_counts)
    vocabulary = embedding = 0
    for name, header in tensors.outside:
        count = local_elements(name, header.shape, topology.tensor)
        is_embedding = name.endswith((*EMBEDDINGS, "wte.weight"))
        is_head = name.endswith("lm_head.weight") or name == WEIGHT
        if (is_embedding and embeds) or (is_head and last) or not (is_embedding or is_head or not last):
            dense += count
        if (is_embedding and embeds) or (is_head and last):
            embedding = max(embedding, count)
        if (is_head or (is_embedding and tied)) and last:
            vocabulary = -(-header.shape[0] // topology.tensor)
    return StageParameters(
        dense,
        sum(layer.experts for layer in layer_counts),
        vocabulary,
        embedding,
        max((layer.matrix for layer in layer_counts), default=0),
        tuple(stage_layers),
        dense_matrices=sum(layer.dense_matrices for layer in layer_counts),
        expert_matrices=sum(layer.expert_matrices for layer in layer_counts),
        adapter=_sum_of_adapters(layer.adapter for layer in layer_counts),
    )


QUANTISED_BLOCK, QUANTISED_CHUNK = 256, 2**22
"""Values of 8-bit moments with a common fp32 scale, and that are dequantised at a time. Copies of the constants of
:mod:`megascend.engines.common.blockwise_adamw`, which imports torch."""
QUANTISATION_COPIES = 6
"""fp32 and int32 copies of a chunk: both moments, the magnitudes, normalised values and codes of one, and AdamW's temporary."""


OFFLOAD_CHUNK, OFFLOAD_SLOTS = 2**22, 3
"""Elements of main parameters and moments that are on the device at a time, and buffers for them. Copies of the constants of
:mod:`megascend.engines.common.offloaded_adam`, which imports torch."""


def state_bytes(adam: Adam, parameters: float, matrices: float) -> float:
    """Return the bytes of two moments of ``parameters`` elements; those in ``matrices`` may have one momentum."""
    if adam.moments == "8bit":  # the few of one-dimensional weights, which are fp32, are counted like the others
        return 2 * (1 + 4 / QUANTISED_BLOCK) * parameters
    return 8 * parameters - (4 * matrices if adam.kind in MATRIX_OPTIMIZERS else 0)


def orthogonalisation_bytes(adam: Adam, matrices: float, element_bytes: int) -> int:
    """Return the temporaries of the update of hidden matrices on a rank that has ``matrices`` elements of them."""
    row = MATRIX_OPTIMIZERS.get(adam.kind)
    return 0 if row is None else int(row.copies * element_bytes * min(matrices, ROUND_ELEMENTS))


def update_bytes(adam: Adam, matrix: float, *, fused: bool) -> int:
    """Return the temporaries of AdamW's update of the largest parameter, of ``matrix`` elements, on a rank."""
    if adam.moments == "8bit":
        return int(QUANTISATION_COPIES * 4 * min(matrix, QUANTISED_CHUNK))
    if adam.offload:
        matrix = min(matrix, OFFLOAD_CHUNK)
    # The plain AdamW has two in fp32, a fused one none.
    return 0 if fused else int(2 * 4 * matrix)


BASE_BYTES = {"fp8": 1 + 4 / 128, "nf4": 0.5 + 4 / 64}
"""Bytes of a quantised base weight with its share of a scale, and DEQUANTISED_CHUNK, the values that are dequantised at a time in
temporaries of fp32: copies of the constants of :mod:`megascend.training.lora.quantised_weights`, which imports torch."""
DEQUANTISED_CHUNK = 2**24


def base_bytes(method: BaseWeights, parameters: StageParameters, element: int) -> int:
    """Return the bytes of a stage's frozen parameters; ``element``: of one that is not quantised."""
    if method == "unquantised":
        return element * parameters.total
    matrices = parameters.dense_matrices + parameters.expert_matrices
    return int(element * (parameters.total - matrices) + BASE_BYTES[method] * matrices)


def dequantised_bytes(method: BaseWeights, parameters: StageParameters, expert_layers: int, element: int) -> int:
    """Return the bytes of the dequantised weights of one layer, while it runs.

    Args:
        expert_layers: layers of the stage with routed experts; the first projections of all of a layer's experts exist at once.
    """
    if method == "unquantised":
        return 0
    experts = 2 * parameters.expert_matrices / (3 * expert_layers) if expert_layers else 0
    matrix = parameters.layer_matrix
    # Codes as int32, and values in fp32, twice.
    return int(element * max(matrix, experts) + 12 * min(matrix, DEQUANTISED_CHUNK))


def local_elements(name: str, shape: tuple[int, ...], tensor: int) -> int:
    """Return the elements of a non-expert weight on a tensor parallel rank."""
    divided = len(shape) > 1 and not name.endswith(REPLICATED)
    return _shard_size(shape, tensor if divided else 1)


def elements(headers: Mapping[str, TensorHeader]) -> int:
    """Count the elements of all weights."""
    return sum(math.prod(header.shape) for header in headers.values())


def _shard_size(shape: tuple[int, ...], parts: int) -> int:
    return -(-math.prod(shape) // parts)


RANK_MULTIPLE = 8
"""Multiple to which layers pad the ranks of factors. A copy of the constant of :mod:`megascend.training.lora.stacked_adapters`,
which imports torch."""


def _adapter(
    lora: Lora, tensors: Sequence[tuple[str, TensorHeader]], topology: Topology | None, fused: bool
) -> AdapterSizes:
    """Return the elements of an adapter of some tensors on a rank; without a topology, they are not divided.

    ``fused``: fused projections have their factors stacked.
    """
    padded = -(-lora.rank // RANK_MULTIPLE) * RANK_MULTIPLE
    slices: dict[str, list[tuple[float, float]]] = {}  # (outputs, inputs) by fused layer
    for name, header in tensors:
        if not is_target(name, header.shape, lora):
            continue
        count, rows, columns = (1.0, *header.shape) if topology is None else _local(name, header.shape, topology)
        prefix, _, kind = name.removesuffix(".weight").rpartition(".")
        if adapted_name(name).endswith(".experts.gate_up_proj"):
            # Gate and up of an expert have one A and one B, as in peft.
            [(outputs, _)] = slices.get(f"{prefix}.fc1", [(0.0, 0.0)])
            slices[f"{prefix}.fc1"] = [(outputs + count * rows, count * columns)]
            continue
        key = f"{prefix}.{FUSED.get(kind, kind) if fused else kind}"
        slices.setdefault(key, []).append((count * rows, count * columns))
    factors = stacked = 0.0
    for parts in slices.values():
        rows, columns = (sum(sizes) for sizes in zip(*parts, strict=True))
        factors += lora.rank * (rows + columns)
        # A of each slice, and one B over the ranks and outputs of all slices.
        stacked += padded * (columns + len(parts) * rows)
    return AdapterSizes(factors, stacked)


def _sum_of_adapters(adapters: Iterable[AdapterSizes]) -> AdapterSizes:
    adapters = list(adapters)
    return AdapterSizes(sum(entry.factors for entry in adapters), sum(entry.stacked for entry in adapters))


def adapted_name(name: str) -> str:
    """Return the module of a weight, or the parameter of all experts, as adapters name it."""
    module = name.removesuffix(".weight")
    match = EXPERT.search(module)
    if match is None:
        return module
    return f"{module[: match.start()]}.experts.{'down_proj' if match[1] in ('down_proj', 'w2') else 'gate_up_proj'}"


def is_target(name: str, shape: tuple[int, ...], lora: Lora) -> bool:
    """Check whether the adapter targets a weight of the model's layers."""
    module = adapted_name(name)
    if len(shape) < 2 or module.endswith(NON_TARGET_ENDS):
        return False
    return lora.targets == "all-linear" or any(f".{module}".endswith(f".{target}") for target in lora.targets)


def _local(name: str, shape: tuple[int, ...], topology: Topology) -> tuple[float, float, float]:
    """Return (experts, rows, columns) of a weight on a rank."""
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
