"""Seconds of a training step, by part: layers on stages, the pipeline's order, gradients, optimizer, and the host. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megascend.config.training import Recompute
from megascend.memory.parameters import StageParameters
from megascend.memory.sizes import LayerKey, ModelSizes
from megascend.models import text_config
from megascend.planning.hardware import Hardware
from megascend.planning.layers import ALL_LAYERS, BF16, FP32, Cost, Costs, Execution, scaled, total
from megascend.planning.pipeline import Durations, TimedPass, simulate, step_seconds
from megascend.topology.topology import Topology

ADAM_BYTES = 4 * FP32 + 3 * FP32 + BF16
"""Moved for a parameter by AdamW: gradient, main parameter and two moments read, the last three and the weight written."""
NORM_BYTES = 2 * FP32
"""Moved for a gradient beside the update: read for the norm, and zeroed."""
STEP_S = 0.004
"""Seconds in which the host begins and ends a step, while the device waits."""
RANK_S = 5e-5
"""Seconds that each rank of the world adds to the exchange before a step (docs/benchmarks.md, large worlds)."""
OFFLOADED_BYTES = 3 * FP32
"""Moved for a parameter between host and device by an update with offloaded state, in each direction at once."""
HOST_BYTES_PER_S = 50e9
"""Of PCIe 5 with 16 lanes, in each direction (64 GB/s without overheads); not measured here."""
UPDATE_BYTES = 2**27
"""Bytes that one kernel of the update moves, which takes a list of parameters."""
MESSAGE_KERNELS = 8
"""Gaps between kernels that a message between pipeline stages takes: 70 us for the smallest one on two H200s."""
BUCKETS = 8
"""Parts in which gradients are reduced during the backward pass, and parameters gathered during the forward pass, at least: the
last one of the former and the first one of the latter are never hidden."""
HIDDEN_SHARE = 0.8
"""Share of a pass that hides collectives of data parallelism: they take part of the device from the products."""


@dataclass(frozen=True)
class StepWork:
    """The largest micro batches of a step, and what is done with them.

    Attributes:
        tokens: of a micro batch, over all context parallel ranks; ``length``: of a sample in it.
        micro_batches: of a data parallel rank.
        adapter: elements of an adapter on a rank that are trained; the model is frozen.
        rank: the adapter's rank, and ``adapted``: kinds of layers that it acts on.
        overlap_grad_reduce, overlap_param_gather, distributed: as in ``optimizer``; ``offloaded``: share of its state.
    """

    tokens: float
    length: float
    micro_batches: int
    recompute: Recompute = field(default_factory=Recompute)
    adapter: int = 0
    rank: int = 0
    adapted: frozenset[str] = ALL_LAYERS
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    distributed: bool = True
    offloaded: float = 0.0
    execution: Execution = field(default_factory=Execution)

    @property
    def frozen(self) -> bool:
        return self.rank > 0


@dataclass(frozen=True)
class StepTime:
    """Time of a step.

    Attributes:
        busy: seconds by part, of the pipeline stage that works longest, and of the update; without the pipeline's bubble.
        durations: of each stage's passes.
        transfer: seconds of a result between stages.
        overlaps: stages compute on while they send.
    """

    busy: Mapping[str, float]
    durations: tuple[Durations, ...]
    micro_batches: int
    transfer: float
    overlaps: bool

    @cached_property
    def bound(self) -> float:
        """Seconds without the bubble: no step is faster. Cheap, where :attr:`seconds` simulates a pipeline."""
        return sum(self.busy.values())

    @cached_property
    def bubble(self) -> float:
        """Seconds in which the stage that works longest waits for others."""
        if len(self.durations) == 1:
            return 0.0
        running = step_seconds(self.durations, self.micro_batches, self.transfer, overlaps=self.overlaps)
        return max(0.0, running - self.micro_batches * max(stage.total for stage in self.durations))

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds by part; their sum is the step."""
        return {**self.busy, "pipeline bubble": self.bubble} if self.bubble else dict(self.busy)

    @cached_property
    def seconds(self) -> float:
        return self.bound + self.bubble

    def spans(self) -> list[TimedPass]:
        """Return all passes of the step."""
        return simulate(self.durations, self.micro_batches, self.transfer, overlaps=self.overlaps)


def attention_windows(hf_config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return how far back each layer's attention reaches, by ``sliding_window`` and ``layer_types``; empty without windows."""
    text = text_config(hf_config)
    window, kinds = text.get("sliding_window"), text.get("layer_types")
    if not window or not kinds:
        return ()
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@dataclass
class _Pass:
    """Costs and kernels of a chunk's forward or backward pass."""

    costs: Costs = field(default_factory=lambda: defaultdict(float))
    kernels: float = 0.0

    def add(self, costs: Costs, kernels: float, times: int = 1) -> None:
        for part, seconds in costs.items():
            self.costs[part] += times * seconds
        self.kernels += times * kernels

    def seconds(self, launch_s: float) -> float:
        """Return the duration: the device's, or the host's if it is late."""
        device = sum(self.costs.values())
        late = self.kernels * launch_s - device
        if late > 0:
            self.costs["host"] += late
        return device + max(0.0, late)


CostKey = tuple[LayerKey, int | None]
"""Kind and window of layers of equal cost."""


def step_time(
    sizes: ModelSizes,
    topology: Topology,
    parameters: Sequence[StageParameters],
    work: StepWork,
    hardware: Hardware,
    windows: tuple[int | None, ...] = (),
) -> StepTime:
    """Predict the time of a step.

    Args:
        parameters: of a rank of each stage, the trained ones if the model is not frozen.
    """
    cost = Cost(
        sizes,
        topology,
        hardware,
        work.tokens,
        work.length,
        work.frozen,
        work.rank,
        work.adapted,
        windows,
        work.execution,
    )
    passes = _passes(cost, work)
    launch_s = 0.0 if work.execution.captured else hardware.launch_s * work.execution.host_kernels
    durations = tuple(
        Durations(
            tuple(forward.seconds(launch_s) for forward, _ in chunks),
            tuple(backward.seconds(launch_s) for _, backward in chunks),
        )
        for chunks in passes
    )
    transfer = 0.0
    if topology.pipeline > 1:
        neighbours = topology.group_of(0, "pipeline")[:2]
        transfer = hardware.collective("send", BF16 * cost.rows * sizes.hidden, neighbours)
    busiest = max(range(topology.pipeline), key=lambda stage: durations[stage].total)
    costs = scaled(total(run.costs for chunk in passes[busiest] for run in chunk), work.micro_batches)
    busy: dict[str, float] = {part: seconds for part, seconds in costs.items() if seconds > 0}
    busy |= _update(topology, parameters, work, hardware, durations, sizes)
    busy["step"] = STEP_S + RANK_S * topology.world_size
    return StepTime(busy, durations, work.micro_batches, transfer, topology.virtual_pipeline > 1)


def _passes(cost: Cost, work: StepWork) -> list[list[tuple[_Pass, _Pass]]]:
    """Return the forward and the backward pass of each chunk of each stage."""
    sizes, topology = cost.sizes, cost.topology
    layers = len(sizes.with_experts)
    windows = cost.windows or (None,) * layers
    keys: list[CostKey] = list(zip(sizes.layer_keys, windows, strict=True))
    seconds = {key: cost.layer(keys.index(key)) for key in set(keys)}
    recompute = work.recompute
    modules = None if recompute.granularity == "full" else recompute.modules
    recomputed_costs = {}
    if recompute.granularity != "none":
        recomputed_costs = {
            key: defaultdict(float, {"recomputation": sum(layer.recomputed(modules).values())})
            for key, layer in seconds.items()
        }
    chunks = [topology.layers_of(stage, layers) for stage in range(topology.pipeline)]
    last = (topology.pipeline - 1, topology.virtual_pipeline - 1)
    result = []
    for stage, spans in enumerate(chunks):
        row = []
        for number, indices in enumerate(spans):
            forward, backward = _Pass(), _Pass()
            counts = Counter(keys[index] for index in indices)
            if (stage, number) == last and sizes.prediction_head:
                counts[keys[-1]] += 1
            for key, times in counts.items():
                layer = seconds[key]
                forward.add(layer.forward_costs, layer.kernels[0], times)
                backward.add(layer.backward, layer.kernels[1], times)
                if key in recomputed_costs:
                    backward.add(recomputed_costs[key], layer.kernels[0] * (1.0 if modules is None else 0.5), times)
            if topology.pipeline > 1:
                gap = cost.hardware.gap_s * MESSAGE_KERNELS
                for side in (forward, backward):
                    side.add(defaultdict(float, {"gaps": gap}), MESSAGE_KERNELS)
            if (stage, number) == (0, 0):
                costs, back = cost.embedding()
                forward.add(costs, 3)
                backward.add(back, 3)
            if (stage, number) == last:
                costs, back, kernels = cost.head(passes=2 if sizes.prediction_head else 1)
                forward.add(costs, kernels[0])
                backward.add(back, kernels[1])
            row.append((forward, backward))
        result.append(row)
    return result


def _update(
    topology: Topology,
    parameters: Sequence[StageParameters],
    work: StepWork,
    hardware: Hardware,
    durations: Sequence[Durations],
    sizes: ModelSizes,
) -> dict[str, float]:
    """Return the seconds of gradient reduction, optimizer and parameter gathering that nothing hides."""
    if work.frozen:
        # Adapters' gradients are summed over all replicas, and their state is not sharded.
        reduced = hardware.collective("all_reduce", FP32 * work.adapter, _members(topology, "data", "context"))
        return {
            "gradient reduction": reduced,
            "optimizer": hardware.moved((ADAM_BYTES + NORM_BYTES) * work.adapter),
        }
    slowest: dict[str, float] = {}
    for stage, part in enumerate(parameters):
        reduced = gathered = moved = streamed = 0.0
        for count, axes in ((part.dense, ("data", "context")), (part.experts, ("expert_data",))):
            members = _members(topology, *axes)
            kind = "reduce_scatter" if work.distributed else "all_reduce"
            reduced += hardware.collective(kind, FP32 * count, members)
            if work.distributed:
                gathered += hardware.collective("all_gather", BF16 * count, members)
            share = count / (len(members) if work.distributed else 1)
            moved += (ADAM_BYTES + FP32) * share + FP32 * count
            streamed += work.offloaded * OFFLOADED_BYTES * share
        if work.overlap_grad_reduce:
            hidden = HIDDEN_SHARE * sum(durations[stage].backward)
            reduced = max(reduced / BUCKETS, reduced - hidden)
        if work.overlap_param_gather:
            hidden = HIDDEN_SHARE * sum(durations[stage].forward)
            gathered = max(gathered / BUCKETS, gathered - hidden)
        if sizes.tied and topology.pipeline > 1 and stage in (0, topology.pipeline - 1):
            ends = topology.group_of(0, "pipeline")
            reduced += hardware.collective("all_reduce", FP32 * part.embedding, (ends[0], ends[-1]))
        times = {
            "gradient reduction": reduced,
            # Chunks are updated while others are on the bus.
            "optimizer": max(
                hardware.moved(moved, kernels=max(1.0, moved / UPDATE_BYTES)), streamed / HOST_BYTES_PER_S
            ),
            "parameter gathering": gathered,
        }
        if sum(times.values()) > sum(slowest.values()):
            slowest = times
    return {part: seconds for part, seconds in slowest.items() if seconds > 0}


def _members(topology: Topology, *axes: str) -> tuple[int, ...]:
    return tuple(topology.group_of(0, *axes))
