"""Memory of the Megatron engine, for a rank of each pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megascend.config import TrainerConfig
from megascend.models.memory.activations import (
    Case,
    LayerBytes,
    LayerKind,
    head_bytes,
    layer_bytes,
    norm_bytes,
    sparse_attention_temporaries,
)
from megascend.models.memory.parameters import (
    OFFLOAD_CHUNK,
    OFFLOAD_SLOTS,
    StageParameters,
    base_bytes,
    dequantised_bytes,
    orthogonalisation_bytes,
    stages,
    state_bytes,
    update_bytes,
)
from megascend.models.memory.sizes import Items, LayerKey, ModelSizes
from megascend.runtime.topology.schedule import layers_in_flight
from megascend.runtime.topology.topology import Topology

WORKSPACES = 96 * 2**20
"""Workspaces of cuBLAS and Transformer Engine, in torch's allocator."""


OFFLOADED = "optimizer state"
"""Item of host memory."""


@dataclass(frozen=True)
class StageGroup:
    """Pipeline stages with the same parameters and the same kinds of layers.

    Attributes:
        parameters: of a rank of one of the stages.
        layers: kind of each layer; one of a head for multi-token prediction, which has softmax attention, is the last.
        predicts: there is such a head.
        stages: their indices, ascending.
    """

    parameters: StageParameters
    layers: tuple[LayerKey, ...]
    predicts: bool
    stages: tuple[int, ...]


def stage_groups(parameters: Sequence[StageParameters], sizes: ModelSizes) -> list[StageGroup]:
    """Group the stages of a layout; the first and the last one are groups of their own."""
    keys = [*sizes.layer_keys, sizes.layer_keys[-1]._replace(linear=False)]
    groups: dict[tuple[StageParameters, tuple[LayerKey, ...], bool, bool], list[int]] = {}
    for stage, part in enumerate(parameters):
        layers = tuple(keys[layer] for layer in part.layers)
        ends = (stage == 0, stage == len(parameters) - 1)
        groups.setdefault((replace(part, layers=()), layers, *ends), []).append(stage)
    return [
        StageGroup(part, layers, len(sizes.with_experts) in parameters[stages[0]].layers, tuple(stages))
        for (part, layers, *_), stages in groups.items()
    ]


def stage_items(case: Case, groups: Sequence[StageGroup] | None = None) -> dict[int, Items]:
    """Return the bytes of each item, for a rank of the stage of each group that needs most.

    ``groups``: of the stages, if they are known already. Offloaded optimizer state, which is in host memory, is an item too:
    OFFLOADED.
    """
    info, sizes, topology, kind = case.info, case.sizes, case.topology, case.kind
    if groups is None:
        parameters = stages(
            info.tensors,
            topology,
            len(sizes.with_experts),
            sizes.tied,
            prediction_head=sizes.prediction_head,
            images=info.architecture.images,
            lora=case.config.lora,
            adapted_tower=info.architecture.images if case.config.vision_tower == "train" else None,
        )
        groups = stage_groups(parameters, sizes)
    saved_bytes = {
        key: layer_bytes(sizes, topology, kind, key) for key in {key for group in groups for key in group.layers}
    }
    communication = int(_communication(sizes, topology, kind, case.tokens))
    items = {}
    for group in groups:
        in_flight, stage = _most_in_flight(group, topology, len(sizes.with_experts), case.workload.micro_batches)
        stage_bytes = _stage_bytes(case, group, saved_bytes, first=group.stages[0] == 0)
        items[stage] = stage_bytes.items(in_flight, communication, kind)
    return dict(sorted(items.items()))


@dataclass(frozen=True)
class _StageBytes:
    """Memory of a stage with any number of micro batches in flight.

    Attributes:
        states: bytes of parameters, optimizer and adapters.
        saved: bytes that each micro batch in flight saves for the backward pass; ``edge``: those of one, at the model's ends.
        head, backward: temporaries of the output head, and of the backward pass.
        later: the largest temporaries after the activations are freed, by their name.
    """

    states: Items
    tokens: float
    saved: float
    edge: float
    head: float
    backward: float
    later: tuple[str, int]

    def items(self, in_flight: float, communication: int, kind: LayerKind) -> Items:
        """Return the bytes of each item."""
        activations = self.tokens * (self.saved * in_flight + self.edge)
        # Temporaries after the activations are freed may be larger than the activations. Peaks at different times do not add
        # up: the larger one is the estimate, and names what to shrink.
        name, later = self.later
        if later > activations + max(self.head, self.backward):
            return self.states | {name: later}
        items = dict(self.states)
        items["activations"] = int(activations)
        if self.head >= self.backward:
            items["output head"] = int(self.head)
        else:
            items["backward pass"] = int(self.backward)
        if communication:
            items["communication"] = communication
        if kind.fused:
            items["workspaces"] = WORKSPACES
        return items


def _stage_bytes(
    case: Case, group: StageGroup, saved_bytes: Mapping[LayerKey, LayerBytes], *, first: bool
) -> _StageBytes:
    """Count a stage of a group."""
    config, sizes, topology, kind, tokens = case.config, case.sizes, case.topology, case.kind, case.tokens
    parameters, layers, predicts = group.parameters, group.layers, group.predicts
    with_experts = [key.with_experts for key in layers]
    layer_sizes = [saved_bytes[key] for key in layers]
    saved, recomputed = _saved(config, layer_sizes, with_experts, kind, sizes, topology, predicts=predicts)
    last = parameters.vocabulary > 0
    hidden_bytes = kind.bytes * sizes.hidden
    edge = norm_bytes(sizes.hidden, kind) / topology.sequence_shards + 2 * hidden_bytes if last else 0.0
    edge += hidden_bytes / topology.sequence_shards if first and kind.fused else 0.0
    if predicts:
        edge += _prediction(config, sizes, kind, topology)
    head = head_bytes(sizes.hidden, parameters.vocabulary, tokens, kind, trained=not kind.frozen) if last else 0
    if predicts:  # the model's own hidden states have their gradient while the head's logits are computed
        head += hidden_bytes * tokens
    if last and not kind.frozen and config.optimizer.overlap_grad_reduce and not sizes.tied:
        head += parameters.vocabulary * sizes.hidden * (4 + kind.bytes)  # the gradient passes through autograd
    backward = tokens * recomputed + _backward(sizes, topology, kind, parameters, tokens)
    if sizes.indexed is not None:
        backward += sparse_attention_temporaries(sizes.indexed, sizes.heads, topology, tokens, case.workload.tokens)
    states = _states(config, topology, parameters, kind)
    if kind.frozen:
        states["dequantised weights"] = dequantised_bytes(
            config.base_weights, parameters, sum(with_experts), kind.bytes
        )
    if config.lora is not None:
        states["adapters"] = parameters.adapter.bytes(kind.bytes)
    temporaries = _later(config, topology, parameters, kind, embeds=first or predicts)
    # Megatron makes the main parameters on the device. Of their and the moments' bytes, a third is theirs.
    temporaries["main parameters at the start"] = 0 if kind.bytes == 4 else states.get(OFFLOADED, 0) // 3
    later = max(temporaries.items(), key=lambda item: item[1])
    return _StageBytes(states, tokens, saved, edge, head, backward, later)


def _states(config: TrainerConfig, topology: Topology, parameters: StageParameters, kind: LayerKind) -> Items:
    """Return bytes of parameters and optimizer state. Gradient buffers are fp32 in every precision."""
    if kind.frozen:
        return {"parameters": base_bytes(config.base_weights, parameters, kind.bytes)}
    items: Items = {"parameters": kind.bytes * parameters.total}
    parameters = parameters.trained(config.vision_tower)
    shares = (topology.data * topology.context, topology.expert_data) if config.optimizer.distributed else (1, 1)
    share = parameters.dense // shares[0] + parameters.experts // shares[1]
    items["main parameters"] = 0 if kind.bytes == 4 else 4 * share
    items["gradients"] = 4 * parameters.total
    matrices = parameters.dense_matrices // shares[0] + parameters.expert_matrices // shares[1]
    items["moments"] = int(state_bytes(config.optimizer, share, matrices))
    if offloaded := config.optimizer.offloaded_share:
        on_host = {name: int(offloaded * items[name]) for name in ("main parameters", "moments")}
        items |= {name: items[name] - size for name, size in on_host.items()}
        items[OFFLOADED] = sum(on_host.values())
        largest = min(OFFLOAD_CHUNK, _largest_matrix(config, topology, parameters))
        optimizers = 2 if parameters.experts else 1  # Megatron has a separate one for experts
        items["optimizer's buffers"] = optimizers * (OFFLOAD_SLOTS if kind.fused else 1) * 3 * 4 * largest
    return items


def _largest_matrix(config: TrainerConfig, topology: Topology, parameters: StageParameters) -> int:
    """Return the elements of the largest main parameter on a rank."""
    matrix = max(parameters.embedding, parameters.layer_matrix)
    if config.optimizer.distributed:
        matrix = min(matrix, -(-parameters.total // (topology.data * topology.context)))
    return int(matrix)


def _later(
    config: TrainerConfig, topology: Topology, parameters: StageParameters, kind: LayerKind, *, embeds: bool
) -> Items:
    """Return temporaries of the end of the backward pass, of the gradient reduction, and of the update."""
    if kind.frozen:
        return {"embedding's gradient": 0}
    parameters = parameters.trained(config.vision_tower)
    matrix = _largest_matrix(config, topology, parameters)
    # The matrices that several ranks share are divided among them; experts only among the ranks that have the same ones.
    ranks = topology.data * topology.context * topology.tensor
    matrices = parameters.dense_matrices * topology.tensor / ranks + parameters.expert_matrices / topology.expert_data
    return {
        "embedding's gradient": kind.bytes * parameters.embedding if embeds else 0,
        # Gloo's reduce-scatter copies the gradient buffer.
        "gradient reduction": 4 * max(parameters.dense, parameters.experts)
        if not kind.fused and config.optimizer.distributed
        else 0,
        "update": max(
            update_bytes(config.optimizer, matrix, fused=kind.fused),
            orthogonalisation_bytes(config.optimizer, matrices, kind.bytes),
        ),
    }


def _most_in_flight(group: StageGroup, topology: Topology, layers: int, micro_batches: int) -> tuple[float, int]:
    """Return the micro batches in flight on the stage of a group that has most (Narayanan et al. 2021, arXiv:2104.04473,
    section 2.2), and that stage.
    """
    pipeline, virtual = topology.pipeline, topology.virtual_pipeline
    stage = group.stages[0]
    if topology.is_uneven and virtual > 1:

        def in_flight(stage: int) -> float:
            sizes = [len(chunk) for chunk in topology.layers_of(stage, layers)]
            sizes[-1] += group.predicts  # a head for multi-token prediction is one more layer of the last chunk
            return layers_in_flight(stage, pipeline, tuple(sizes), micro_batches) / max(1, sum(sizes))

        return max(((in_flight(stage), stage) for stage in group.stages), key=lambda entry: entry[0])
    # The first stage waits longest for its first gradient, so it holds the most; this is so in any group.
    if virtual == 1:
        return min(pipeline - stage, micro_batches), stage
    chunks = 2 * (pipeline - stage - 1) + (virtual - 1) * pipeline + 1
    return min(chunks / virtual, micro_batches), stage


def _prediction(config: TrainerConfig, sizes: ModelSizes, kind: LayerKind, topology: Topology) -> float:
    """Return the bytes per token that a head for multi-token prediction saves in addition to its layer's.

    Two norms, their outputs side by side, and a last norm; the model's and the head's output are joined before the output layer.
    """
    states = kind.bytes * sizes.hidden
    joined = 2 * states / topology.sequence_shards + 2 * states
    if config.recompute.granularity == "full":
        return states / topology.sequence_shards + joined
    return (3 * norm_bytes(sizes.hidden, kind) + 2 * states) / topology.sequence_shards + joined


def _saved(
    config: TrainerConfig,
    layers: list[LayerBytes],
    layers_with_experts: list[bool],
    kind: LayerKind,
    sizes: ModelSizes,
    topology: Topology,
    *,
    predicts: bool,
) -> tuple[float, float]:
    """Return bytes per token of all layers that are saved for the backward pass, and that it recomputes at one time.

    ``predicts``: the last of them is that of a head for multi-token prediction, which is recomputed separately.
    """
    recompute = config.recompute
    if recompute.granularity == "full":
        model, heads = (layers[:-1], [layers[-1:]]) if predicts else (layers, [])
        blocks = [model[start : start + recompute.layers] for start in range(0, len(model), recompute.layers)] + heads
        saved = sum(block[0].entry for block in blocks)
        return saved, max((sum(layer.total for layer in block) for block in blocks), default=0.0)
    if recompute.granularity == "none":
        return sum(layer.total for layer in layers), 0.0
    saved = recomputed = 0.0
    norm = kind.bytes * sizes.hidden / topology.sequence_shards
    for layer, with_experts in zip(layers, layers_with_experts, strict=True):
        attention, mlp = layer.attention, layer.mlp
        if "core_attn" in recompute.modules:
            recomputed, attention = max(recomputed, layer.probabilities), attention - layer.probabilities
        if ("moe" if with_experts else "mlp") in recompute.modules and mlp:
            recomputed, mlp = (
                max(recomputed, mlp),
                layer.entry + (norm_bytes(sizes.hidden, kind) if with_experts else 0.0),
            )
        elif with_experts and "moe_act" in recompute.modules:
            mlp -= layer.activation
        if "layernorm" in recompute.modules and with_experts:
            mlp -= norm
        saved += attention + mlp
    return saved, recomputed


def _backward(
    sizes: ModelSizes, topology: Topology, kind: LayerKind, parameters: StageParameters, tokens: float
) -> float:
    """Return bytes of gradients alive at one time in the backward pass of one layer."""
    width = max(
        sizes.ffn / topology.tensor,
        sizes.expert_ffn / topology.expert_tensor * sizes.topk if any(sizes.with_experts) else 0.0,
        0.0 if sizes.state_space is None else sizes.state_space.projected / topology.tensor,
    )
    rows = sizes.topk if any(sizes.with_experts) else 1
    # Gradients of the two products of gate and up, of the layer's input, and of the rows that its experts compute.
    gradients = kind.bytes * tokens * (2 * width + (1 + rows) * sizes.hidden)
    if kind.keeps_probabilities:  # those of the probabilities and of the softmax's input
        gradients += 2 * kind.bytes * tokens * kind.longest * sizes.heads / topology.tensor
    return gradients + (0 if kind.fused or kind.frozen else kind.bytes * parameters.layer_matrix)


def _communication(sizes: ModelSizes, topology: Topology, kind: LayerKind, tokens: float) -> float:
    """Return bytes of hidden states in communication: gathered under sequence parallelism, sent and received by stages."""
    states = kind.bytes * sizes.hidden * tokens
    gathered = states if topology.sequence_parallel and topology.tensor > 1 and kind.fused else 0
    return gathered + (2 * states / topology.sequence_shards if topology.pipeline > 1 else 0)
