"""Memory of the engines that run transformers' own models, ``fsdp`` and ``single``.

transformers' layers are plain PyTorch on every platform: a norm keeps an fp32 copy of its input, its result before the weight and
its output; an MLP the outputs of all its projections and steps. Only attention and the loss have kernels of their own.
"""

from __future__ import annotations

from collections import defaultdict

from megascend.config import TrainerConfig
from megascend.huggingface.info import ModelInfo
from megascend.memory.activations import FP32, LayerBytes, LayerKind, head_bytes
from megascend.memory.parameters import StageParameters, adapter_bytes, elements, stages
from megascend.memory.sizes import Items, Kernels, ModelSizes, Workload, layer_of
from megascend.topology.topology import Topology

ADAM_TEMPORARIES = 2
"""fp32 copies of the largest parameter that torch's AdamW makes on a CPU; the fused one on CUDA makes none."""
WORKSPACES = 32 * 2**20
"""cuBLAS's, which torch's allocator counts."""


def items(
    config: TrainerConfig,
    info: ModelInfo,
    sizes: ModelSizes,
    topology: Topology,
    workload: Workload,
    kernels: Kernels,
) -> Items:
    """Bytes of each item of a rank."""
    kind = LayerKind.of(config, workload, kernels)
    [held] = stages(info.tensors, topology, len(sizes.with_experts), sizes.tied)
    tokens = workload.tokens / topology.context
    layers = [
        layer_bytes(sizes, kind, with_experts=each, single=config.engine == "single") for each in sizes.with_experts
    ]
    kept, again = _kept(config, layers, sizes, kind)
    activations = tokens * (kept + _norm(sizes.hidden, kind) + kind.bytes * sizes.hidden)
    head = head_bytes(sizes.hidden, held.vocabulary, tokens, kind, trained=not kind.frozen)
    backward = tokens * (again + _backward(sizes, kind))
    if config.engine == "single":
        stage_items, backward_parameters, later = _single(config, held, kind)
    else:
        stage_items, backward_parameters, later = _fsdp(config, info, sizes, topology, workload, held, kind)
    if (
        config.lora is not None
    ):  # whole on every rank; nothing is fused; peft's (engine single) compute with the factors
        stacked = config.engine == "fsdp"
        stage_items["adapters"] = adapter_bytes(
            config.lora, info.tensors, held, topology, kind.bytes, fused=False, stacked=stacked
        )
    backward += backward_parameters
    if later > activations + max(head, backward):
        stage_items["update"] = int(later)
    else:
        stage_items["activations"] = int(activations)
        stage_items["output head" if head >= backward else "backward pass"] = int(max(head, backward))
    if kind.fused:
        stage_items["workspaces"] = WORKSPACES
    return stage_items


def layer_bytes(sizes: ModelSizes, kind: LayerKind, *, with_experts: bool, single: bool) -> LayerBytes:
    """Return what a layer keeps of each token, without recomputation; ``single``: transformers' own experts keep outputs too."""
    b = kind.bytes
    attention = _norm(sizes.hidden, kind)
    if sizes.qk_norm:
        attention += _norm(sizes.query, kind) - b * sizes.query + _norm(sizes.key_value, kind) - b * sizes.key_value
    attention += b * (sizes.query + 2 * sizes.key_value)  # rotated, and values
    attention += b * sizes.query * (2 if kind.packed and not kind.fused else 1) + FP32 * sizes.heads  # the output
    mlp = _norm(sizes.hidden, kind)
    if with_experts:
        of_row = b * (sizes.hidden * (2 if single else 1) + 4 * sizes.expert_ffn)
        mlp += sizes.topk * of_row + b * 4 * sizes.shared_ffn + 16 * sizes.experts
    else:
        mlp += b * (4 if sizes.gated else 2) * sizes.ffn
    adapted = b * kind.rank
    return LayerBytes(attention + 4 * adapted, mlp + 3 * adapted, b * sizes.hidden)


def _norm(width: int, kind: LayerKind) -> float:
    """A norm: its input in fp32, the result before the weight if that has a gradient, the output."""
    return FP32 * width + kind.bytes * width * (1 if kind.frozen else 2) + FP32


def _kept(config: TrainerConfig, layers: list[LayerBytes], sizes: ModelSizes, kind: LayerKind) -> tuple[float, float]:
    """Bytes a token of all layers that wait for the backward pass, and of the one that it computes again."""
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
    """Gradients that are alive at one time in the backward pass of one layer, a token."""
    rows, width = (sizes.topk, sizes.expert_ffn) if any(sizes.with_experts) else (1, sizes.ffn)
    return kind.bytes * (2 * rows * width + (1 + rows) * sizes.hidden)


EngineItems = tuple[Items, float, float]
"""What stays from step to step, what the backward pass has of parameters, and the temporaries of the update."""


def _single(config: TrainerConfig, held: StageParameters, kind: LayerKind) -> EngineItems:
    """Parameters, and their fp32 originals where they have 16 bits; sums of gradients are fp32 and always there."""
    items: Items = {"parameters": kind.bytes * held.total}
    if kind.frozen:
        return items, 0.0, 0.0
    items["main parameters"] = 0 if kind.bytes == FP32 else FP32 * held.total
    items["gradients"] = FP32 * held.total
    items["moments"] = 2 * FP32 * held.total
    update = 0 if kind.fused else ADAM_TEMPORARIES * FP32 * max(held.embedding, held.layer_matrix)
    return items, kind.bytes * held.layer_matrix, max(update, kind.bytes * held.embedding)


def _fsdp(
    config: TrainerConfig,
    info: ModelInfo,
    sizes: ModelSizes,
    topology: Topology,
    workload: Workload,
    held: StageParameters,
    kind: LayerKind,
) -> EngineItems:
    """fp32 shards of parameters, gradients and moments; what is gathered, in the run's precision."""
    shares = topology.world_size // config.fsdp.replicate
    sharded = elements(info.tensors) / shares  # of experts too: a rank has some of them, and a part of their rows
    on_device = 0 if config.fsdp.offload else 1
    items: Items = {"parameters": int(on_device * (kind.bytes if kind.frozen else FP32) * sharded)}
    if not kind.frozen:
        items["moments"] = int(on_device * 2 * FP32 * sharded)
        # They come into being in the first backward pass, when activations go.
        items["gradients"] = int(on_device * FP32 * sharded) if workload.micro_batches > 1 else 0
    of_layers: dict[int, float] = defaultdict(float)
    outside = 0
    for name, header in info.tensors.items():
        layer, count = layer_of(name), elements({name: header})
        if layer is None:
            outside += count
        else:
            of_layers[layer] += count / (topology.expert if ".experts." in name else 1)
    layer = max(of_layers.values())
    gathered = outside + (0 if config.fsdp.reshard_after_forward else sum(of_layers.values()))
    items["gathered parameters"] = int(kind.bytes * gathered)
    if kind.frozen:
        return items, 2 * kind.bytes * layer, 0.0
    # The loss adds to the output layer's gradient in fp32.
    items["gradient of the output layer"] = FP32 * sizes.vocabulary * sizes.hidden
    # Two layers gathered, gradients of one, and the fp32 copy that is reduced.
    backward = (2 * kind.bytes if config.fsdp.reshard_after_forward else 0) * layer + (kind.bytes + FP32) * layer
    gradients = 0.0 if items["gradients"] else on_device * FP32 * sharded
    update = 0 if kind.fused else ADAM_TEMPORARIES * FP32 * max(held.embedding, held.layer_matrix) / shares
    last = (kind.bytes + FP32) * outside  # embedding and output layer come last
    return items, backward, gradients + max(update, last)
