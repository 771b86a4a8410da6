"""Seconds of one layer and of the output head for one micro batch, on a rank. Pure.

A layer is counted by what the Megatron engine computes: each linear layer's three products at their shapes, attention by the
length of samples, everything else by the bytes that it moves, and the collectives of tensor, expert and context parallelism by
size and by the nodes that their ranks are on. Experts have equal loads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from megascend.apps.plan.hardware import PASSES, Hardware, Pass, collective_seconds, nodes_of
from megascend.models.base import LINEAR, SINGLE_MIXERS
from megascend.models.memory.sizes import ModelSizes
from megascend.runtime.topology.topology import Topology

Part = Literal[
    "products",
    "attention",
    "experts",
    "element-wise",
    "output head",
    "tensor parallel",
    "expert parallel",
    "context parallel",
    "gaps",
]
Costs = defaultdict[str, float]
"""Seconds by part."""

BF16, FP32 = 2, 4
DELTA_RULE_SHARE = 0.03
"""Share of the peak that flash-linear-attention's kernels reach, by 18 FLOPs for each element of the state and token. From one
figure of benchmarks/families/speed.json, Qwen3.5-4B's shapes; nothing else was measured."""
CAPTURED_GAPS = 0.17
"""Time between kernels of a CUDA graph, relative to kernels that were launched in time: the 2,600 kernels of a LoRA step of 256
tokens leave room for 1.5 us each (benchmarks/performance/small-lora-steps.json)."""
TILE = 128
"""Tokens of a tile of attention kernels: a window is computed in tiles."""
PERMUTATION = 2.0
"""Time in which a permutation moves rows, in copies: 1.7 ms, not 0.85 (benchmarks/performance/experts.json)."""
QUANTISATION_BYTES = 3
"""Bytes that a cast of an element to fp8 moves, read in 16 bits."""


@dataclass(frozen=True)
class Execution:
    """Differences of a program from this package's Megatron engine; its published figures are compared with predictions.

    Attributes:
        fp8: linear layers multiply in fp8, with bf16 attention.
        whole_logits: the output head computes all logits of a micro batch, in fp32 for the loss.
        tensor_overlap: collectives of tensor parallelism run beside the products, in pieces.
        expert_overlap: share of the all-to-alls that runs beside other computation.
        captured: kernels are launched by CUDA graphs, so that the host is never late.
        host_kernels: kernels that the host launches, relative to this engine.
        fused_expert_gradients: gradients of experts' weights are added to the fp32 buffer inside the products.
        grouped: experts of a rank are one product; False: one after another, as where they have biases.
        node_copies: copies of a token that cross to other nodes, at most, as where it is sent once to each node; None: one for
            each of its experts there.
    """

    fp8: bool = False
    whole_logits: bool = False
    tensor_overlap: bool = False
    expert_overlap: float = 0.0
    captured: bool = False
    host_kernels: float = 1.0
    fused_expert_gradients: bool = False
    grouped: bool = True
    node_copies: float | None = None


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer for one micro batch.

    Attributes:
        forward: by module of ``recompute.modules`` (or ``rest``).
        backward: of the backward pass, without recomputation.
        kernels: launched by the forward, and by the backward pass.
    """

    forward: dict[str, Costs]
    backward: Costs
    kernels: tuple[int, int]

    @cached_property
    def forward_costs(self) -> Costs:
        return total(self.forward.values())

    def recomputed(self, modules: Iterable[str] | None) -> Costs:
        """Return the costs of the modules that the backward pass computes again; None: the layer."""
        if modules is None:
            return self.forward_costs
        chosen = set(modules)
        if "moe" in chosen:
            chosen |= {"moe_act", "shared_experts"}
        return total(costs for module, costs in self.forward.items() if module in chosen)


def total(costs: Iterable[Costs]) -> Costs:
    result: Costs = defaultdict(float)
    for parts in costs:
        for part, seconds in parts.items():
            result[part] += seconds
    return result


def scaled(costs: Costs, factor: float) -> Costs:
    return defaultdict(float, {part: seconds * factor for part, seconds in costs.items()})


ALL_LAYERS = frozenset({"attention", "mlp", "experts"})
"""Kinds of layers that an adapter on all linear layers acts on."""


@dataclass
class _Layer:
    """Collects the costs of one layer."""

    forward: dict[str, Costs] = field(default_factory=dict)
    backward: Costs = field(default_factory=lambda: defaultdict(float))

    def add(self, module: str, part: Part, forward: float, backward: float) -> None:
        self.forward.setdefault(module, defaultdict(float))[part] += forward
        self.backward[part] += backward


@dataclass(frozen=True)
class Cost:
    """Computes costs for one model, layout, device and micro batch.

    Attributes:
        tokens: of a micro batch, over all context parallel ranks.
        length: tokens of a sample.
        frozen: the model's weights have no gradients.
        rank: rank of an adapter on linear layers; 0: none.
        adapted: kinds of layers that it acts on: ``attention``, ``mlp``, ``experts``.
        windows: tokens that a layer's attention reaches back; None: all.
    """

    sizes: ModelSizes
    topology: Topology
    hardware: Hardware
    tokens: float
    length: float
    frozen: bool = False
    rank: int = 0
    adapted: frozenset[str] = ALL_LAYERS
    windows: tuple[int | None, ...] = ()
    execution: Execution = Execution()

    # --- shapes of this rank ---

    @property
    def local(self) -> float:
        """Tokens of a context parallel rank."""
        return self.tokens / self.topology.context

    @property
    def rows(self) -> float:
        """Tokens of a rank between tensor parallel regions."""
        return self.local / self.topology.sequence_shards

    @cached_property
    def groups(self) -> dict[str, list[int]]:
        """Ranks of rank 0's groups."""
        axes = ("tensor", "context", "expert", "expert_tensor")
        groups = {axis: self.topology.group_of(0, axis) for axis in axes}
        groups["dispatch"] = self.topology.group_of(0, "expert_tensor", "expert")
        return groups

    def collective(self, kind: str, size: float, group: str) -> float:
        return self.hardware.collective(kind, size, self.groups[group])

    # --- linear layers ---

    def linear(
        self,
        layer: _Layer,
        module: str,
        inputs: float,
        outputs: float,
        *,
        divided: Literal["columns", "rows", "no"] = "columns",
        tokens: float | None = None,
        slices: int = 1,
        gathers: bool = True,
        part: Part = "products",
    ) -> None:
        """Add a linear layer with its collectives of tensor parallelism.

        Args:
            divided: by columns, whose input every rank needs whole, or by rows, whose output is summed over ranks.
            slices: projections that an adapter adapts one by one.
            gathers: its input arrives in pieces under sequence parallelism, and its input's gradient is summed.
        """
        topology, t = self.topology, self.local if tokens is None else tokens
        ranks = topology.tensor if divided != "no" else 1
        full = (inputs, outputs)
        if divided == "columns":
            outputs /= ranks
        elif divided == "rows":
            inputs /= ranks
        forward, data, weight = (self._product(t, inputs, outputs, kind) for kind in PASSES)
        weight = 0.0 if self.frozen else weight
        layer.add(module, part, forward, data + weight)
        if ranks > 1 and gathers:
            self._tensor_collectives(layer, module, t, full, divided, (forward, data, weight))
        if self.rank and ("mlp" if module in ("mlp", "shared_experts") else "attention") in self.adapted:
            self._adapter(layer, module, t, inputs, outputs, slices)

    def _product(self, tokens: float, inputs: float, outputs: float, kind: Pass) -> float:
        """Return the seconds of a product of a linear layer, in fp8 if the program multiplies so."""
        seconds = self.hardware.product(tokens, inputs, outputs, kind)
        if not self.execution.fp8:
            return seconds
        # Activations and gradients are cast by kernels of their own; weights once a step, which is not counted.
        cast = tokens * (inputs if kind == "forward" else outputs)
        return seconds / self.hardware.fp8 + self.hardware.moved(QUANTISATION_BYTES * cast)

    def _tensor_collectives(
        self,
        layer: _Layer,
        module: str,
        tokens: float,
        full: tuple[float, float],
        divided: str,
        products: tuple[float, float, float],
    ) -> None:
        """Add a region's collectives: of its input before columns, of its output after rows."""
        forward, data, weight = products
        size = BF16 * tokens * full[0 if divided == "columns" else 1]
        if not self.topology.sequence_parallel:
            summed = self.collective("all_reduce", size, "tensor")
            if divided == "rows":
                layer.add(module, "tensor parallel", self.hidden(summed, forward), 0.0)
            else:  # of the input's gradient, while the weight's gradient is computed
                layer.add(module, "tensor parallel", 0.0, max(0.0, summed - weight))
            return
        gathered = self.collective("all_gather", size, "tensor")
        scattered = self.collective("reduce_scatter", size, "tensor")
        if divided == "columns":
            # The input is gathered again during the product for its gradient, which is scattered during the one for the weight's.
            regathered = 0.0 if self.frozen else max(0.0, gathered - data)
            layer.add(
                module, "tensor parallel", self.hidden(gathered, forward), regathered + max(0.0, scattered - weight)
            )
        else:
            layer.add(module, "tensor parallel", self.hidden(scattered, forward), self.hidden(gathered, data + weight))

    def hidden(self, collective: float, product: float) -> float:
        """Return the seconds of a collective that its product does not hide; in pieces, the first or last one is never hidden."""
        if not self.execution.tensor_overlap:
            return collective
        return max(collective - product, collective / self.topology.tensor)

    def _adapter(self, layer: _Layer, module: str, tokens: float, inputs: float, outputs: float, slices: int) -> None:
        """Add an adapter's products, and the addition of its output and of its input's gradient."""
        r = self.rank
        shapes = [(inputs, slices * r), *[(r, outputs / slices)] * slices]
        forward = sum(self.hardware.product(tokens, a, b, "forward") for a, b in shapes)
        backward = sum(self.hardware.product(tokens, a, b, kind) for a, b in shapes for kind in PASSES[1:])
        layer.add(module, "products", forward, backward)
        moved = self.hardware.moved(3 * BF16 * tokens * outputs), self.hardware.moved(3 * BF16 * tokens * inputs)
        layer.add(module, "element-wise", *moved)

    # --- layers ---

    def layer(self, index: int) -> LayerSeconds:
        """Return the costs of the model's layer ``index``; a head for multi-token prediction has one like the last."""
        sizes = self.sizes
        index = min(index, len(sizes.with_experts) - 1)
        layer, mixer = _Layer(), sizes.layer_keys[index].mixer
        self._norms(layer, 2 if not mixer else 1)
        kernels = [22, 33] if not mixer else [11, 17]
        if mixer in SINGLE_MIXERS:
            pass
        elif mixer == LINEAR:
            self._state_space(layer)
        elif sizes.linear_layers[index]:
            self._linear_attention(layer)
            kernels = [kernels[0] + 25, kernels[1] + 35]
        elif sizes.latent is not None:
            self._latent_attention(layer, index)
            kernels = [kernels[0] + 8, kernels[1] + 12]
        else:
            self._attention(layer, index)
        if mixer not in ("", *SINGLE_MIXERS):
            pass
        elif sizes.with_experts[index]:
            self._experts(layer)
            kernels = [kernels[0] + 30, kernels[1] + 35]
        else:
            gate = 2 if sizes.gated else 1
            self.linear(layer, "mlp", sizes.hidden, gate * sizes.ffn, slices=gate)
            self._activation(layer, "mlp", self.local, sizes.ffn / self.topology.tensor)
            self.linear(layer, "mlp", sizes.ffn, sizes.hidden, divided="rows")
        if self.rank:
            kernels = [kernels[0] + 15, kernels[1] + 22]
        gap = self.hardware.gap_s * (CAPTURED_GAPS if self.execution.captured else 1.0)
        layer.add("rest", "gaps", kernels[0] * gap, kernels[1] * gap)
        return LayerSeconds(layer.forward, layer.backward, (kernels[0], kernels[1]))

    def _norms(self, layer: _Layer, norms: int) -> None:
        """Add norms, and as many additions to the residual."""
        width = BF16 * self.rows * self.sizes.hidden
        h = self.hardware
        layer.add("layernorm", "element-wise", norms * h.moved(2 * width), norms * h.moved(3 * width))
        layer.add("rest", "element-wise", norms * h.moved(3 * width), norms * h.moved(3 * width))

    def _activation(self, layer: _Layer, module: str, tokens: float, width: float) -> None:
        """Add SwiGLU: reads two tensors and writes one forward, reads three and writes two backward; without a gate, fewer.

        Of other gated activations every operation is a kernel, which reads and writes tensors of its own.
        """
        unit, gate = BF16 * tokens * width, 1 if self.sizes.gated else 0
        forward, backward = 2 + gate, 3 + 2 * gate
        if gate and (self.sizes.clamped or not self.sizes.silu):
            # The activation, an offset, the product; backward also the halves' gradients joined.
            forward, backward = 2 + 2 + 3, 3 + 6 + 4
            if module == "moe_act":  # times the router's weight, in fp32, whose own gradient is a sum
                forward, backward = forward + 6, backward + 17
        if self.sizes.clamped:  # each half limited, and biases of both
            forward, backward = forward + 4 + 4, backward + 6
        layer.add(module, "element-wise", self.hardware.moved(forward * unit), self.hardware.moved(backward * unit))

    def _attention(self, layer: _Layer, index: int) -> None:
        sizes, t = self.sizes, self.topology.tensor
        gate = sizes.query if sizes.output_gate else 0
        self.linear(layer, "rest", sizes.hidden, sizes.query + gate + 2 * sizes.key_value, slices=3)
        # Split, norms of queries and keys, rotary embedding: read and written once, and once more in the backward pass.
        width = BF16 * self.local * (sizes.query + 2 * sizes.key_value) / t
        layer.add("rest", "element-wise", self.hardware.moved(2 * width), self.hardware.moved(3 * width))
        if gate:
            gated = BF16 * self.local * gate / t
            layer.add("rest", "element-wise", self.hardware.moved(3 * gated), self.hardware.moved(5 * gated))
        self._core(layer, index, sizes.query, sizes.query, 2 * sizes.key_value, sizes.head_dim)
        self.linear(layer, "rest", sizes.query, sizes.hidden, divided="rows")

    def _core(self, layer: _Layer, index: int, query: float, value: float, exchanged: float, head_dim: float) -> None:
        """Add attention, and the exchange of context parallel ranks; widths are of all heads."""
        topology, h = self.topology, self.hardware
        width = (query + value) / 2 / topology.tensor
        window = self.windows[index] if self.windows else None
        # A rank of a ring computes pieces of a sample: as many FLOPs for a token, in shorter kernels.
        share = 1.0 if window is None else min(1.0, 2 * (window + 2 * TILE) / self.length)
        efficiency_length = max(1.0, self.length / topology.context)
        forward, backward = (
            h.attention(self.local, efficiency_length, width, head_dim, backward=backward) * topology.context * share
            for backward in (False, True)
        )
        layer.add("core_attn", "attention", forward, backward)
        if topology.context == 1:
            return
        if topology.context_algorithm == "ulysses":
            size = BF16 * self.local * (query + value + exchanged) / topology.tensor
            moved = self.collective("all_to_all", size, "context")
            layer.add("core_attn", "context parallel", moved, moved)
            return
        size = BF16 * self.local * exchanged / topology.tensor
        if topology.context_algorithm == "all_gather":
            gathered = self.collective("all_gather", size * topology.context, "context")
            layer.add("core_attn", "context parallel", gathered, 2 * gathered)
            return
        # A ring sends keys and values while it computes with those that it has; backward, their gradients too.
        steps, piece = topology.context - 1, topology.context
        message = self.collective("send", size, "context")
        layer.add(
            "core_attn",
            "context parallel",
            steps * max(0.0, message - forward / piece),
            steps * max(0.0, 2 * message - backward / piece),
        )

    def _latent_attention(self, layer: _Layer, index: int) -> None:
        sizes, latent, t = self.sizes, self.sizes.latent, self.topology.tensor
        assert latent is not None
        heads = sizes.heads
        query, value = heads * latent.query_head_dim, heads * latent.value_head_dim
        # Down projections are not divided: every rank computes them, of its own rows.
        if latent.query_latent is None:
            self.linear(layer, "rest", sizes.hidden, query)
        else:
            self.linear(layer, "rest", sizes.hidden, latent.query_latent, divided="no", tokens=self.rows)
            self.linear(layer, "mla_up_proj", latent.query_latent, query)
        down = latent.key_value_latent + latent.rotated
        self.linear(layer, "rest", sizes.hidden, down, divided="no", tokens=self.rows)
        self.linear(layer, "mla_up_proj", latent.key_value_latent, heads * (latent.unrotated + latent.value_head_dim))
        # Norms of latents; parts of heads are joined after the rotation, and values copied.
        width = BF16 * (self.rows * (down + (latent.query_latent or 0)) + self.local * (2 * query + value) / t)
        layer.add("mla_up_proj", "element-wise", self.hardware.moved(2 * width), self.hardware.moved(3 * width))
        self._core(layer, index, query, value, query + value, (latent.query_head_dim + latent.value_head_dim) / 2)
        self.linear(layer, "rest", value, sizes.hidden, divided="rows")

    def _linear_attention(self, layer: _Layer) -> None:
        sizes, linear, t = self.sizes, self.sizes.linear, self.topology.tensor
        assert linear is not None
        mixed = 2 * linear.key_width + linear.value_width
        self.linear(layer, "rest", sizes.hidden, mixed + linear.value_width + 2 * linear.value_heads, slices=5)
        unit = BF16 * self.local / t
        # Convolution with its activation, norms of queries and keys, gate.
        layer.add(
            "rest",
            "element-wise",
            self.hardware.moved(unit * (4 * mixed + 4 * linear.value_width)),
            self.hardware.moved(unit * (7 * mixed + 7 * linear.value_width)),
        )
        flops = 6 * linear.state_size * self.local / t
        seconds = flops / (self.hardware.peak * DELTA_RULE_SHARE)
        layer.add("core_attn", "attention", seconds, 2 * seconds)
        self.linear(layer, "rest", linear.value_width, sizes.hidden, divided="rows")

    def _state_space(self, layer: _Layer) -> None:
        sizes, space, t = self.sizes, self.sizes.state_space, self.topology.tensor
        assert space is not None
        self.linear(layer, "rest", sizes.hidden, space.projected, slices=1)
        # Convolution with its activation, gate and norm.
        unit = BF16 * self.local / t
        forward, backward = 2 * space.channels + 4 * space.width, 3 * space.channels + 7 * space.width
        layer.add("rest", "element-wise", self.hardware.moved(unit * forward), self.hardware.moved(unit * backward))
        # A chunk's products and those with its state; nothing was measured, and the share is the delta rule's.
        seconds = 4 * space.state_size * self.local / t / (self.hardware.peak * DELTA_RULE_SHARE)
        layer.add("core_attn", "attention", seconds, 2 * seconds)
        self.linear(layer, "rest", space.width, sizes.hidden, divided="rows")

    def _experts(self, layer: _Layer) -> None:
        """Add router, dispatch, grouped products, combination, and shared experts."""
        sizes, topology, h = self.sizes, self.topology, self.hardware
        hidden, ep, etp = sizes.latent_experts or sizes.hidden, topology.expert, topology.expert_tensor
        layer.add("moe", "products", *self._router())
        copies = self.rows * sizes.topk  # rows that this rank sends
        received = copies * etp
        unit = BF16 * hidden
        # Rows are gathered in the order of experts, and summed back by their weights; both again backward.
        permuted = h.moved(unit * (2 * copies)) + h.moved(unit * (copies + self.rows))
        if ep > 1 and sizes.experts > ep:  # what arrives from ranks is sorted by expert, and back
            permuted += 2 * h.moved(unit * 2 * received)
        permuted *= PERMUTATION
        layer.add("moe", "element-wise", permuted, permuted)
        if ep * etp > 1:
            exchange = self._exchange(unit * copies) if ep > 1 else 0.0
            if etp > 1:
                exchange += self.collective("all_gather", unit * received, "expert_tensor")
            exposed = 2 * exchange * (1 - self.execution.expert_overlap)
            layer.add("moe", "expert parallel", exposed, exposed)
        local = sizes.experts / ep
        width, gate = sizes.expert_ffn / etp, 2 if sizes.gated else 1
        for inputs, outputs in ((hidden, gate * width), (width, hidden)):
            self._grouped(layer, local, received / local, inputs, outputs)
        self._activation(layer, "moe_act", received, width)
        if sizes.shared_ffn:
            self.linear(layer, "shared_experts", sizes.hidden, gate * sizes.shared_ffn, slices=gate)
            self._activation(layer, "shared_experts", self.local, sizes.shared_ffn / topology.tensor)
            self.linear(layer, "shared_experts", sizes.shared_ffn, sizes.hidden, divided="rows")
            added = BF16 * sizes.hidden * self.rows
            layer.add("shared_experts", "element-wise", h.moved(3 * added), h.moved(2 * added))
        if sizes.latent_experts:
            for inputs, outputs in ((sizes.hidden, hidden), (hidden, sizes.hidden)):
                self.linear(layer, "moe", inputs, outputs, divided="no", tokens=self.rows)

    def _exchange(self, size: float) -> float:
        """Return the seconds of an all-to-all of experts' rows."""
        copies = self.execution.node_copies
        if copies is None or copies >= self.sizes.topk:
            return self.collective("all_to_all", size, "expert")
        ranks = self.groups["expert"]
        crossing = collective_seconds(
            self.hardware, "all_to_all", size * copies / self.sizes.topk, len(ranks), len(ranks)
        )
        inside = collective_seconds(self.hardware, "all_to_all", size, len(ranks), 1)
        nodes = nodes_of(tuple(ranks), self.hardware.cards_per_node)
        return inside if nodes == 1 else max(inside, crossing)

    def _router(self) -> tuple[float, float]:
        sizes, h = self.sizes, self.hardware
        forward, data, weight = (h.product(self.rows, sizes.hidden, sizes.experts, kind) for kind in PASSES)
        scores = h.moved(FP32 * self.rows * sizes.experts * 6)
        return forward + scores, data + (0.0 if self.frozen else weight) + scores

    def _grouped(self, layer: _Layer, experts: float, rows: float, inputs: float, outputs: float) -> None:
        h = self.hardware
        forward, data, weight = (
            h.grouped_product(experts, rows, inputs, outputs, kind)
            if self.execution.grouped
            else experts * h.product(rows, inputs, outputs, kind)
            for kind in PASSES
        )
        if self.execution.fp8:
            cast = h.moved(QUANTISATION_BYTES * experts * rows * inputs)
            forward, data, weight = (seconds / h.fp8 + cast for seconds in (forward, data, weight))
        layer.add("moe", "experts", forward, data + (0.0 if self.frozen else weight))
        if not self.frozen and self.execution.grouped and not self.execution.fused_expert_gradients:
            # torch's grouped product writes bf16, which another kernel adds to the fp32 buffer.
            layer.add("moe", "experts", 0.0, h.moved((2 * FP32 + BF16) * experts * inputs * outputs))
        if self.rank and "experts" in self.adapted:
            r = self.rank
            for a, b in ((inputs, r), (r, outputs)):
                once = h.grouped_product(experts, rows, a, b, "forward")
                layer.add("moe", "experts", once, 2 * once)
            moved = BF16 * 3 * experts * rows
            layer.add("moe", "element-wise", h.moved(moved * outputs), h.moved(moved * inputs))

    # --- ends of the model ---

    def head(self, *, passes: int = 1) -> tuple[Costs, Costs, tuple[int, int]]:
        """Return forward and backward costs of the last norm, output layer and loss, and their kernels.

        Here the output head computes its gradients beside the loss, in the forward pass.
        """
        sizes, topology, h = self.sizes, self.topology, self.hardware
        vocabulary = sizes.vocabulary / topology.tensor
        products = [h.product(self.local, sizes.hidden, vocabulary, kind) for kind in PASSES]
        if self.frozen:
            products[2] = 0.0
        logits = self.local * vocabulary
        # bf16 logits: read for the softmax, and replaced by their gradient. Whole logits are fp32 for the loss.
        softmax = h.moved(logits * (3 * BF16 if not self.execution.whole_logits else 3 * FP32 + 2 * BF16))
        norm = h.moved(5 * BF16 * self.rows * sizes.hidden)
        forward: Costs = defaultdict(float)
        backward: Costs = defaultdict(float)
        if self.execution.whole_logits:
            forward["output head"], backward["output head"] = products[0] + softmax, products[1] + products[2]
        else:
            forward["output head"] = sum(products) + softmax
        forward["element-wise"] = norm
        if topology.tensor > 1:
            size = BF16 * self.local * sizes.hidden
            reduced = self.collective("all_reduce", size, "tensor")  # or gathered, and its gradient scattered
            forward["tensor parallel"] = reduced + 2 * self.collective("all_reduce", FP32 * self.local, "tensor")
        return scaled(forward, passes), scaled(backward, passes), (20 * passes, 6 * passes)

    def embedding(self) -> tuple[Costs, Costs]:
        """Return forward and backward costs of the embedding."""
        width = self.rows * self.sizes.hidden
        forward: Costs = defaultdict(float, {"element-wise": self.hardware.moved(2 * BF16 * width)})
        backward: Costs = defaultdict(float)
        if not self.frozen:
            backward["element-wise"] = self.hardware.moved((BF16 + 2 * FP32) * width)
        if self.topology.tensor > 1:
            size = BF16 * self.local * self.sizes.hidden
            kind = "reduce_scatter" if self.topology.sequence_parallel else "all_reduce"
            forward["tensor parallel"] = self.collective(kind, size, "tensor")
            if self.topology.sequence_parallel:
                backward["tensor parallel"] = self.collective("all_gather", size, "tensor")
        return forward, backward
