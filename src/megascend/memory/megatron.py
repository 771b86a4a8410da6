"""The Megatron engine's memory, for a rank of each pipeline stage."""

from __future__ import annotations

from megascend.config import TrainerConfig
from megascend.huggingface.info import ModelInfo
from megascend.memory.activations import LayerBytes, LayerKind, head_bytes, layer_bytes, norm_bytes, probability_bytes
from megascend.memory.parameters import StageParameters, adapter_bytes, stages
from megascend.memory.sizes import Items, Kernels, ModelSizes, Workload
from megascend.topology.topology import Topology

WORKSPACES = 96 * 2**20
"""cuBLAS's and Transformer Engine's workspaces, which torch's allocator counts."""


def stage_items(
    config: TrainerConfig,
    info: ModelInfo,
    sizes: ModelSizes,
    topology: Topology,
    workload: Workload,
    kernels: Kernels,
) -> list[Items]:
    """Bytes of each item of a rank of each stage."""
    kind = LayerKind.of(config, workload, kernels)
    layers = len(sizes.with_experts)
    return [
        _of_stage(config, sizes, topology, workload, kind, held, stage, info)
        for stage, held in enumerate(stages(info.tensors, topology, layers, sizes.tied))
    ]


def _of_stage(
    config: TrainerConfig,
    sizes: ModelSizes,
    topology: Topology,
    workload: Workload,
    kind: LayerKind,
    held: StageParameters,
    stage: int,
    info: ModelInfo,
) -> Items:
    tokens = workload.tokens / topology.context
    of_layers = [layer_bytes(sizes, topology, kind, with_experts=sizes.with_experts[layer]) for layer in held.layers]
    kept, recomputed = _kept(config, of_layers, kind, sizes, topology)
    in_flight = _in_flight(stage, topology, workload.micro_batches)
    of_sequence = topology.tensor if topology.sequence_parallel else 1
    last = held.vocabulary > 0
    edge = (norm_bytes(sizes.hidden, kind) / of_sequence + 2 * kind.bytes * sizes.hidden if last else 0.0) + (
        kind.bytes * sizes.hidden / of_sequence if stage == 0 and kind.fused else 0.0
    )
    activations = tokens * (kept * in_flight + edge)
    head = head_bytes(sizes.hidden, held.vocabulary, tokens, kind, trained=not kind.frozen) if last else 0
    if last and not kind.frozen and config.optimizer.overlap_grad_reduce and not sizes.tied:
        head += held.vocabulary * sizes.hidden * (4 + kind.bytes)  # the gradient goes by autograd
    backward = tokens * recomputed + _backward(sizes, topology, kind, held, tokens)
    items = _states(config, topology, held, kind)
    if config.lora is not None:
        items["adapters"] = adapter_bytes(
            config.lora, info.tensors, held, topology, kind.bytes, fused=True, stacked=True
        )
    # What comes when the activations are gone may be more than they are.
    name, later = max(_later(config, topology, held, kind, stage).items(), key=lambda item: item[1])
    if later > activations + max(head, backward):
        return items | {name: later}
    items["activations"] = int(activations)
    if head >= backward:
        items["output head"] = int(head)
    else:
        items["backward pass"] = int(backward)
    if topology.pipeline > 1 or topology.tensor > 1:
        items["communication"] = int(_communication(sizes, topology, kind, tokens))
    if kind.fused:
        items["workspaces"] = WORKSPACES
    return items


def _states(config: TrainerConfig, topology: Topology, held: StageParameters, kind: LayerKind) -> Items:
    """Parameters, and what the optimizer keeps of them. Buffers of gradients are fp32 in every precision."""
    items: Items = {"parameters": kind.bytes * held.total}
    if kind.frozen:
        return items
    shares = (topology.data * topology.context, topology.expert_data) if config.optimizer.distributed else (1, 1)
    share = held.dense // shares[0] + held.experts // shares[1]
    items["main parameters"] = 0 if kind.bytes == 4 else 4 * share
    items["gradients"] = 4 * held.total
    items["moments"] = 8 * share
    return items


def _later(config: TrainerConfig, topology: Topology, held: StageParameters, kind: LayerKind, stage: int) -> Items:
    """Temporaries of the end of the backward pass, of the reduction of gradients, and of the update."""
    if kind.frozen:
        return {"embedding's gradient": 0}
    matrix = max(held.embedding, held.layer_matrix)
    if config.optimizer.distributed:
        matrix = min(matrix, -(-held.total // (topology.data * topology.context)))
    return {
        "embedding's gradient": kind.bytes * held.embedding if stage == 0 else 0,
        # Gloo scatters sums of a copy of the gradients' buffer.
        "gradient reduction": 4 * max(held.dense, held.experts)
        if not kind.fused and config.optimizer.distributed
        else 0,
        # The reference FusedAdam has two temporaries in fp32, Transformer Engine's has none.
        "update": 0 if kind.fused else 2 * 4 * matrix,
    }


def _in_flight(stage: int, topology: Topology, micro_batches: int) -> float:
    """How many micro batches' activations a stage keeps (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)."""
    if topology.virtual_pipeline == 1:
        return min(topology.pipeline - stage, micro_batches)
    chunks = 2 * (topology.pipeline - stage - 1) + (topology.virtual_pipeline - 1) * topology.pipeline + 1
    return min(chunks / topology.virtual_pipeline, micro_batches)


def _kept(
    config: TrainerConfig, layers: list[LayerBytes], kind: LayerKind, sizes: ModelSizes, topology: Topology
) -> tuple[float, float]:
    """Bytes a token of all layers that wait for the backward pass, and of what it computes again at one time."""
    recompute = config.recompute
    if recompute.granularity == "full":
        blocks = [layers[start : start + recompute.layers] for start in range(0, len(layers), recompute.layers)]
        kept = sum(block[0].entry for block in blocks)
        return kept, max((sum(layer.total for layer in block) for block in blocks), default=0.0)
    if recompute.granularity == "none":
        return sum(layer.total for layer in layers), 0.0
    kept = again = 0.0
    of_norm = kind.bytes * sizes.hidden / (topology.tensor if topology.sequence_parallel else 1)
    for layer, with_experts in zip(layers, sizes.with_experts, strict=False):
        attention, mlp = layer.attention, layer.mlp
        if "core_attn" in recompute.modules:
            of_attention = probability_bytes(sizes, topology, kind)
            again, attention = max(again, of_attention), attention - of_attention
        if ("moe" if with_experts else "mlp") in recompute.modules:
            again, mlp = max(again, mlp), layer.entry + (norm_bytes(sizes.hidden, kind) if with_experts else 0.0)
        elif with_experts and "moe_act" in recompute.modules:
            mlp -= kind.bytes * sizes.topk * sizes.expert_ffn
        if "layernorm" in recompute.modules and with_experts:
            mlp -= of_norm
        kept += attention + mlp
    return kept, again


def _backward(sizes: ModelSizes, topology: Topology, kind: LayerKind, held: StageParameters, tokens: float) -> float:
    """Gradients that are alive at one time in the backward pass of one layer."""
    width = max(
        sizes.ffn / topology.tensor,
        sizes.expert_ffn / topology.expert_tensor * sizes.topk if any(sizes.with_experts) else 0.0,
    )
    rows = sizes.topk if any(sizes.with_experts) else 1
    gradients = kind.bytes * tokens * (2 * width + (1 + rows) * sizes.hidden)
    if kind.keeps_probabilities:  # of the probabilities, and of what the softmax is taken of
        gradients += 2 * kind.bytes * tokens * kind.longest * sizes.heads / topology.tensor
    return gradients + (0 if kind.fused or kind.frozen else kind.bytes * held.layer_matrix)


def _communication(sizes: ModelSizes, topology: Topology, kind: LayerKind, tokens: float) -> float:
    """Hidden states on their way: gathered under sequence parallelism, sent and received between stages."""
    states = kind.bytes * sizes.hidden * tokens
    gathered = states if topology.sequence_parallel and topology.tensor > 1 and kind.fused else 0
    of_sequence = topology.tensor if topology.sequence_parallel else 1
    return gathered + (2 * states / of_sequence if topology.pipeline > 1 else 0)
