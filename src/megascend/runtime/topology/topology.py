"""Rank layout: pure arithmetic from (world size, parallel sizes) to every rank's coordinates in Megatron's grids.

Megatron-Core lays the ranks out twice (``parallel_state.initialize_model_parallel``, order ``tp-cp-ep-dp-pp``):

- the **attention grid** (everything except experts): tensor, context, data, pipeline; tensor varies fastest;
- the **expert grid**: expert tensor, expert, expert data, pipeline; expert tensor varies fastest.

Both cover the same ranks and agree on the pipeline axis; the routes of exported weights (:func:`route`) follow from them. What
Megatron-Core requires of a layout (``parallel_state``, ``ModelParallelConfig``, ``TransformerConfig``, ``Attention`` and
``MoELayer`` of megatron-core 0.15.3 and 0.16.1; where the two differ, the stricter one) is checked here, and messages name the
setting to change. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Literal

from megascend.config import ContextAlgorithm, Parallel
from megascend.errors import ProcessGroupError, TopologyError
from megascend.runtime.topology.model_shape import ModelShape

# Fastest axis first, as in Megatron's order string.
ATTENTION_AXES = ("tensor", "context", "data", "pipeline")
EXPERT_AXES = ("expert_tensor", "expert", "expert_data", "pipeline")

Receivers = Literal["all", "main"] | Collection[int]
"""Ranks that receive exported weights: all, the main rank (0), or those listed."""


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of a rank on every axis, from 0. ``pipeline`` is common to the attention and the expert grid."""

    rank: int
    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


@dataclass(frozen=True)
class Topology:
    """A validated layout, built by :func:`plan`; sizes are numbers of ranks, on both grids.

    Attributes:
        virtual_pipeline: model chunks of one pipeline rank.
        data: world size divided by the other axes of the attention grid.
        expert_data: the same for the expert grid; ranks with the same experts.
        sequence_parallel: activations between tensor parallel regions are split along the sequence.
        context_algorithm: algorithm by which context parallel ranks exchange keys and values.
        is_moe: the model has experts.
        chunk_layers: decoder layers of each model chunk, in the order in which a token passes them: chunk ``c`` of stage ``s`` is
            number ``c * pipeline + s``. Empty without a model.
        notes: a sentence for every automatic decision.
    """

    world_size: int
    tensor: int
    context: int
    data: int
    pipeline: int
    virtual_pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int
    sequence_parallel: bool
    context_algorithm: ContextAlgorithm = "ring"
    is_moe: bool = False
    chunk_layers: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def sequence_shards(self) -> int:
        """Return the ranks that divide the tokens between tensor parallel regions: 1 without sequence parallelism."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def is_uneven(self) -> bool:
        """Return True if chunks differ in their number of layers."""
        return len(set(self.chunk_layers)) > 1

    def layers_of(self, stage: int, layers: int) -> list[range]:
        """Return the layers of each chunk of a pipeline stage; ``layers``: the model's, for a topology without a model."""
        chunks = self.pipeline * self.virtual_pipeline
        sizes = self.chunk_layers or (max(1, layers // chunks),) * chunks
        ends = list(accumulate(sizes))
        return [range(ends[index] - sizes[index], ends[index]) for index in range(stage, chunks, self.pipeline)]

    def size(self, axis: str) -> int:
        """Return the number of ranks along one axis."""
        if axis not in (*ATTENTION_AXES, *EXPERT_AXES):
            raise TopologyError(
                f"unknown axis {axis!r}; known: {', '.join(dict.fromkeys(ATTENTION_AXES + EXPERT_AXES))}"
            )
        return getattr(self, axis)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of global rank ``rank``."""
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} is outside the world of {self.world_size} ranks")
        coordinates: dict[str, int] = {}
        for axes in (ATTENTION_AXES, EXPERT_AXES):
            rest = rank  # mixed radix, fastest axis first; both grids give the same pipeline coordinate
            for axis in axes:
                rest, coordinates[axis] = divmod(rest, self.size(axis))
        return Coordinates(rank=rank, **coordinates)

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ along ``axes`` of one grid and agree on its others; without axes, one per rank.

        Groups are ordered by first rank; ranks ascend, which is Megatron's order.
        """
        grid = self._grid(axes)
        starts = self._offsets(grid, [axis for axis in grid if axis not in axes])
        members = self._offsets(grid, axes)
        return [[first + offset for offset in members] for first in starts]

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """Return the group of :meth:`groups` that contains ``rank``, in time proportional to its size."""
        coordinates = self.coordinates(rank)
        grid = self._grid(axes)
        steps = self._steps(grid)
        first = rank - sum(getattr(coordinates, axis) * steps[axis] for axis in axes)
        return [first + offset for offset in self._offsets(grid, axes)]

    def _grid(self, axes: Collection[str]) -> tuple[str, ...]:
        """Return the grid that has all of ``axes``."""
        for axis in axes:
            self.size(axis)  # raises for an unknown axis
        grid = next((grid for grid in (ATTENTION_AXES, EXPERT_AXES) if set(axes) <= set(grid)), None)
        if grid is None:
            raise TopologyError(
                f"{' and '.join(axes)} are not axes of one grid: a group is in the attention grid "
                f"({', '.join(ATTENTION_AXES)}) or in the expert grid ({', '.join(EXPERT_AXES)})"
            )
        return grid

    def _steps(self, grid: tuple[str, ...]) -> dict[str, int]:
        """Return the distance in ranks between neighbours along each axis of a grid."""
        steps, step = {}, 1
        for axis in grid:
            steps[axis], step = step, step * self.size(axis)
        return steps

    def _offsets(self, grid: tuple[str, ...], axes: Collection[str]) -> list[int]:
        """Return the ranks, ascending, that differ from rank 0 along ``axes`` only."""
        steps, offsets = self._steps(grid), [0]
        for axis in grid:  # fastest first: each further axis repeats the offsets behind those before
            if axis in axes:
                offsets = [steps[axis] * index + offset for index in range(self.size(axis)) for offset in offsets]
        return offsets

    def describe(self) -> str:
        """Describe the layout in a few lines for a log."""
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        lines = [
            f"{ranks} = tensor {self.tensor} x context {self.context} x data {self.data} "
            f"x pipeline {self.pipeline}"
            + (f" ({self.virtual_pipeline} chunks each)" if self.virtual_pipeline > 1 else "")
            + (", sequence parallel" if self.sequence_parallel else "")
        ]
        if self.is_uneven:
            stages = (self.layers_of(stage, sum(self.chunk_layers)) for stage in range(self.pipeline))
            lines.append(f"layers of each stage: {', '.join(_sizes(chunks) for chunks in stages)}")
        if self.is_moe:
            lines.append(
                f"experts: expert tensor {self.expert_tensor} x expert {self.expert} x data {self.expert_data} "
                f"x pipeline {self.pipeline}"
            )
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def plan(parallel: Parallel, world_size: int, model: ModelShape | None = None) -> Topology:
    """Resolve ``parallel`` for ``world_size`` ranks and check it against everything Megatron-Core requires.

    Without ``model`` only model-independent requirements are checked, and the model counts as a mixture of experts
    if ``parallel`` sets an expert axis.
    """
    # A guess, so that layouts can be checked without a checkpoint.
    is_moe = model.is_moe if model else parallel.expert > 1 or parallel.expert_tensor is not None
    expert_tensor = parallel.expert_tensor or parallel.tensor
    # The grid first: messages about the model assume that the sizes are possible at all.
    check_grid(parallel, expert_tensor, world_size)
    if model:
        check_model(parallel, expert_tensor, model)
    sequence_parallel, notes = resolve_sequence_parallel(parallel, is_moe)
    return Topology(
        world_size=world_size,
        tensor=parallel.tensor,
        context=parallel.context,
        data=world_size // (parallel.tensor * parallel.context * parallel.pipeline),
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        expert_tensor=expert_tensor,
        expert=parallel.expert,
        expert_data=world_size // (expert_tensor * parallel.expert * parallel.pipeline),
        sequence_parallel=sequence_parallel,
        context_algorithm=parallel.context_algorithm,
        is_moe=is_moe,
        chunk_layers=() if model is None else chunk_layers(parallel, model),
        notes=tuple(notes),
    )


def check_grid(parallel: Parallel, expert_tensor: int, world_size: int) -> None:
    """Check requirements that do not depend on the model."""
    p = parallel
    if world_size < 1:
        raise TopologyError(f"the world has {world_size} ranks; there must be at least one")
    attention = p.tensor * p.pipeline * p.context
    if world_size % attention:
        raise TopologyError(
            f"world size {world_size} is not a multiple of parallel.tensor={p.tensor} x parallel.pipeline={p.pipeline} x "
            f"parallel.context={p.context} = {attention}; start {_nearby(world_size, attention)} processes"
        )
    experts = expert_tensor * p.expert * p.pipeline
    # A second check, because the expert grid divides the same world by other sizes.
    if world_size % experts:
        raise TopologyError(
            f"world size {world_size} is not a multiple of parallel.expert_tensor={expert_tensor} x parallel.expert={p.expert} "
            f"x parallel.pipeline={p.pipeline} = {experts}; start {_nearby(world_size, experts)} processes"
            + (" (expert_tensor defaults to tensor)" if p.expert_tensor is None and expert_tensor > 1 else "")
        )
    if p.virtual_pipeline > 1 and p.pipeline == 1:
        raise TopologyError(
            f"parallel.virtual_pipeline={p.virtual_pipeline} interleaves the chunks of pipeline ranks, but "
            "parallel.pipeline=1; set pipeline to 2 or more, or virtual_pipeline to 1"
        )
    if p.pipeline_layout is not None:
        chunks = parse_pipeline_layout(p.pipeline_layout)
        if len(chunks) != p.pipeline * p.virtual_pipeline:
            raise TopologyError(
                f"parallel.pipeline_layout={p.pipeline_layout!r} has {len(chunks)} chunks, but parallel.pipeline={p.pipeline} x "
                f"parallel.virtual_pipeline={p.virtual_pipeline} = {p.pipeline * p.virtual_pipeline}: separate as many by |"
            )
    if p.expert == 1 and expert_tensor != p.tensor:
        # Megatron marks expert weights for the expert data parallel group only if EP > 1; else their gradients are
        # reduced with those of all other weights, over DP x CP, whose ranks hold the same expert shards only if
        # ETP == TP. Smaller ETP: replicas within the TP group are never summed. Larger: different shards are.
        raise TopologyError(
            f"parallel.expert_tensor={expert_tensor} differs from parallel.tensor={p.tensor} while parallel.expert=1: gradients "
            f"would be wrong; set expert_tensor to {p.tensor}, or expert to 2"
        )


def check_model(parallel: Parallel, expert_tensor: int, model: ModelShape) -> None:
    """Check the requirements of the model's sizes."""
    p = parallel
    _check_divides("parallel.tensor", p.tensor, model.num_heads, "attention heads")
    _check_divides(
        "parallel.tensor",
        p.tensor,
        model.num_query_groups,
        "query groups (key/value heads)",
        common=(model.num_heads,),
    )
    _check_divides("parallel.tensor", p.tensor, model.ffn_hidden_size, "columns of the MLP (intermediate_size)")
    _check_divides("parallel.tensor", p.tensor, model.shared_expert_ffn_hidden_size, "columns of the shared experts")
    chunk_layers(p, model)
    if not model.is_moe:
        for name, value, default in (("expert", p.expert, 1), ("expert_tensor", p.expert_tensor, None)):
            if value is not default and value != default:
                raise TopologyError(
                    f"parallel.{name}={value}, but the model has no experts; leave {name} at its default"
                )
        return
    if model.expert_bias and expert_tensor > 1:
        raise TopologyError(
            f"parallel.expert_tensor={expert_tensor}{'' if p.expert_tensor else ' (it defaults to tensor)'}: Megatron-Core does "
            "not divide experts that have biases; set expert_tensor to 1, and expert to 2 or more if tensor is"
        )
    _check_divides("parallel.expert", p.expert, model.num_experts, "experts")
    _check_divides("parallel.expert_tensor", expert_tensor, model.moe_ffn_hidden_size, "columns of an expert's MLP")


PIPELINE_LAYOUT = re.compile(r"(?:\((?P<group>[^()]+)\)|(?P<part>[EtmL|]))(?:\*(?P<times>\d{1,3}))?")
"""An item of ``parallel.pipeline_layout``: a part of a model, the end of a chunk, or a group of them, and how often."""


def parse_pipeline_layout(text: str) -> list[str]:
    """Return the parts of each chunk of ``parallel.pipeline_layout``: ``Et|(tt|)*2tL`` has the chunks Et, tt, tt and tL.

    The notation is that of Megatron-Core's ``pipeline_model_parallel_layout``: E embedding, t decoder layer, m head for
    multi-token prediction, L output layer; ``x*n`` and ``(...)*n`` repeat, and commas are ignored.
    """
    setting = f"parallel.pipeline_layout={text!r}"

    def expanded(text: str) -> str:
        position, parts = 0, []
        while position < len(text):
            item = PIPELINE_LAYOUT.match(text, position)
            if item is None:
                raise TopologyError(
                    f"{setting}: {text[position:]!r} is not a part of a layout: E (embedding), t (layer), m (multi-token "
                    "prediction), L (output), | (end of a chunk), t*3, (tt|)*3"
                )
            part = expanded(item["group"]) if item["group"] else item["part"]
            parts.append(part * int(item["times"] or 1))
            position = item.end()
        return "".join(parts)

    chunks = expanded("".join(text.replace(",", "").split())).split("|")
    for number, chunk in enumerate(chunks, start=1):
        first, last = number == 1, number == len(chunks)
        # Megatron-Core can build the head on another stage than the last, where mcore-bridge reads no weights for it.
        order = ("E" if first else "") + "t" * chunk.count("t") + ("m?L" if last else "")
        if not re.fullmatch(order, chunk):
            raise TopologyError(
                f"{setting}: chunk {number} of {len(chunks)} is {chunk!r}; the first begins with E, the last ends with L, or mL "
                "if that head is trained, others have only t"
            )
        if not (first or last or chunk):
            raise TopologyError(
                f"{setting}: chunk {number} of {len(chunks)} is empty; only the first and the last one may have no layers"
            )
    return chunks


def chunk_layers(parallel: Parallel, model: ModelShape) -> tuple[int, ...]:
    """Return the decoder layers of each model chunk, by ``pipeline_layout`` or of equal number."""
    p, layers = parallel, model.num_layers
    if p.pipeline_layout is None:
        stages = p.pipeline * p.virtual_pipeline
        if layers % stages:
            product = "the product must be" if p.virtual_pipeline > 1 else "use"
            raise TopologyError(
                f"{layers} layers cannot be divided evenly over parallel.pipeline={p.pipeline}"
                + (f" x parallel.virtual_pipeline={p.virtual_pipeline} = {stages}" if p.virtual_pipeline > 1 else "")
                + f" stages; {product} {_abbreviated(_divisors(layers))}, or divide them by parallel.pipeline_layout"
            )
        return (layers // stages,) * stages
    chunks = parse_pipeline_layout(p.pipeline_layout)
    sizes = tuple(chunk.count("t") for chunk in chunks)
    if sum(sizes) != layers:
        raise TopologyError(
            f"parallel.pipeline_layout={p.pipeline_layout!r} has {sum(sizes)} layers (t), but the model has {layers}"
        )
    if chunks[-1] == "mL":
        # There mcore-bridge makes the head like the last layer, and Megatron-Core builds the model's last norm.
        raise TopologyError(
            f"parallel.pipeline_layout={p.pipeline_layout!r}: the last chunk, 'mL', has a head for multi-token prediction and no "
            "layer; move one there: tmL"
        )
    has_head = "m" in chunks[-1]
    if has_head != model.prediction_head:
        raise TopologyError(
            f"parallel.pipeline_layout={p.pipeline_layout!r} has "
            + (
                "a head for multi-token prediction (m), which is trained with mtp: train only; leave m out"
                if has_head
                else "no place for the head for multi-token prediction, which mtp: train trains; end it with mL"
            )
        )
    return sizes


def format_pipeline_layout(sizes: Sequence[int], *, prediction_head: bool) -> str:
    """Write ``parallel.pipeline_layout`` for chunks of these numbers of layers; equal neighbours are written once."""
    chunks = ["t" * size if size <= SPELT_LAYERS else f"t*{size}" for size in sizes]
    text = f"E{chunks[0]}|"
    for chunk, equal in groupby(chunks[1:-1]):
        count = len(list(equal))
        text += f"({chunk}|)*{count}" if count > 1 else f"{chunk}|"
    return f"{text}{chunks[-1]}{'m' if prediction_head else ''}L"


SPELT_LAYERS = 3
"""Layers of a chunk that are spelt out in a layout."""


def resolve_sequence_parallel(parallel: Parallel, is_moe: bool) -> tuple[bool, list[str]]:
    """Return whether sequence parallelism is on, and notes if that differs from the setting."""
    if parallel.tensor == 1:
        if parallel.sequence:
            return False, ["parallel.sequence has nothing to divide at parallel.tensor=1: sequence parallelism is off"]
        return False, []
    if is_moe and parallel.sequence is False:
        raise TopologyError(
            f"parallel.sequence=false with experts and parallel.tensor={parallel.tensor}: Megatron-Core trains them only with "
            "sequence parallelism; remove the setting"
        )
    if is_moe and parallel.sequence is None:
        return True, [f"sequence parallelism is on: a model with experts needs it at parallel.tensor={parallel.tensor}"]
    return bool(parallel.sequence), []


def _check_divides(setting: str, value: int, count: int | None, unit: str, common: tuple[int, ...] = ()) -> None:
    if count is not None and count % value:
        usable = [size for size in _divisors(count) if all(total % size == 0 for total in common)]
        raise TopologyError(f"{setting}={value} does not divide the {count} {unit}; use {_abbreviated(usable)}")


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def _abbreviated(sizes: list[int]) -> str:
    texts = [str(size) for size in sizes[:8]]
    if len(sizes) > 8:
        return ", ".join(texts) + ", ..."
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _sizes(chunks: Iterable[range]) -> str:
    return "+".join(str(len(chunk)) for chunk in chunks)


def _nearby(world_size: int, multiple: int) -> str:
    below = world_size // multiple * multiple
    return f"{below} or {below + multiple}" if below else str(multiple)


GROUP_AXES: dict[str, tuple[str, ...]] = {
    "world": ATTENTION_AXES,
    "tp": ("tensor",),
    "pp": ("pipeline",),
    "cp": ("context",),
    "dp": ("data",),
    # Ranks that hold the same dense weights: gradients are reduced over them.
    "dp_cp": ("data", "context"),
    "tp_cp": ("tensor", "context"),
    "tp_dp_cp": ("tensor", "data", "context"),
    # Model parallel: the ranks that hold one replica of the dense weights.
    "mp": ("tensor", "pipeline"),
    "ep": ("expert",),
    "etp": ("expert_tensor",),
    "etp_ep": ("expert_tensor", "expert"),
    "edp": ("expert_data",),
}
"""Name of every group, and the axes of the topology it spans (``edp``: expert data parallel)."""


def axes_of(name: str) -> tuple[str, ...]:
    """Return the axes of group ``name``."""
    if name not in GROUP_AXES:
        raise ProcessGroupError(f"unknown process group {name!r}; known: {', '.join(GROUP_AXES)}")
    return GROUP_AXES[name]


def rank_lists(topology: Topology, names: Iterable[str] = tuple(GROUP_AXES)) -> dict[tuple[int, ...], str]:
    """Return every distinct group of two or more ranks with its first name, in the order in which all ranks create them."""
    names_by_ranks: dict[tuple[int, ...], str] = {}
    for name in names:
        for ranks in topology.groups(*axes_of(name)):
            # Groups of one rank need no communicator.
            if len(ranks) > 1:
                names_by_ranks.setdefault(tuple(ranks), name)
    return names_by_ranks


# --- routes of weights ---
#
# A parameter is on one pipeline stage (an expert's: on one expert rank of one stage), split over the tensor parallel ranks
# there. Its shards are sent to the receiver's stage, each over its own pipeline group, and only assembled there.


@dataclass(frozen=True)
class Route:
    """Communication of one rank when a parameter is sent to its receivers; global ranks, ascending.

    Attributes:
        across: ranks with this rank's shard of some layer (or expert): one of them has it, others may need it.
        need_shard: ranks of ``across`` that need a shard of a split parameter: receivers, and ranks that assemble for one.
        need_whole: ranks of ``across`` that need an unsplit parameter: receivers.
        parts: this rank's tensor parallel group, in the order of the shards.
        receivers: ranks of ``parts`` that receive.
    """

    across: tuple[int, ...]
    need_shard: tuple[int, ...]
    need_whole: tuple[int, ...]
    parts: tuple[int, ...]
    receivers: tuple[int, ...]


def ranks_of(receivers: Receivers, topology: Topology) -> frozenset[int]:
    """Resolve ``receivers`` to global ranks: all, the main rank (0), or those listed."""
    if receivers == "all":
        return frozenset(range(topology.world_size))
    if receivers == "main":
        return frozenset([0])
    ranks = frozenset(receivers) if not isinstance(receivers, str) else frozenset()
    if not ranks or not all(isinstance(rank, int) and 0 <= rank < topology.world_size for rank in ranks):
        raise TopologyError(
            f'receivers must be "all", "main" or ranks of the world of {topology.world_size}, got {receivers!r}'
        )
    return ranks


def route(topology: Topology, rank: int, receivers: Collection[int], *, expert: bool) -> Route:
    """Build the route of ``rank``, for parameters of experts or for all others."""
    across_axes = ("expert", "pipeline") if expert else ("pipeline",)
    part_axis = "expert_tensor" if expert else "tensor"
    across = topology.group_of(rank, *across_axes)
    parts = topology.group_of(rank, part_axis)
    receiving = set(receivers)
    return Route(
        tuple(across),
        # A peer needs the shard if anybody in its tensor parallel group receives: the whole group assembles for that rank.
        tuple(peer for peer in across if receiving.intersection(topology.group_of(peer, part_axis))),
        tuple(peer for peer in across if peer in receiving),
        tuple(parts),
        tuple(peer for peer in parts if peer in receiving),
    )


def participants(topology: Topology, receivers: Collection[int]) -> frozenset[int]:
    """Return the ranks that must take part for ``receivers`` to get every parameter; replicas need not.

    A rank joins all collectives of its pipeline (and experts') groups or none, so all ranks that share a group are included.
    """
    grids: list[tuple[str, ...]] = [("tensor", "pipeline")]
    if topology.is_moe:
        grids.append(("expert_tensor", "expert", "pipeline"))
    groups = [frozenset(ranks) for axes in grids for ranks in topology.groups(*axes)]
    members = frozenset(receivers)
    while True:  # groups of the two grids overlap, so a group may pull in another
        extended = members.union(*(group for group in groups if group & members))
        if extended == members:
            return members
        members = extended
