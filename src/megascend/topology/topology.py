"""Which rank does what: pure arithmetic from (world size, parallel sizes) to every rank's place in Megatron's grids.

Megatron-Core lays the ranks out twice (``parallel_state.initialize_model_parallel``, order ``tp-cp-ep-dp-pp``):

- the **attention grid** (all that is not an expert): tensor, context, data, pipeline; tensor varies fastest;
- the **expert grid**: expert tensor, expert, expert data, pipeline; expert tensor varies fastest.

Both cover the same ranks and agree on the pipeline axis. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megascend.config import ContextAlgorithm, Parallel
from megascend.errors import TopologyError
from megascend.huggingface.model_shape import ModelShape
from megascend.topology.constraints import check_grid, check_model, resolve_sequence_parallel

ATTENTION_AXES = ("tensor", "context", "data", "pipeline")
EXPERT_AXES = ("expert_tensor", "expert", "expert_data", "pipeline")

__all__ = [
    "ATTENTION_AXES",
    "EXPERT_AXES",
    "Coordinates",
    "Topology",
    "check_sequence_length",
    "length_multiple",
    "plan",
]


@dataclass(frozen=True)
class Coordinates:
    """One rank's place on every axis, each from 0. ``pipeline`` is common to the attention and the expert grid."""

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
    """A layout that has been checked. Made by :func:`plan`; sizes are numbers of ranks, on both grids.

    Attributes:
        virtual_pipeline: model chunks of one pipeline rank.
        data: what the other axes of the attention grid leave of the world size.
        expert_data: the same for the expert grid; ranks that hold the same experts.
        sequence_parallel: whether activations between tensor parallel regions are split along the sequence.
        context_algorithm: how context parallel ranks exchange keys and values.
        is_moe: whether the model has experts.
        vocab_size: of the model, without padding; None if the model was not given.
        notes: one sentence for everything that was decided automatically.
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
    vocab_size: int | None = None
    notes: tuple[str, ...] = ()

    def size(self, axis: str) -> int:
        """Number of ranks along one axis.

        Raises:
            TopologyError: there is no such axis.
        """
        if axis not in (*ATTENTION_AXES, *EXPERT_AXES):
            raise TopologyError(f"no axis {axis!r}; there are {', '.join(dict.fromkeys(ATTENTION_AXES + EXPERT_AXES))}")
        return getattr(self, axis)

    def coordinates(self, rank: int) -> Coordinates:
        """The place of global rank ``rank``.

        Raises:
            TopologyError: the rank is outside the world.
        """
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} is outside the world of {self.world_size} ranks")
        places: dict[str, int] = {}
        for axes in (ATTENTION_AXES, EXPERT_AXES):
            rest = rank
            for axis in axes:
                rest, places[axis] = divmod(rest, self.size(axis))
        return Coordinates(rank=rank, **places)

    def groups(self, *axes: str) -> list[list[int]]:
        """The ranks that communicate along ``axes``: those that differ there and agree on the grid's other axes.

        Args:
            axes: axes of one grid, in any order. None at all gives one group per rank.

        Returns:
            Every group of the world, ordered by first rank; ranks ascend, which is Megatron's order.

        Raises:
            TopologyError: an axis is not known, or the axes are of different grids.
        """
        for axis in axes:
            self.size(axis)
        grid = next((grid for grid in (ATTENTION_AXES, EXPERT_AXES) if set(axes) <= set(grid)), None)
        if grid is None:
            raise TopologyError(
                f"{' and '.join(axes)} are not axes of one grid: a group lies in the attention grid "
                f"({', '.join(ATTENTION_AXES)}) or in the expert grid ({', '.join(EXPERT_AXES)})"
            )
        others = [axis for axis in grid if axis not in axes]
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            members.setdefault(tuple(getattr(place, axis) for axis in others), []).append(rank)
        return list(members.values())

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """The one group of :meth:`groups` that holds ``rank``."""
        self.coordinates(rank)
        return next(group for group in self.groups(*axes) if rank in group)

    def padded_vocab(self, divisor: int = 1) -> int:
        """Vocabulary size rounded up so that every tensor rank holds the same multiple of ``divisor`` rows.

        Raises:
            TopologyError: the layout was planned without a model.
        """
        if self.vocab_size is None:
            raise TopologyError("padded_vocab needs the model: plan(parallel, world_size, model)")
        return _round_up(self.vocab_size, divisor * self.tensor)

    def describe(self) -> str:
        """The layout in a few lines for a log."""
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        lines = [
            f"{ranks} = tensor {self.tensor} x context {self.context} x data {self.data} "
            f"x pipeline {self.pipeline}"
            + (f" ({self.virtual_pipeline} chunks each)" if self.virtual_pipeline > 1 else "")
            + (", sequence parallel" if self.sequence_parallel else "")
        ]
        if self.is_moe:
            lines.append(
                f"experts: expert tensor {self.expert_tensor} x expert {self.expert} x data {self.expert_data} "
                f"x pipeline {self.pipeline}"
            )
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def plan(parallel: Parallel, world_size: int, model: ModelShape | None = None) -> Topology:
    """Resolve ``parallel`` for ``world_size`` ranks and check it against everything Megatron-Core requires.

    Without ``model`` only what does not depend on the model is checked, and the model counts as a mixture of experts
    if ``parallel`` sets an expert axis.

    Raises:
        TopologyError: the layout cannot work, or Megatron would compute wrong gradients with it. The message names the
            value, the limit and the setting to change.
    """
    is_moe = model.is_moe if model else parallel.expert > 1 or parallel.expert_tensor is not None
    expert_tensor = parallel.expert_tensor or parallel.tensor
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
        vocab_size=model.vocab_size if model else None,
        notes=tuple(notes),
    )


def length_multiple(topology: Topology) -> int:
    """What a padded sequence length must be a multiple of, in tokens.

    Context parallelism deals every rank two chunks of equal length, one from each end (so that causal work is even):
    2 x CP. Sequence parallelism divides what a context rank holds over the tensor ranks: x TP.
    """
    chunks = 2 * topology.context if topology.context > 1 else 1
    return chunks * (topology.tensor if topology.sequence_parallel else 1)


def check_sequence_length(length: int, topology: Topology) -> None:
    """Refuse a padded sequence length (tokens) that the ranks cannot divide.

    Raises:
        TopologyError: with the multiple, the settings it comes from, and the next length that fits.
    """
    multiple = length_multiple(topology)
    if length < 1 or length % multiple:
        parts = []
        if topology.context > 1:
            parts.append(f"2 x parallel.context={topology.context}")
        if topology.sequence_parallel:
            parts.append(f"parallel.tensor={topology.tensor} with sequence parallelism")
        reason = f" ({' times '.join(parts)})" if parts else ""
        raise TopologyError(
            f"sequence length {length} is not a positive multiple of {multiple}{reason}; "
            f"pad to {_round_up(max(length, 1), multiple)}"
        )


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple
