"""Seconds of a training step, by part: layers on stages, the pipeline's order, gradients, optimizer, and the host. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from megascend.apps.plan.hardware import Hardware
from megascend.apps.plan.layers import ALL_LAYERS, BF16, FP32, Cost, Costs, Execution, LayerSeconds, scaled, total
from megascend.apps.plan.pipeline import Durations, TimedPass, least_seconds, simulate, step_seconds
from megascend.config.training import Recompute
from megascend.models import text_config
from megascend.models.memory.parameters import StageParameters
from megascend.models.memory.sizes import LayerKey, ModelSizes
from megascend.runtime.topology.topology import Topology

ADAM_BYTES = 4 * FP32 + 3 * FP32 + BF16
"""Moved for a parameter by AdamW: gradient, main parameter and two moments read, the last three and the weight written."""
NORM_BYTES = 2 * FP32
"""Moved for a gradient beside the update: read for the norm, and zeroed."""
STEP_S = 0.004
"""Seconds in which the host begins and ends a step, while the device waits."""
RANK_S = 5e-5
"""Seconds that each rank of the world adds to the exchange before a step (benchmarks/large_worlds)."""
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
ROUNDING = 1e-9
"""Share by which sums of the same seconds may differ."""
HIDDEN_SHARE = 0.8
"""Share of a pass that hides collectives of data parallelism: they take part of the device from the products."""


@dataclass(frozen=True)
class StepWork:
    """The largest micro batches of a step, and the passes over them.

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
    def _working(self) -> float:
        """Seconds in which the stage that works longest runs its passes."""
        return self.micro_batches * max(stage.total for stage in self.durations)

    @cached_property
    def bound(self) -> float:
        """Seconds that no step is faster than. Cheap, where :attr:`seconds` simulates a pipeline."""
        if len(self.durations) == 1:
            return sum(self.busy.values())
        least = least_seconds(self.durations, self.micro_batches, self.transfer)
        return sum(self.busy.values()) + max(0.0, (1 - ROUNDING) * least - self._working)

    @cached_property
    def bubble(self) -> float:
        """Seconds in which the stage that works longest waits for others."""
        if len(self.durations) == 1:
            return 0.0
        running = step_seconds(self.durations, self.micro_batches, self.transfer, overlaps=self.overlaps)
        return max(0.0, running - self._working)

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds by part; their sum is the step."""
        return {**self.busy, "pipeline bubble": self.bubble} if self.bubble else dict(self.busy)

    @cached_property
    def seconds(self) -> float:
        return sum(self.busy.values()) + self.bubble

    def spans(self) -> list[TimedPass]:
        return simulate(self.durations, self.micro_batches, self.transfer, overlaps=self.overlaps)


def attention_windows(hf_config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return how far back each layer's attention reaches, by ``sliding_window`` and ``layer_types``; empty without windows."""
    text = text_config(hf_config)
    window, kinds = text.get("sliding_window"), text.get("layer_types")
    if not window or not kinds:
        return ()
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


CostKey = tuple[LayerKey, int | None]
"""Kind and window of layers of equal cost."""


@dataclass(frozen=True)
class MicroBatchCosts:
    """Costs of a micro batch on a rank, wherever its layers are.

    Attributes:
        keys: of each layer of the model, and ``layers``: of a layer of each key.
        embedding: forward and backward costs; ``head``: and kernels.
        states: bytes that a stage sends to its neighbour.
    """

    keys: tuple[CostKey, ...]
    layers: Mapping[CostKey, LayerSeconds]
    embedding: tuple[Costs, Costs]
    head: tuple[Costs, Costs, tuple[int, int]]
    states: float

    @classmethod
    def from_cost(cls, cost: Cost) -> MicroBatchCosts:
        """Compute the costs."""
        sizes = cost.sizes
        keys: list[CostKey] = list(
            zip(sizes.layer_keys, cost.windows or (None,) * len(sizes.with_experts), strict=True)
        )
        return cls(
            tuple(keys),
            {key: cost.layer(keys.index(key)) for key in set(keys)},
            cost.embedding(),
            cost.head(passes=2 if sizes.prediction_head else 1),
            BF16 * cost.rows * sizes.hidden,
        )


class CostTable:
    """Costs of one model's micro batches on one device, computed once for layouts that differ in stages and replicas only."""

    def __init__(self, sizes: ModelSizes, hardware: Hardware, windows: tuple[int | None, ...] = ()) -> None:
        self._sizes = sizes
        self._hardware = hardware
        self._windows = windows
        self._entries: dict[tuple[object, ...], MicroBatchCosts] = {}

    def costs(self, topology: Topology, work: StepWork) -> MicroBatchCosts:
        """Return the costs of a layout's micro batch."""
        # Without the axes that divide layers and samples, so that costs cannot depend on them.
        shards = replace(
            topology,
            world_size=1,
            data=1,
            pipeline=1,
            virtual_pipeline=1,
            expert_data=1,
            chunk_layers=(),
            notes=(),
        )
        settings = (work.tokens, work.length, work.frozen, work.rank, work.adapted)
        key = (shards, *settings, work.execution)
        if key not in self._entries:
            cost = Cost(self._sizes, shards, self._hardware, *settings, self._windows, work.execution)
            self._entries[key] = MicroBatchCosts.from_cost(cost)
        return self._entries[key]


@dataclass
class _Pass:
    """Costs and kernels of a chunk's forward or backward pass."""

    costs: Costs = field(default_factory=lambda: defaultdict(float))
    kernels: float = 0.0

    def add(self, costs: Costs, kernels: float, times: int = 1) -> None:
        for part, seconds in costs.items():
            self.costs[part] += times * seconds
        self.kernels += times * kernels

    def timed(self, launch_s: float) -> tuple[Costs, float]:
        """Return the costs and the duration: the device's, or the host's if it is late."""
        device = sum(self.costs.values())
        late = self.kernels * launch_s - device
        if late > 0:
            self.costs["host"] += late
        return self.costs, device + max(0.0, late)


TimedChunk = tuple[tuple[Costs, float], tuple[Costs, float]]
"""Costs and seconds of a chunk's forward and backward pass."""


def step_time(
    sizes: ModelSizes,
    topology: Topology,
    parameters: Sequence[StageParameters],
    work: StepWork,
    hardware: Hardware,
    windows: tuple[int | None, ...] = (),
    table: CostTable | None = None,
) -> StepTime:
    """Predict the time of a step.

    Args:
        parameters: of a rank of each stage, the trained ones if the model is not frozen.
        table: of this model on this device, for callers that predict many layouts; None: costs are computed here.
    """
    costs = (table or CostTable(sizes, hardware, windows)).costs(topology, work)
    chunks = _chunks(sizes, topology, costs, work, hardware)
    durations = tuple(
        Durations(
            tuple(seconds for (_, seconds), _ in stage),
            tuple(seconds for _, (_, seconds) in stage),
        )
        for stage in chunks
    )
    transfer = 0.0
    if topology.pipeline > 1:
        neighbours = topology.group_of(0, "pipeline")[:2]
        transfer = hardware.collective("send", costs.states, neighbours)
    busiest = max(range(topology.pipeline), key=lambda stage: durations[stage].total)
    parts = scaled(total(costs for chunk in chunks[busiest] for costs, _ in chunk), work.micro_batches)
    busy: dict[str, float] = {part: seconds for part, seconds in parts.items() if seconds > 0}
    busy |= _update(topology, parameters, work, hardware, durations, sizes)
    busy["step"] = STEP_S + RANK_S * topology.world_size
    return StepTime(busy, durations, work.micro_batches, transfer, topology.virtual_pipeline > 1)


def _chunks(
    sizes: ModelSizes, topology: Topology, costs: MicroBatchCosts, work: StepWork, hardware: Hardware
) -> list[list[TimedChunk]]:
    """Return the passes of each chunk of each stage; chunks with the same layers are counted once."""
    launch_s = 0.0 if work.execution.captured else hardware.launch_s * work.execution.host_kernels
    recompute, keys = work.recompute, costs.keys
    modules = None if recompute.granularity == "full" else recompute.modules
    recomputed: dict[CostKey, Costs] = {}
    if recompute.granularity != "none":
        recomputed = {
            key: defaultdict(float, {"recomputation": sum(layer.recomputed(modules).values())})
            for key, layer in costs.layers.items()
        }
    gaps: Costs = defaultdict(float, {"gaps": hardware.gap_s * MESSAGE_KERNELS})
    last = (topology.pipeline - 1, topology.virtual_pipeline - 1)

    def timed(counts: Mapping[CostKey, int], position: tuple[int, int]) -> TimedChunk:
        forward, backward = _Pass(), _Pass()
        for key, times in counts.items():
            layer = costs.layers[key]
            forward.add(layer.forward_costs, layer.kernels[0], times)
            backward.add(layer.backward, layer.kernels[1], times)
            if key in recomputed:
                backward.add(recomputed[key], layer.kernels[0] * (1.0 if modules is None else 0.5), times)
        if topology.pipeline > 1:
            forward.add(gaps, MESSAGE_KERNELS)
            backward.add(gaps, MESSAGE_KERNELS)
        if position == (0, 0):
            forward.add(costs.embedding[0], 3)
            backward.add(costs.embedding[1], 3)
        if position == last:
            forward_head, backward_head, kernels = costs.head
            forward.add(forward_head, kernels[0])
            backward.add(backward_head, kernels[1])
        return forward.timed(launch_s), backward.timed(launch_s)

    alike: dict[tuple[object, ...], TimedChunk] = {}
    result = []
    for stage in range(topology.pipeline):
        row = []
        for number, indices in enumerate(topology.layers_of(stage, len(keys))):
            counts = Counter(keys[indices.start : indices.stop])
            if (stage, number) == last and sizes.prediction_head:
                counts[keys[-1]] += 1
            kind = (tuple(counts.items()), (stage, number) == (0, 0), (stage, number) == last)
            if kind not in alike:
                alike[kind] = timed(counts, (stage, number))
            row.append(alike[kind])
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
    replicas, expert_replicas = _members(topology, "data", "context"), _members(topology, "expert_data")
    alike = set()
    for stage, part in enumerate(parameters):
        is_end = sizes.tied and topology.pipeline > 1 and stage in (0, topology.pipeline - 1)
        key = (part.dense, part.experts, part.embedding, durations[stage], is_end)
        if key in alike:
            continue
        alike.add(key)
        reduced = gathered = moved = streamed = 0.0
        for count, members in ((part.dense, replicas), (part.experts, expert_replicas)):
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
        if is_end:
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
