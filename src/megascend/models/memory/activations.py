"""Activations that a layer saves for the backward pass, in bytes per token.

Megatron-Core's layers are counted by the kernels that compute them:

- ``fused``: Transformer Engine's on CUDA, with fused rotary embedding and SwiGLU. A norm saves its input and its output,
  attention queries, keys, values and output, an MLP the output of its first projection and of its activation.
  In fp32 no flash kernel exists: Transformer Engine saves every head's [length, length] probabilities, and keys and values
  repeated for all heads.
- ``plain``: the reference Transformer Engine in PyTorch, whose norms compute in fp32 and save both steps, and whose SwiGLU
  saves its three.

Elements are divided by the ranks that share them: tensor parallel ranks; under sequence parallelism also between tensor
parallel regions. See Korthikanti et al. 2022 (arXiv:2205.05198), section 4, for the same count of an earlier layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascend.config import TrainerConfig
from megascend.models.base import (
    LINEAR,
    SINGLE_MIXERS,
    IndexedAttention,
    LatentAttention,
    LinearAttention,
    StateSpace,
)
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.models.memory.sizes import ELEMENT_BYTES, Kernels, LayerKey, ModelSizes, TeacherSizes, Workload
from megascend.runtime.topology.topology import Topology

FP32 = 4


@dataclass(frozen=True)
class LayerKind:
    """Implementation of layers.

    Attributes:
        fused: computed by Transformer Engine's kernels; otherwise by plain PyTorch.
        bytes: bytes per activation element.
        packed: samples of different length are concatenated.
        frozen: weights have no gradients.
        rank: rank of adapters on all linear layers; 0: none.
        longest: tokens of the longest sample.
        teacher: whose distributions the loss compares with the model's; None for other losses.
    """

    fused: bool
    bytes: int
    packed: bool
    frozen: bool
    rank: int
    longest: int
    teacher: TeacherSizes | None = None

    @classmethod
    def of(cls, config: TrainerConfig, workload: Workload, kernels: Kernels) -> LayerKind:
        """Derive the kind from a run's settings and largest micro batch."""
        return cls(
            fused=kernels == "fused",
            bytes=ELEMENT_BYTES[config.precision],
            packed=workload.packed,
            frozen=config.lora is not None,
            rank=0 if config.lora is None else config.lora.rank,
            longest=workload.tokens if workload.longest is None else workload.longest,
            teacher=workload.teacher if workload.teacher is not None and workload.teacher.loss else None,
        )

    @property
    def keeps_probabilities(self) -> bool:
        """True if attention is computed without a flash kernel."""
        return self.fused and self.bytes == FP32

    @property
    def wide(self) -> bool:
        """True if plain norms make an fp32 copy of their input."""
        return self.bytes < FP32


@dataclass(frozen=True)
class Case:
    """A run whose memory is estimated: its settings, model, layout and largest micro batch."""

    config: TrainerConfig
    info: ModelInfo
    sizes: ModelSizes
    topology: Topology
    workload: Workload
    kind: LayerKind

    @property
    def tokens(self) -> float:
        """Return the micro batch's tokens on a context parallel rank."""
        return self.workload.tokens / self.topology.context


@dataclass(frozen=True)
class LayerBytes:
    """Saved bytes of one layer per token of a context parallel rank.

    Attributes:
        entry: its input, which recomputation saves.
        probabilities: of ``attention``, what recomputing ``core_attn`` frees.
        activation: of ``mlp``, what recomputing ``moe_act`` frees: the activation of the rows that arrive at the rank's experts.
    """

    attention: float
    mlp: float
    entry: float
    probabilities: float = 0.0
    activation: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of the layer."""
        return self.attention + self.mlp


def layer_bytes(sizes: ModelSizes, topology: Topology, kind: LayerKind, key: LayerKey) -> LayerBytes:
    """Return the bytes that one layer of a kind saves without recomputation."""
    attention = mlp = probabilities = activation = 0.0
    if key.mixer in ("", *SINGLE_MIXERS):
        mlp = experts_bytes(sizes, topology, kind) if key.with_experts else _mlp(sizes, topology, kind)
        activation = kind.bytes * sizes.topk * sizes.expert_ffn / topology.sequence_shards if key.with_experts else 0.0
    if key.mixer in SINGLE_MIXERS:
        pass
    elif key.mixer == LINEAR and sizes.state_space is not None:
        attention = _norm_and_input(sizes.hidden, topology, kind)
        attention += state_space_bytes(sizes.state_space, kind) / topology.tensor
        attention += _adapted(kind, slices=2)
    elif key.linear and sizes.linear is not None:
        attention = _norm_and_input(sizes.hidden, topology, kind)
        attention += linear_attention_bytes(sizes.linear, kind) / topology.tensor
        attention += _adapted(kind, slices=5)
    else:
        attention = _attention(sizes, topology, kind)
        # Sparse attention computes its scores again without any setting.
        sparse = sizes.latent is not None and sizes.indexed is not None
        probabilities = 0.0 if sparse else probability_bytes(sizes, topology, kind)
    return LayerBytes(attention, mlp, kind.bytes * sizes.hidden / topology.sequence_shards, probabilities, activation)


def norm_bytes(width: float, kind: LayerKind) -> float:
    """Return the bytes that a norm saves besides its output."""
    if kind.fused:
        return kind.bytes * width + FP32  # the input, which is the residual
    # A product saves its other factor for the weight's gradient only: a frozen weight saves the normalised input.
    return FP32 * width * (1 if kind.frozen else 2) + FP32


def _attention(sizes: ModelSizes, topology: Topology, kind: LayerKind) -> float:
    if sizes.latent is not None and sizes.indexed is not None:
        entry = (norm_bytes(sizes.hidden, kind) + kind.bytes * sizes.hidden) / topology.sequence_shards
        return (
            entry
            + sparse_attention_bytes(sizes.latent, sizes.indexed, sizes.heads, topology, kind)
            + _adapted(kind, slices=4)
        )
    if sizes.latent is not None:
        return _latent_attention(sizes.latent, sizes, topology, kind)
    b, t = kind.bytes, topology.tensor
    query, keys, heads = sizes.query / t, sizes.key_value / t, sizes.heads / t
    total = _norm_and_input(sizes.hidden, topology, kind)
    total += b * (query + 2 * keys)  # the projection, of which values are a view
    if sizes.qk_norm and kind.fused:
        total += b * query + FP32 * 2 * heads  # queries are copied, keys are read where they are
    elif sizes.qk_norm:
        steps = 1 if kind.frozen else 2
        # Keys are normalised where they are: in fp32 in the projection, which is counted already, in 16 bits in a copy.
        total += FP32 * (steps * query + (steps if kind.wide else steps - 1) * keys) + FP32 * 2 * heads
    total += b * (query + keys)  # rotated
    if kind.fused:
        total += b * keys  # values, copied out of the projection
    else:
        total += 4 * b * sizes.head_dim  # the tables of cosines and sines, for queries and for keys
        total += b * query if kind.packed else 0  # samples' outputs, concatenated
    total += b * query + FP32 * heads  # the output, and the log of each softmax's sum
    if sizes.output_gate:
        total += 2 * b * query + (0 if kind.fused else FP32 * query)  # the gate, its sigmoid, and the product
    total += probability_bytes(sizes, topology, kind)
    return total + _adapted(kind, slices=3) + _adapted(kind, slices=1)


def _latent_attention(latent: LatentAttention, sizes: ModelSizes, topology: Topology, kind: LayerKind) -> float:
    """Return the bytes of multi-head latent attention, whose down projections every tensor parallel rank computes in full.

    Saved are the latents with their norms, queries and keys after the rotation, which joins two parts of each head in new
    tensors, the up projection of keys and values, of which values are copied, and the output.
    """
    b, t = kind.bytes, topology.tensor
    heads = sizes.heads / t
    # The layer's norm is followed by two linear layers, which share their input.
    total = (norm_bytes(sizes.hidden, kind) + b * sizes.hidden) / topology.sequence_shards
    total += _norm_and_input(latent.key_value_latent, topology, kind)
    if latent.query_latent is not None:
        total += _norm_and_input(latent.query_latent, topology, kind)
    total += b * latent.rotated  # the rotated part of keys, shared by heads
    total += 2 * b * heads * latent.query_head_dim  # queries and keys
    total += b * heads * latent.value_head_dim  # values
    if not kind.fused:
        total += 4 * b * latent.rotated  # the tables of cosines and sines, for queries and for keys
        total += b * heads * latent.value_head_dim if kind.packed else 0  # samples' outputs, concatenated
        total += 2 * b * heads * (latent.query_head_dim - latent.value_head_dim)  # values and output as wide as keys
    total += b * heads * latent.value_head_dim + FP32 * heads  # the output, and the log of each softmax's sum
    total += probability_bytes(sizes, topology, kind)
    return total + _adapted(kind, slices=5)


SCORE_BLOCK_BYTES = 2**28
"""As ``BLOCK_BYTES`` of :mod:`megascend.models.families.sparse_attention_megatron`, which needs torch."""


def sparse_attention_bytes(
    latent: LatentAttention, indexed: IndexedAttention, heads: int, topology: Topology, kind: LayerKind
) -> float:
    """Return the bytes that sparse attention saves between the layer's norm and the output projection, and that one's input.

    Keys and values are one head, of latents. Scores are computed again in the backward pass, and the indexer saves its choice.
    """
    b, local = kind.bytes, heads / topology.tensor
    latent_key = latent.key_value_latent + latent.rotated
    total = _norm_and_input(latent.key_value_latent, topology, kind)
    if latent.query_latent is not None:
        total += _norm_and_input(latent.query_latent, topology, kind)
    total += b * latent_key + 8 * indexed.topk
    total += b * local * latent.query_head_dim  # queries, of which the projection from the latent is a factor
    total += b * local * latent_key  # multiplied by that projection
    total += 0 if kind.fused else 4 * b * latent.rotated  # tables of cosines and sines
    return total + b * local * (latent.key_value_latent + latent.value_head_dim)  # means of latents, and of values


def sparse_attention_temporaries(
    indexed: IndexedAttention, heads: int, topology: Topology, queries: float, keys: float
) -> float:
    """Return the bytes of blocks of scores: of attention while their gradients are computed, or of the indexer's choice."""
    # Scores, these masked, their softmax and its gradient; a row of all keys is the smallest block.
    row = FP32 * keys * heads / topology.tensor
    attention = 4 * min(max(SCORE_BLOCK_BYTES, row), row * queries)
    # Products of a block, then its sums over heads, which are kept for all queries, masked and sorted.
    row = FP32 * keys * indexed.heads
    choice = min(max(SCORE_BLOCK_BYTES, row), row * queries) + 3 * FP32 * queries * keys
    return max(attention, choice)


CHUNK = 64
"""Tokens of a chunk of linear attention, as in flash-linear-attention and :mod:`megascend.reference.fla`."""


def linear_attention_bytes(linear: LinearAttention, kind: LayerKind) -> float:
    """Return the bytes that linear attention (gated delta net) saves between its projections, on all TP ranks together.

    The output of the input projection is not saved: its parts are copied, and the terms below are of these. With
    flash-linear-attention they are the inputs of its kernels; with the reference in plain PyTorch, tests compare each with
    the tensors that autograd saves.
    """
    b, heads = kind.bytes, linear.value_heads
    keys, values = linear.key_width, linear.value_width
    mixed = 2 * keys + values
    if kind.fused:
        total = b * mixed  # input of the convolution, which computes its activation again
        total += b * mixed  # queries and keys after their norms, values
        total += 4 * FP32 * heads  # softplus' input and output, decays, strengths
        total += 4 * b * values  # outputs, normalised, times the gate; and the gate
        if b == FP32:  # the kernels multiply fp32 in TF32, and are not used
            return total + _delta_rule_bytes(linear)
        # A key head is repeated for its value heads.
        total += 2 * b * heads * linear.key_head_dim if heads > linear.key_heads else 0
        return total + b * heads * CHUNK  # a row of each chunk's triangular system
    # The convolution's input, once for each tap, saved for the weights' gradient; the input of its activation.
    total = b * mixed + (0 if kind.frozen else FP32 * linear.taps * mixed)
    total += FP32 * (2 * keys + 2 * linear.key_heads)  # queries and keys before their norms, and the norms
    total += FP32 * heads * (1 if kind.frozen else 2) + b * heads  # softplus' input and, for A_log, output; strengths
    total += _delta_rule_bytes(linear)
    # The gated norm: its input, the gate and its activation; for the norm's weight, the result before it.
    total += FP32 * values * (3 if kind.frozen else 4) + FP32 * heads
    return total + 2 * b * values  # the norm's output, and its product with the gate


def _delta_rule_bytes(linear: LinearAttention) -> float:
    """Return the bytes that the chunked delta rule in plain PyTorch saves, in fp32."""
    heads = linear.value_heads
    # As wide as a key: k and its transpose for k k^T, q and k's transpose for q k^T, q and k before they are multiplied by
    # decays, q and k's transpose after it, and k's part of the solution of the triangular system.
    elements = 9.0 * heads * linear.key_head_dim
    elements += 3 * linear.value_width  # v, its part of the solution, and the values that the chunk writes
    # As wide as a chunk: decays between tokens, these times strengths, k k^T, the system, q k^T, and scores.
    elements += heads * 6 * CHUNK
    elements += linear.state_size / CHUNK  # before each chunk
    elements += heads * 5  # decays from the chunk's start and to its end, strengths
    return FP32 * elements


def state_space_bytes(space: StateSpace, kind: LayerKind) -> float:
    """Return the bytes that a state space saves between its projections, on all TP ranks together.

    mamba_ssm's kernels save their input and output, and compute the rest again; the norm saves its input and output. With the
    reference in plain PyTorch, tests compare the terms below with the tensors that autograd saves.
    """
    b, heads = kind.bytes, space.heads
    if kind.fused:
        return b * (space.projected + 3 * space.width) + FP32 * space.groups
    total = b * space.channels  # input of the convolution's activation
    # Its output and the projection, of which fp32 saves views, and 16 bits the copies below.
    total += 0 if kind.wide else b * (space.projected + space.channels)
    # The convolution's inputs in fp32, once for each tap, saved for the weights' gradient.
    total += 0.0 if kind.frozen else FP32 * space.channels * (space.taps - (0 if kind.wide else 1))
    # Inputs, B, C and the gate in fp32; B and C repeated for the heads of their group.
    total += FP32 * (space.channels + space.width if kind.wide else 0)
    total += FP32 * 2 * heads * space.state
    # As wide as a chunk: products of B and C, decays between tokens, and both multiplied; which tokens are later.
    total += FP32 * 3 * heads * CHUNK + CHUNK
    total += FP32 * space.state_size / CHUNK * 2  # before each chunk
    # As wide as an input: what is written, what is carried on, the state's output, the gate's activation, and its input.
    total += FP32 * 5 * space.width
    total += FP32 * 6 * heads  # steps and decays
    # The norm: its input, the normalised, and its output.
    return total + FP32 * space.width * (1 if kind.frozen else 2) + b * space.width + FP32 * space.groups


def probability_bytes(sizes: ModelSizes, topology: Topology, kind: LayerKind) -> float:
    """Return the bytes that attention saves only without a flash kernel."""
    if not kind.keeps_probabilities:
        return 0.0
    # Keys and values, each as wide as the query once grouped heads are repeated.
    repeated = 2 * sizes.query if sizes.key_value < sizes.query else 0
    return kind.bytes * (sizes.heads * kind.longest + repeated) / topology.tensor


def _norm_and_input(width: int, topology: Topology, kind: LayerKind) -> float:
    """Return the bytes of a norm and of the saved input of the linear layer after it."""
    output = kind.bytes * width
    if kind.fused:
        return (norm_bytes(width, kind) + output) / topology.sequence_shards  # gathered again in the backward pass
    return norm_bytes(width, kind) / topology.sequence_shards + output


def _mlp(sizes: ModelSizes, topology: Topology, kind: LayerKind) -> float:
    total = _norm_and_input(sizes.hidden, topology, kind) + _gated(sizes.ffn / topology.tensor, sizes, kind)
    return total + _adapted(kind, slices=3)


def _gated(width: float, sizes: ModelSizes, kind: LayerKind) -> float:
    """Return the bytes of the first projection and of the activation, which is the second projection's input."""
    first = (2 if sizes.gated else 1) * width
    steps = 1 if _fuses_activation(sizes, kind) or not sizes.gated else 3
    if sizes.clamped:
        steps += 1 if kind.fused else 2  # the clamped gate, and its sigmoid where nothing is compiled
    return kind.bytes * (first + steps * width)


def _fuses_activation(sizes: ModelSizes, kind: LayerKind) -> bool:
    return kind.fused and sizes.silu and not sizes.clamped


def experts_bytes(sizes: ModelSizes, topology: Topology, kind: LayerKind) -> float:
    """Return the bytes of a layer of experts with equal loads."""
    b = kind.bytes
    norm = (norm_bytes(sizes.hidden, kind) + b * sizes.hidden) / topology.sequence_shards
    # For each chosen expert the router saves its index (8 bytes) and score (4), and both again by rows sorted by expert; for
    # each expert its score in fp32 where softmax or sigmoid precedes the choice, its column of scores (4) and of the map
    # of tokens (1).
    router = (9 * sizes.experts + 24 * sizes.topk) / topology.sequence_shards
    # Tokens dispatched to this rank: topk copies of those of all ranks that share its experts' weights.
    rows = sizes.topk / topology.sequence_shards * topology.expert_tensor
    width = sizes.expert_ffn / topology.expert_tensor
    row_bytes = b * (sizes.latent_experts or sizes.hidden) + _gated(width, sizes, kind)
    row_bytes += 0 if _fuses_activation(sizes, kind) else b * width  # before it is multiplied by the routers' weights
    row_bytes += _adapted(kind, slices=3)
    shared = 0.0
    if sizes.shared_ffn:
        shared = _gated(sizes.shared_ffn / topology.tensor, sizes, kind) + _adapted(kind, slices=3)
        shared += 0 if topology.sequence_shards == 1 or kind.fused else b * sizes.hidden
    latent = b * sizes.latent_experts / topology.sequence_shards  # the input of the projection back to the hidden size
    return norm + router + rows * row_bytes + shared + latent


def _adapted(kind: LayerKind, slices: int) -> float:
    """Return the bytes that adapters save: ``A x`` of each of a layer's slices."""
    return kind.bytes * kind.rank * slices


CHUNK_BYTES = 5 * 2**28
"""Bytes of a chunk of logits. A copy of the constant of :mod:`megascend.training.kernels.linear_logprobs`, which imports torch;
a test compares them."""


DIVERGENCE_CHUNK_BYTES = 2**28
"""As in :mod:`megascend.training.kernels.linear_divergence`, which needs torch."""


def head_bytes(hidden: int, rows: int, tokens: float, kind: LayerKind, *, trained: bool) -> float:
    """Return bytes of a chunk's logits, of their temporaries, and of the gradient of the hidden states.

    With a teacher's distributions: of both models' logits, and of the teacher's hidden states.
    """
    if kind.teacher is not None:
        chunk = min(tokens, max(128, DIVERGENCE_CHUNK_BYTES // (FP32 * max(rows, 1)) // 128 * 128))
        # Two buffers of logits in the model's dtype, unless that is fp32. In fp32 both models' logits, and the temporaries of
        # the divergence or of its gradient: probabilities, gradient, mixture.
        buffers = 2 * kind.bytes if kind.wide else FP32
        logits = buffers + FP32 * (6 if kind.teacher.loss == "jsd" else 4)
        # In the model's dtype the gradient again, and, without a kernel that adds products, that of a chunk's weights.
        product = kind.bytes * rows * hidden if trained and kind.wide and not kind.fused else 0
        later = (buffers + FP32 * 4 + kind.bytes) * chunk * rows + product
        return max(logits * chunk * rows, later) + kind.bytes * (hidden + kind.teacher.sizes.hidden) * tokens
    chunk = min(tokens, max(128, CHUNK_BYTES // (kind.bytes * max(rows, 1)) // 128 * 128))
    logits = kind.bytes * chunk * rows
    if not kind.fused:
        # Plain softmax: an fp32 copy unless logits are fp32, the difference from the maximum and its exponential; later, the
        # weight gradient of a chunk before it is added.
        softmax = (3 if kind.wide else 2) * FP32 * chunk * rows
        product = kind.bytes * rows * hidden if trained and kind.wide else 0
        logits += max(softmax, product)
    return logits + kind.bytes * hidden * tokens
