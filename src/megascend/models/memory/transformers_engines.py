"""Memory of the engines that run transformers' models, ``fsdp`` and ``single``.

transformers' layers are plain PyTorch on every platform: a norm saves an fp32 copy of its input, its result before the weight and
its output; an MLP the outputs of all its projections and steps. Only attention and the loss have special kernels.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from megascend.config import TrainerConfig
from megascend.config.registry import ENGINES
from megascend.models.base import LINEAR, SINGLE_MIXERS
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.models.memory.activations import (
    FP32,
    Case,
    LayerBytes,
    LayerKind,
    head_bytes,
    linear_attention_bytes,
    state_space_bytes,
)
from megascend.models.memory.parameters import (
    StageParameters,
    elements,
    orthogonalisation_bytes,
    stages,
    state_bytes,
    update_bytes,
)
from megascend.models.memory.sizes import Items, LayerKey, ModelSizes, layer_of
from megascend.runtime.topology.topology import Topology

WORKSPACES = 32 * 2**20
"""Workspace of cuBLAS, in torch's allocator."""


def items(case: Case) -> Items:
    """Return the bytes of each item of a rank."""
    config, sizes, kind, tokens = case.config, case.sizes, case.kind, case.tokens
    images = case.info.architecture.images
    [parameters] = stages(
        case.info.tensors,
        case.topology,
        len(sizes.with_experts),
        sizes.tied,
        images=images,
        fused=False,
        lora=config.lora,
        adapted_tower=images if config.vision_tower == "train" else None,
    )
    layers = [layer_bytes(sizes, kind, key) for key in sizes.layer_keys]
    saved, recomputed = _saved(config, layers, sizes, kind)
    activations = tokens * (saved + _norm(sizes.hidden, kind) + kind.bytes * sizes.hidden)
    head = head_bytes(sizes.hidden, parameters.vocabulary, tokens, kind, trained=not kind.frozen)
    backward = tokens * (recomputed + _backward(sizes, kind))
    if ENGINES[config.engine].memory == "whole":
        stage_items, backward_parameters, later = _single(config, parameters, kind)
    else:
        stage_items, backward_parameters, later = _fsdp(case, parameters)
    if config.lora is not None:
        # Unsharded and unfused.
        stage_items["adapters"] = parameters.adapter.bytes(kind.bytes)
    if sizes.indexed is not None:
        # transformers keeps the products of all of the indexer's heads at once, and a layer's mask for the backward pass.
        masks = 1 if config.recompute.granularity == "full" else len(layers)
        activations += masks * tokens * tokens
        backward += 2 * FP32 * sizes.indexed.heads * tokens * tokens
    backward += backward_parameters
    if later > activations + max(head, backward):
        stage_items["update"] = int(later)
    else:
        stage_items["activations"] = int(activations)
        stage_items["output head" if head >= backward else "backward pass"] = int(max(head, backward))
    if kind.fused:
        stage_items["workspaces"] = WORKSPACES
    return stage_items


def second_model(case: Case) -> tuple[int, int]:
    """Return the bytes of a second, frozen model, which ``case`` has, and those of its forward pass."""
    config, info, sizes, topology, tokens = case.config, case.info, case.sizes, case.topology, case.tokens
    kind = replace(case.kind, frozen=True, rank=0, teacher=None)
    layers = [layer_bytes(sizes, kind, key) for key in sizes.layer_keys]
    # Without gradients a layer's results are freed as the next ones are computed: attention's before those of the MLP.
    passing = max(max(layer.attention, layer.mlp) for layer in layers) + kind.bytes * sizes.hidden
    head = head_bytes(sizes.hidden, sizes.vocabulary, tokens, kind, trained=False)
    if ENGINES[config.engine].memory == "whole":
        return kind.bytes * elements(info.tensors), int(max(tokens * passing, head))
    by_layer = _layer_elements(info, topology)
    outside, layer = by_layer.pop(None, 0.0), max(by_layer.values())
    sharded = kind.bytes * elements(info.tensors) * config.fsdp.replicate // topology.world_size
    gathered = kind.bytes * (outside + 2 * layer)
    return 0 if config.fsdp.offload else sharded, int(gathered + max(tokens * passing, head))


def layer_bytes(sizes: ModelSizes, kind: LayerKind, key: LayerKey) -> LayerBytes:
    """Return the saved bytes per token of a kind of layer, without recomputation."""
    b = kind.bytes
    attention = _norm(sizes.hidden, kind)
    if key.mixer in SINGLE_MIXERS:
        attention = 0.0
    elif key.mixer == LINEAR and sizes.state_space is not None:
        attention += state_space_bytes(sizes.state_space, kind)
    elif key.linear and sizes.linear is not None:
        attention += linear_attention_bytes(sizes.linear, kind)
    else:
        if sizes.qk_norm:
            attention += _norm(sizes.query, kind) - b * sizes.query + _norm(sizes.key_value, kind) - b * sizes.key_value
        attention += b * (sizes.query + 2 * sizes.key_value)  # rotated, and values
        attention += b * sizes.query * (2 if kind.packed and not kind.fused else 1) + FP32 * sizes.heads  # the output
        attention += 2 * b * sizes.query if sizes.output_gate else 0
    mlp = _norm(sizes.hidden, kind)
    if key.mixer not in ("", *SINGLE_MIXERS):
        mlp = 0.0
    elif key.with_experts:
        row_bytes = b * ((sizes.latent_experts or sizes.hidden) + 4 * sizes.expert_ffn)
        mlp += sizes.topk * row_bytes + b * 4 * sizes.shared_ffn + 16 * sizes.experts
    else:
        mlp += b * (4 if sizes.gated else 2) * sizes.ffn
    adapted = b * kind.rank
    return LayerBytes(attention + 4 * adapted, mlp + 3 * adapted, b * sizes.hidden)


def _norm(width: int, kind: LayerKind) -> float:
    """Return the bytes of a norm: input in fp32, result before the weight if that has a gradient, output."""
    return FP32 * width + kind.bytes * width * (1 if kind.frozen else 2) + FP32


def _saved(config: TrainerConfig, layers: list[LayerBytes], sizes: ModelSizes, kind: LayerKind) -> tuple[float, float]:
    """Return bytes per token of all layers that are saved for the backward pass, and of the layer that it recomputes."""
    total, largest = sum(layer.total for layer in layers), max(layer.total for layer in layers)
    entries = sum(layer.entry for layer in layers)
    if config.recompute.granularity == "none":
        return total, 0.0
    if config.recompute.granularity == "full":
        return entries, largest
    # Attention and every second product: of q, v, the gate, and the last one.
    saved = kind.bytes * (2 * sizes.query + sizes.key_value + sizes.ffn + sizes.hidden) + FP32 * sizes.heads
    return entries + len(layers) * saved, largest - saved


def _backward(sizes: ModelSizes, kind: LayerKind) -> float:
    """Return bytes per token of gradients alive at one time in the backward pass of one layer."""
    rows, width = (sizes.topk, sizes.expert_ffn) if any(sizes.with_experts) else (1, sizes.ffn)
    return kind.bytes * (2 * rows * width + (1 + rows) * sizes.hidden)


EngineItems = tuple[Items, float, float]
"""Persistent items, bytes of parameters and their gradients in the backward pass, and temporaries of the update."""


def _single(config: TrainerConfig, parameters: StageParameters, kind: LayerKind) -> EngineItems:
    """Return items of parameters, with fp32 main parameters if they have 16 bits; gradients are fp32 and persistent."""
    items: Items = {"parameters": kind.bytes * parameters.total}
    if kind.frozen:
        return items, 0.0, 0.0
    parameters = parameters.trained(config.vision_tower)
    items["main parameters"] = 0 if kind.bytes == FP32 else FP32 * parameters.total
    items["gradients"] = FP32 * parameters.total
    matrices = parameters.dense_matrices + parameters.expert_matrices
    items["moments"] = int(state_bytes(config.optimizer, parameters.total, matrices))
    update = update_bytes(config.optimizer, max(parameters.embedding, parameters.layer_matrix), fused=kind.fused)
    update = max(update, orthogonalisation_bytes(config.optimizer, matrices, kind.bytes))
    return items, kind.bytes * parameters.layer_matrix, max(update, kind.bytes * parameters.embedding)


def _fsdp(case: Case, parameters: StageParameters) -> EngineItems:
    """Return items of fp32 shards, and of gathered parameters in the run's precision."""
    config, info, sizes, topology, kind = case.config, case.info, case.sizes, case.topology, case.kind
    shares = topology.world_size // config.fsdp.replicate
    sharded = elements(info.tensors) / shares  # experts too: expert parallelism and row shards divide them as much
    on_device = 0 if config.fsdp.offload else 1
    items: Items = {"parameters": int(on_device * (kind.bytes if kind.frozen else FP32) * sharded)}
    trained = parameters.trained(config.vision_tower).total / parameters.total * sharded
    matrices = (parameters.dense_matrices + parameters.expert_matrices) / parameters.total * sharded
    if not kind.frozen:
        items["moments"] = int(on_device * state_bytes(config.optimizer, trained, matrices))
        # With one micro batch they are allocated in its backward pass, as activations are freed.
        items["gradients"] = int(on_device * FP32 * trained) if case.workload.micro_batches > 1 else 0
    layers = _layer_elements(info, topology)
    outside, layer = layers.pop(None, 0.0), max(layers.values())
    gathered = outside + (0 if config.fsdp.reshard_after_forward else sum(layers.values()))
    items["gathered parameters"] = int(kind.bytes * gathered)
    if kind.frozen:
        return items, 2 * kind.bytes * layer, 0.0
    # The loss adds to the output layer's gradient in fp32.
    items["gradient of the output layer"] = FP32 * sizes.vocabulary * sizes.hidden
    # Two layers gathered, gradients of one, and the fp32 copy that is reduced.
    backward = (2 * kind.bytes if config.fsdp.reshard_after_forward else 0) * layer + (kind.bytes + FP32) * layer
    gradients = 0.0 if items["gradients"] else on_device * FP32 * trained
    update = update_bytes(
        config.optimizer, max(parameters.embedding, parameters.layer_matrix) / shares, fused=kind.fused
    )
    update = max(update, orthogonalisation_bytes(config.optimizer, matrices, kind.bytes))
    last = (kind.bytes + FP32) * outside  # embedding and output layer are reduced last
    return items, backward, gradients + max(update, last)


def _layer_elements(info: ModelInfo, topology: Topology) -> dict[int | None, float]:
    """Count the elements that a rank gathers of each layer, and outside the layers (None)."""
    counts: dict[int | None, float] = defaultdict(float)
    for name, header in info.tensors.items():
        counts[layer_of(name)] += elements({name: header}) / (topology.expert if ".experts." in name else 1)
    return counts
