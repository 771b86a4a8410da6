"""Every legal layout of a run on a cluster, with its memory and its time; the best ones, and the losses of the others. Pure.

Sizes are legal if :func:`megascend.runtime.topology.topology.plan` and the declaration of the model's family accept them, the
code that refuses layouts when a run starts. What the engine refuses beyond that, :func:`megascend.apps.train.layout_plan.checked`
asks it.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from typing import Any

from megascend.apps.plan.hardware import Hardware
from megascend.apps.plan.layers import ALL_LAYERS, Cost, Execution
from megascend.apps.plan.pipeline import balanced_chunks
from megascend.apps.plan.step import CostTable, StepTime, StepWork, attention_windows, step_time
from megascend.config import Parallel, Recompute, TrainerConfig
from megascend.errors import ConfigError, TopologyError
from megascend.models import text_config
from megascend.models.checkpoint_files.files import TensorHeader
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.models.memory.estimate import Estimate, estimate
from megascend.models.memory.megatron import StageGroup, stage_groups
from megascend.models.memory.parameters import LayerTensors, StageParameters, is_target, stages
from megascend.models.memory.sizes import ModelSizes, Workload
from megascend.runtime.topology.topology import Topology, format_pipeline_layout, plan
from megascend.surroundings import announce

MEMORY_SHARE = 0.92
"""Share of the device's memory that a layout or a trial may take: batches differ, and the allocator needs some for itself."""
SHORTEST_SLICE = 2048
"""Tokens of a sample that a context parallel rank should have at least; shorter slices only add communication."""
MOST_MICRO_BATCH = 65536
"""Tokens of a micro batch on a rank, at most: products gain nothing beyond."""
ANNOUNCED_EVERY_S = 3.0  # between two lines about the progress of a search
LONGEST_PIPELINE = 64
"""Pipeline stages, at most."""
UNEVEN_LAYERS = 2
"""Layers of a chunk, at most, where stages have several chunks and layers do not divide over stages: published layouts of
DeepSeek-V3 and Llama 3.1 405B have as many."""
STATES = ("parameters", "main parameters", "gradients", "moments", "adapters")
"""Items of memory that micro batches and recomputation do not change."""
RECOMPUTE = (
    Recompute(),
    Recompute(granularity="selective", modules=("layernorm",)),
    Recompute(granularity="selective", modules=("layernorm", "moe_act")),
    Recompute(granularity="selective", modules=("mlp",)),
    Recompute(granularity="selective", modules=("moe", "layernorm")),
    Recompute(granularity="full"),
)


@dataclass(frozen=True)
class PlannedModel:
    """A model as a plan needs it.

    Attributes:
        info: of its checkpoint, in which an expert's tensors are one with those of its layer's other experts.
        hf_config: its ``config.json``.
        windows: how far back each layer's attention reaches; empty: all tokens.
    """

    info: ModelInfo
    hf_config: Mapping[str, Any]
    sizes: ModelSizes
    windows: tuple[int | None, ...] = ()

    @cached_property
    def layer_tensors(self) -> LayerTensors:
        return LayerTensors.sorted_by_layer(
            self.info.tensors, len(self.sizes.with_experts), self.info.architecture.images
        )

    @classmethod
    def from_checkpoint(cls, info: ModelInfo, hf_config: Mapping[str, Any]) -> PlannedModel:
        info = replace(info, tensors=joined_experts(info.tensors))
        return cls(info, hf_config, ModelSizes.of(info, hf_config), attention_windows(hf_config))

    @property
    def execution(self) -> Execution:
        """Return how the engine computes this model: experts with biases have no grouped product."""
        return Execution(grouped=not self.info.shape.expert_bias)


def joined_experts(tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return headers in which the matrices of a layer's experts are one tensor [experts, rows, columns], as some files have them.

    Models with hundreds of experts have tens of thousands of tensors; every layout is counted from these headers.
    """
    result: dict[str, TensorHeader] = {}
    counts: dict[str, int] = defaultdict(int)
    for name, header in tensors.items():
        joined = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        counts[joined] += 1
        result[joined] = header
    return {
        name: header
        if counts[name] == 1
        else TensorHeader(header.dtype, (counts[name], *header.shape), header.file, header.span)
        for name, header in result.items()
    }


@dataclass(frozen=True)
class PlanRequest:
    """The run and the cluster of a plan.

    Attributes:
        cards: number of devices.
        length: tokens of a sample; samples are taken to be of this length.
        global_batch: samples of a step.
        config: settings of the run, whose layout, micro batches and recomputation are searched.
    """

    cards: int
    length: int
    global_batch: int
    config: TrainerConfig

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.length * self.global_batch


@dataclass(frozen=True)
class Candidate:
    """A layout with its settings, its time and its memory."""

    topology: Topology
    config: TrainerConfig
    micro_batch: int
    micro_batches: int
    time: StepTime
    memory: Estimate
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one device."""
        return self.tokens / self.time.seconds / self.topology.world_size

    def describe(self) -> str:
        """Name the layout in one line."""
        t = self.topology
        sizes = {
            "TP": t.tensor,
            "CP": t.context,
            "PP": t.pipeline,
            "VPP": t.virtual_pipeline,
            "EP": t.expert,
            "ETP": t.expert_tensor if t.is_moe and t.expert_tensor > 1 else 1,
            "DP": t.data,
        }
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1] or ["one rank"]
        if t.is_uneven and self.config.parallel.pipeline_layout:
            words.append(self.config.parallel.pipeline_layout)
        recompute = self.config.recompute
        if recompute.granularity == "full":
            words.append("recompute all")
        elif recompute.granularity == "selective":
            words.append(f"recompute {'+'.join(recompute.modules)}")
        if self.config.optimizer.overlap_grad_reduce and self.config.lora is None:
            words.append("overlapped reduction")
        samples = f"{self.micro_batch} sample{'s' if self.micro_batch > 1 else ''} a micro batch"
        return f"{' '.join(words)}, {samples} x {self.micro_batches}"


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        candidates: the fastest variant of each of the fastest layouts, fastest first.
        evaluations: memories and times that were computed; the cost of the search.
        legal: layouts that the model and the world allow, with any micro batch and recomputation; ``fitting``: variants of them
            that fit into memory, and of which none that fits is the same with less recomputation.
        smallest: the layout that would need least memory, and what it needs, if none fits.
    """

    candidates: list[Candidate]
    evaluations: int
    legal: int
    fitting: int
    smallest: tuple[Topology, Estimate] | None = None


@dataclass
class _Search:
    """State of a search."""

    model: PlannedModel
    request: PlanRequest
    hardware: Hardware
    costs: CostTable
    fitting: list[Candidate] = field(default_factory=list)
    evaluations: int = 0
    smallest: tuple[Topology, Estimate] | None = None


def search(model: PlannedModel, request: PlanRequest, hardware: Hardware, best: int = 20) -> SearchResult:
    """Compute all legal layouts that fit into the device's memory, and return the ``best`` fastest ones.

    Raises:
        ConfigError: samples are longer than the model's context.
    """
    longest = model.info.shape.max_position
    if longest is not None and request.length > longest:
        raise ConfigError(f"length: {request.length} is above the model's context of {longest} tokens; set --length")
    state = _Search(model, request, hardware, CostTable(model.sizes, hardware, model.windows))
    legal, announced = 0, time.monotonic()
    for topology, parallel in layouts(model, request, hardware):
        legal += 1
        _evaluate(state, topology, parallel)
        if time.monotonic() - announced > ANNOUNCED_EVERY_S:
            announced = time.monotonic()
            announce(f"{legal} layouts so far, {len(state.fitting):,} of {state.evaluations:,} variants fit")
    smallest = None if state.fitting else state.smallest
    return SearchResult(_fastest(state.fitting, best), state.evaluations, legal, len(state.fitting), smallest)


def _fastest(candidates: list[Candidate], count: int) -> list[Candidate]:
    """Return the fastest variant of each of the ``count`` fastest layouts; pipelines are simulated only as far as it needs."""
    chosen: dict[Topology, Candidate] = {}
    slowest = math.inf
    for candidate in sorted(candidates, key=lambda candidate: candidate.time.bound):
        if candidate.time.bound > slowest:
            break  # the others are slower, too
        before = chosen.get(candidate.topology)
        if before is None or (candidate.time.seconds, candidate.memory.total) < (
            before.time.seconds,
            before.memory.total,
        ):
            chosen[candidate.topology] = candidate
        if len(chosen) >= count:
            slowest = sorted(entry.time.seconds for entry in chosen.values())[count - 1]
    return sorted(chosen.values(), key=lambda entry: (entry.time.seconds, entry.memory.total))[:count]


def layouts(model: PlannedModel, request: PlanRequest, hardware: Hardware) -> Iterator[tuple[Topology, Parallel]]:
    """Yield every layout that topology and model accept and that gives each replica a sample.

    Where layers do not divide evenly, they are divided by their times on ``hardware`` (:func:`_pipelines`).
    """
    shape, cards = model.info.shape, request.cards
    text = model.info.architecture.normalise(text_config(model.hf_config))
    contexts = [size for size in _powers(cards) if size == 1 or request.length // size >= SHORTEST_SLICE]
    if model.info.image_layout is not None:  # images are not divided over context parallel ranks
        contexts = [1]
    experts = _divisors(shape.num_experts, cards) if shape.num_experts else [1]
    for tensor in _powers(min(cards, shape.num_heads)):
        for context in contexts:
            if model.info.architecture.unsupported_layout(text, tensor=tensor, context=context):
                continue
            for expert in experts:
                for expert_tensor in {1, tensor} if expert > 1 else {tensor}:
                    sizes = Parallel(
                        tensor=tensor,
                        context=context,
                        expert=expert,
                        expert_tensor=expert_tensor if expert > 1 and expert_tensor != tensor else None,
                        sequence=True if tensor > 1 else None,
                    )
                    for parallel in _pipelines(model, request, sizes, hardware):
                        replicas = cards // (tensor * context * parallel.pipeline)
                        if replicas > request.global_batch or replicas * tensor * context * parallel.pipeline != cards:
                            continue
                        try:
                            topology = plan(parallel, cards, shape)
                        except TopologyError:
                            continue
                        if not model.info.architecture.unsupported_stages(text, topology.chunk_layers):
                            yield topology, parallel


def _pipelines(model: PlannedModel, request: PlanRequest, sizes: Parallel, hardware: Hardware) -> Iterator[Parallel]:
    """Yield the pipelines of a layout's other sizes: even ones, and where layers do not divide over stages, balanced ones.

    The latter have one chunk a stage, or chunks of at most :data:`UNEVEN_LAYERS`, and tensor parallelism within a node: every
    number of chunks would be ten times as many layouts.
    """
    layers, weights = model.info.shape.num_layers, None
    yield sizes
    for pipeline in range(2, min(request.cards, layers, LONGEST_PIPELINE) + 1):
        if request.cards % (sizes.tensor * sizes.context * pipeline):
            continue
        chunks = set(_divisors(layers // pipeline, layers)) if layers % pipeline == 0 else set()
        if layers % pipeline and sizes.tensor <= hardware.cards_per_node:
            chunks |= {1, -(-layers // (pipeline * UNEVEN_LAYERS))}
        for virtual in sorted(chunks):
            parallel = sizes.model_copy(update={"pipeline": pipeline, "virtual_pipeline": virtual})
            if layers % (pipeline * virtual):
                weights = weights or _stage_weights(model, request, sizes, hardware)
                division = balanced_chunks(*weights, pipeline, virtual, int(model.info.shape.prediction_head))
                if division is None:
                    continue
                layout = format_pipeline_layout(division, prediction_head=model.info.shape.prediction_head)
                parallel = parallel.model_copy(update={"pipeline_layout": layout})
            yield parallel


def _stage_weights(
    model: PlannedModel, request: PlanRequest, sizes: Parallel, hardware: Hardware
) -> tuple[tuple[float, ...], float, float]:
    """Return the times of layers, of the embedding, and of the output layer with a head, in units of a mean layer.

    They are rounded to a quarter, so that layouts whose times hardly differ share a division.
    """
    try:
        topology = plan(sizes, request.cards, model.info.shape)
    except TopologyError:  # these sizes need a pipeline
        topology = plan(Parallel(), 1, model.info.shape)
    lora = request.config.lora
    cost = Cost(
        model.sizes,
        topology,
        hardware,
        request.length,
        request.length,
        lora is not None,
        0 if lora is None else lora.rank,
        adapted_layers(model, request.config),
        model.windows,
        model.execution,
    )
    kinds = list(zip(model.sizes.layer_keys, model.windows or repeat(None), strict=False))
    seconds = {}
    for index, kind in enumerate(kinds):
        if kind not in seconds:
            layer = cost.layer(index)
            seconds[kind] = sum(layer.forward_costs.values()) + sum(layer.backward.values())
    embedding = sum(sum(costs.values()) for costs in cost.embedding())
    forward, backward, _ = cost.head(passes=2 if model.sizes.prediction_head else 1)
    head = sum(forward.values()) + sum(backward.values())
    if model.sizes.prediction_head:
        head += seconds[kinds[-1]]
    mean = sum(seconds[kind] for kind in kinds) / len(kinds)

    def rounded(value: float) -> float:
        return round(4 * value / mean) / 4

    return tuple(max(0.25, rounded(seconds[kind])) for kind in kinds), rounded(embedding), rounded(head)


def _evaluate(state: _Search, topology: Topology, parallel: Parallel) -> None:
    """Add the variants of a layout that fit and may be its fastest: micro batches, recomputation, overlapped reductions."""
    model, request = state.model, state.request
    parameters = stage_parameters(model, topology, request.config)
    limit = MEMORY_SHARE * state.hardware.memory

    def variant(recompute: Recompute, micro_batch: int, *, overlapped: bool) -> tuple[TrainerConfig, Estimate]:
        config = _settings(request, parallel, recompute, micro_batch * request.length, overlapped=overlapped)
        memory = memory_of(model, request, topology, config, micro_batch, parameters)
        state.evaluations += 1
        if state.smallest is None or memory.total < state.smallest[1].total:
            state.smallest = (topology, memory)
        return config, memory

    least = variant(RECOMPUTE[-1], 1, overlapped=False)
    if sum(least[1].items.get(item, 0) for item in STATES) > limit:
        return

    def predicted(config: TrainerConfig, micro_batch: int, memory: Estimate) -> Candidate:
        state.evaluations += 1
        return candidate(model, request, topology, config, micro_batch, state.hardware, parameters, memory, state.costs)

    overlaps = _overlaps(model, request, topology)
    too_large: set[tuple[str, tuple[str, ...], bool]] = set()
    for micro_batch in _micro_batches(request, topology):
        fitting: list[Candidate] = []
        full: list[tuple[TrainerConfig, Estimate]] = []
        for recompute in _recomputations(model):
            for overlapped in overlaps:
                key = (recompute.granularity, recompute.modules, overlapped)
                # A layout that is too large with smaller micro batches is so with these.
                if key in too_large or any(_is_faster(other, recompute, overlapped) for other in fitting):
                    continue
                if (micro_batch, overlapped) == (1, False) and recompute is RECOMPUTE[-1]:
                    config, memory = least
                else:
                    config, memory = variant(recompute, micro_batch, overlapped=overlapped)
                if memory.total > limit:
                    too_large.add(key)
                elif recompute.granularity == "full":
                    full.append((config, memory))
                else:
                    fitting.append(predicted(config, micro_batch, memory))
            if fitting and recompute.granularity == "none":
                break  # recomputing what fits only costs time
            if not (fitting or full) and recompute.granularity == "full":
                break  # recomputing less needs more
        for config, memory in full:
            overlapped = config.optimizer.overlap_grad_reduce
            if not any(_is_faster(other, config.recompute, overlapped) for other in fitting):
                fitting.append(predicted(config, micro_batch, memory))
        if not fitting:
            break  # larger micro batches need more
        state.fitting += fitting


def _is_faster(candidate: Candidate, recompute: Recompute, overlapped: bool) -> bool:
    """Check whether a variant differs from one with ``recompute`` only in that it recomputes less, and so is faster."""
    config, less = candidate.config, candidate.config.recompute
    if less == recompute or overlapped != config.optimizer.overlap_grad_reduce:
        return False
    if "host" in candidate.time.busy:  # while the host is late, recomputation may take no time
        return False
    if less.granularity == "none" or recompute.granularity == "full":
        return True
    modules = {*recompute.modules, "moe_act"} if "moe" in recompute.modules else set(recompute.modules)
    return less.granularity == "selective" and modules >= set(less.modules)


Parameters = tuple[list[StageGroup], list[StageParameters]]
"""Parameters of a rank of each stage, by groups, and those of each stage that are trained if the model is not frozen."""


def memory_of(
    model: PlannedModel,
    request: PlanRequest,
    topology: Topology,
    config: TrainerConfig,
    micro_batch: int,
    parameters: Parameters,
) -> Estimate:
    """Estimate the memory of a layout; ``micro_batch``: samples."""
    count = micro_batches(request, topology, micro_batch)
    workload = Workload(micro_batch * request.length, count, packed=False, longest=request.length)
    memory = estimate(
        config,
        model.info,
        model.hf_config,
        topology,
        workload,
        "fused",
        sizes=model.sizes,
        groups=parameters[0],
    )
    assert memory is not None, "the Megatron engine has an estimate"
    return memory


def candidate(
    model: PlannedModel,
    request: PlanRequest,
    topology: Topology,
    config: TrainerConfig,
    micro_batch: int,
    hardware: Hardware,
    parameters: Parameters,
    memory: Estimate,
    costs: CostTable | None = None,
) -> Candidate:
    """Predict the time of a layout; ``micro_batch``: samples, ``costs``: of this model on this device."""
    count, (_, trained) = micro_batches(request, topology, micro_batch), parameters
    work = step_work(model, config, topology, trained, micro_batch * request.length, request.length, count)
    time = step_time(model.sizes, topology, trained, work, hardware, model.windows, costs)
    return Candidate(topology, config, micro_batch, count, time, memory, request.tokens)


def run_candidate(model: PlannedModel, request: PlanRequest, topology: Topology, hardware: Hardware) -> Candidate:
    """Predict the time and memory of the layout that a run's settings choose."""
    config = request.config
    parameters = stage_parameters(model, topology, config)
    micro_batch = max(1, config.batching.budget // request.length)
    memory = memory_of(model, request, topology, config, micro_batch, parameters)
    return candidate(model, request, topology, config, micro_batch, hardware, parameters, memory)


def micro_batches(request: PlanRequest, topology: Topology, micro_batch: int) -> int:
    """Return the micro batches of a data parallel rank in a step."""
    count = math.ceil(math.ceil(request.global_batch / topology.data) / micro_batch)
    # The interleaved schedule works in rounds of one micro batch for each stage.
    return math.ceil(count / topology.pipeline) * topology.pipeline if topology.virtual_pipeline > 1 else count


def stage_parameters(model: PlannedModel, topology: Topology, config: TrainerConfig) -> Parameters:
    """Return the parameters of a layout."""
    info, sizes = model.info, model.sizes
    parameters = stages(
        info.tensors,
        topology,
        len(sizes.with_experts),
        sizes.tied,
        prediction_head=sizes.prediction_head,
        tensors=model.layer_tensors,
        lora=config.lora,
        adapted_tower=info.architecture.images if config.vision_tower == "train" else None,
    )
    return stage_groups(parameters, sizes), [stage.trained(config.vision_tower) for stage in parameters]


def step_work(
    model: PlannedModel,
    config: TrainerConfig,
    topology: Topology,
    parameters: Sequence[StageParameters],
    tokens: int,
    length: int,
    micro_batches: int,
) -> StepWork:
    """Describe a step of a run for :func:`megascend.apps.plan.step.step_time`."""
    adapter = 0
    if config.lora is not None:
        adapter = max(int(stage.adapter.factors) for stage in parameters)
    return StepWork(
        tokens,
        length,
        micro_batches,
        config.recompute,
        adapter,
        0 if config.lora is None else config.lora.rank,
        adapted_layers(model, config),
        config.optimizer.overlap_grad_reduce and config.lora is None,
        config.optimizer.overlap_param_gather and config.lora is None,
        config.optimizer.distributed,
        config.optimizer.offloaded_share,
        model.execution,
    )


def adapted_layers(model: PlannedModel, config: TrainerConfig) -> frozenset[str]:
    """Return the kinds of layers that the run's adapter acts on."""
    lora = config.lora
    if lora is None or lora.targets == "all-linear":
        return ALL_LAYERS
    names = [name for name, header in model.info.tensors.items() if is_target(name, header.shape, lora)]
    kinds = {"experts" if ".experts." in name else "mlp" if ".mlp." in name else "attention" for name in names}
    return frozenset(kinds)


def _settings(
    request: PlanRequest, parallel: Parallel, recompute: Recompute, tokens: int, *, overlapped: bool
) -> TrainerConfig:
    config = request.config
    changed: dict[str, Any] = {
        "parallel": parallel.model_copy(update={"context_algorithm": config.parallel.context_algorithm}),
        "recompute": recompute,
        "batching": config.batching.with_budget(tokens),
    }
    if config.lora is None:
        changed["optimizer"] = config.optimizer.model_copy(
            update={"overlap_grad_reduce": overlapped, "overlap_param_gather": overlapped}
        )
    return config.model_copy(update=changed)


def _micro_batches(request: PlanRequest, topology: Topology) -> Iterator[int]:
    """Yield numbers of samples of a micro batch: powers of two up to those of a replica."""
    samples, size = math.ceil(request.global_batch / topology.data), 1
    while size <= samples and (size == 1 or size * request.length // topology.context <= MOST_MICRO_BATCH):
        yield size
        size *= 2


def _recomputations(model: PlannedModel) -> Iterator[Recompute]:
    """Yield what may be recomputed, nothing first, then everything; modules that the model lacks are left out."""
    for recompute in (RECOMPUTE[0], RECOMPUTE[-1], *RECOMPUTE[1:-1]):
        needs_experts = {"moe", "moe_act"} & set(recompute.modules)
        dense_only = {"mlp"} & set(recompute.modules)
        if recompute.granularity == "selective":
            if needs_experts and not any(model.sizes.with_experts):
                continue
            if dense_only and all(model.sizes.with_experts):
                continue
        yield recompute


def _overlaps(model: PlannedModel, request: PlanRequest, topology: Topology) -> tuple[bool, ...]:
    """Check whether reductions may overlap with the passes: not for adapters, and not with grouped experts."""
    if request.config.lora is not None or topology.data * topology.context == 1 or any(model.sizes.with_experts):
        return (False,)
    return (False, True)


def _powers(limit: int) -> list[int]:
    return [2**power for power in range(limit.bit_length()) if 2**power <= limit]


def _divisors(count: int, limit: int) -> list[int]:
    return [size for size in range(1, min(count, limit) + 1) if count % size == 0]


# --- losses of a layout ---


def difference(best: Candidate, other: Candidate) -> list[tuple[str, float]]:
    """Return the parts of a step in which two layouts differ, in seconds that the second takes longer, largest first."""
    names = {**best.time.parts, **other.time.parts}
    changes = [(name, other.time.parts.get(name, 0.0) - best.time.parts.get(name, 0.0)) for name in names]
    return sorted((change for change in changes if change[1]), key=lambda change: -abs(change[1]))
