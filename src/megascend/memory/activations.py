"""What the forward pass of a layer keeps for the backward pass, in bytes a token, by what saves it.

Megatron-Core's layers are counted with the kernels that compute them:

- ``fused``: Transformer Engine's on CUDA, with fused rotary embedding and SwiGLU. A norm keeps its input and its output,
  attention queries, keys, values and output, an MLP the output of its first projection and of its activation.
  In fp32 no flash kernel exists: Transformer Engine keeps every head's [length, length] probabilities, and keys and values
  repeated for all heads.
- ``plain``: the reference Transformer Engine in PyTorch, whose norms compute in fp32 and keep both steps, and whose SwiGLU
  keeps its three.

A sum of elements is divided by the ranks that share it: tensor parallel ones; under sequence parallelism also what lies between
tensor parallel regions. See Korthikanti et al. 2022 (arXiv:2205.05198), section 4, for the same count of an earlier layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascend.config import TrainerConfig
from megascend.memory.sizes import ELEMENT_BYTES, Kernels, ModelSizes, Workload
from megascend.topology.topology import Topology

FP32 = 4


@dataclass(frozen=True)
class LayerKind:
    """How layers are computed.

    Attributes:
        fused: by Transformer Engine's kernels; else by plain PyTorch.
        bytes: of an element of the activations.
        packed: samples of different length lie one after the other.
        frozen: weights have no gradients.
        rank: of adapters on all linear layers; 0: none.
        longest: tokens of the longest sample.
    """

    fused: bool
    bytes: int
    packed: bool
    frozen: bool
    rank: int
    longest: int

    @classmethod
    def of(cls, config: TrainerConfig, workload: Workload, kernels: Kernels) -> LayerKind:
        """Derive it from a run's settings and largest micro batch."""
        return cls(
            fused=kernels == "fused",
            bytes=ELEMENT_BYTES[config.precision],
            packed=workload.packed,
            frozen=config.lora is not None,
            rank=0 if config.lora is None else config.lora.rank,
            longest=workload.tokens if workload.longest is None else workload.longest,
        )

    @property
    def keeps_probabilities(self) -> bool:
        """Attention is computed without a flash kernel."""
        return self.fused and self.bytes == FP32

    @property
    def wide(self) -> bool:
        """Plain norms make an fp32 copy of their input."""
        return self.bytes < FP32


@dataclass(frozen=True)
class LayerBytes:
    """Of one layer, for each token that a context parallel rank holds; ``entry``: what recomputation keeps of it."""

    attention: float
    mlp: float
    entry: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.attention + self.mlp


def layer_bytes(sizes: ModelSizes, topology: Topology, kind: LayerKind, *, with_experts: bool) -> LayerBytes:
    """What one layer keeps, without recomputation."""
    of_sequence = topology.tensor if topology.sequence_parallel else 1
    mlp = _experts(sizes, topology, kind) if with_experts else _mlp(sizes, topology, kind)
    return LayerBytes(_attention(sizes, topology, kind), mlp, kind.bytes * sizes.hidden / of_sequence)


def norm_bytes(width: float, kind: LayerKind) -> float:
    """What a norm keeps beside its output."""
    if kind.fused:
        return kind.bytes * width + FP32  # the input, which is the residual
    return FP32 * width * (1 if kind.frozen else 2) + FP32


def _attention(sizes: ModelSizes, topology: Topology, kind: LayerKind) -> float:
    b, t = kind.bytes, topology.tensor
    query, keys, heads = sizes.query / t, sizes.key_value / t, sizes.heads / t
    found = _norm_and_input(sizes.hidden, topology, kind)
    found += b * (query + 2 * keys)  # the projection, of which values are a view
    if sizes.qk_norm and kind.fused:
        found += b * query + FP32 * 2 * heads  # queries are copied, keys are read where they are
    elif sizes.qk_norm:
        steps = 1 if kind.frozen else 2
        found += FP32 * (steps * query + (steps if kind.wide else steps - 1) * keys) + FP32 * 2 * heads
    found += b * (query + keys)  # rotated
    if kind.fused:
        found += b * keys  # values, apart from the projection
    else:
        found += 4 * b * sizes.head_dim  # the tables of cosines and sines, for queries and for keys
        found += b * query if kind.packed else 0  # samples' outputs, put together
    found += b * query + FP32 * heads  # the output, and the log of each softmax's sum
    found += probability_bytes(sizes, topology, kind)
    return found + _adapted(kind, slices=3) + _adapted(kind, slices=1)


def probability_bytes(sizes: ModelSizes, topology: Topology, kind: LayerKind) -> float:
    """What attention without a flash kernel keeps beside what others keep."""
    if not kind.keeps_probabilities:
        return 0.0
    repeated = 2 * sizes.query if sizes.key_value < sizes.query else 0
    return kind.bytes * (sizes.heads * kind.longest + repeated) / topology.tensor


def _norm_and_input(width: int, topology: Topology, kind: LayerKind) -> float:
    """A norm, and what the linear layer after it keeps of its input."""
    of_sequence = topology.tensor if topology.sequence_parallel else 1
    output = kind.bytes * width
    if kind.fused:
        return (norm_bytes(width, kind) + output) / of_sequence  # gathered again in the backward pass
    return norm_bytes(width, kind) / of_sequence + output


def _mlp(sizes: ModelSizes, topology: Topology, kind: LayerKind) -> float:
    found = _norm_and_input(sizes.hidden, topology, kind) + _gated(sizes.ffn / topology.tensor, sizes, kind)
    return found + _adapted(kind, slices=3)


def _gated(width: float, sizes: ModelSizes, kind: LayerKind) -> float:
    """The first projection and the activation, which is the second one's input."""
    first = (2 if sizes.gated else 1) * width
    steps = 1 if kind.fused or not sizes.gated else 3
    return kind.bytes * (first + steps * width)


def _experts(sizes: ModelSizes, topology: Topology, kind: LayerKind) -> float:
    """A layer of experts whose load is even."""
    b = kind.bytes
    of_sequence = topology.tensor if topology.sequence_parallel else 1
    norm = (norm_bytes(sizes.hidden, kind) + b * sizes.hidden) / of_sequence
    router = (10 * sizes.experts + 20 * sizes.topk) / of_sequence
    # Tokens that are sent to this rank: those of all ranks that share its experts' weights, each topk times.
    rows = sizes.topk / of_sequence * topology.expert_tensor
    width = sizes.expert_ffn / topology.expert_tensor
    of_row = b * sizes.hidden + _gated(width, sizes, kind) + (0 if kind.fused else b * width)
    of_row += _adapted(kind, slices=3)
    shared = 0.0
    if sizes.shared_ffn:
        shared = _gated(sizes.shared_ffn / topology.tensor, sizes, kind) + _adapted(kind, slices=3)
        shared += 0 if of_sequence == 1 or kind.fused else b * sizes.hidden
    return norm + router + rows * of_row + shared


def _adapted(kind: LayerKind, slices: int) -> float:
    """What adapters keep: ``A x`` of each of a layer's slices."""
    return kind.bytes * kind.rank * slices


CHUNK_BYTES = 5 * 2**28
"""As in :mod:`megascend.kernels.linear_logprobs`, which needs torch; a test holds the two together."""


def head_bytes(hidden: int, rows: int, tokens: float, kind: LayerKind, *, trained: bool) -> float:
    """Return bytes of a chunk's logits, of what is computed from them, and of the gradient of the hidden states."""
    chunk = min(tokens, max(128, CHUNK_BYTES // (kind.bytes * max(rows, 1)) // 128 * 128))
    logits = kind.bytes * chunk * rows
    if not kind.fused:
        # Plain softmax: an fp32 copy unless they are fp32, the difference to the maximum and its exponential; later, the
        # product of the weight's gradient before it is added.
        softmax = (3 if kind.wide else 2) * FP32 * chunk * rows
        product = kind.bytes * rows * hidden if trained and kind.wide else 0
        logits += max(softmax, product)
    return logits + kind.bytes * hidden * tokens
