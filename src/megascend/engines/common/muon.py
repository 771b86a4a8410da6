"""Muon for matrices that are divided over several ranks: each is assembled on one rank, orthogonalised there, and sent back.

A matrix is one of Hugging Face's: q, k and v, gate and up, and every expert are separate ones, however an engine fuses, stacks
and divides them. Ranks that share one, by tensor parallelism, by ZeRO-1 or by FSDP, divide the work: every matrix has an owner
among them. Momentum is local to the slices, like Adam's moments, and checkpoints store it in the same way.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megascend import config
from megascend.config import Precision
from megascend.engines.common.weight_settings import MainParameter, WeightSettings
from megascend.errors import ConfigError
from megascend.models.checkpoint_files.hidden_matrices import ROUND_ELEMENTS, has_fused_halves
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.runtime.distributed.objects import gather_objects
from megascend.runtime.distributed.process_groups import ProcessGroups

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic, by Keller Jordan: the steepest at 0 that keeps singular values between about 0.7 and 1.2."""
EPSILON = 1e-7


class Matrix(NamedTuple):
    """A matrix that is orthogonalised: of a Hugging Face weight, of one of its experts, or the half of either."""

    weight: str
    expert: int
    half: int


class Tile(NamedTuple):
    """A rectangle of a matrix, by its first row and column and its size."""

    matrix: Matrix
    row: int
    column: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class MatrixPiece:
    """A tile in a main parameter of this rank.

    Attributes:
        parameter: number of the parameter.
        start: its first element, from the parameter's first.
        strides: of rows and columns, in elements.
    """

    tile: Tile
    parameter: int
    start: int
    strides: tuple[int, int]

    def view(self, values: Tensor) -> Tensor:
        """Return the piece as a view of ``values``, a contiguous tensor like the parameter."""
        size = (self.tile.rows, self.tile.columns)
        return values.as_strided(size, self.strides, values.storage_offset() + self.start)


@dataclass(frozen=True)
class Assignment:
    """A matrix, its owner, and where its pieces come from and go to.

    Attributes:
        sources: for each piece, the rank that sends it.
        receivers: for each piece, the ranks that hold it: replicas receive the same update.
    """

    matrix: Matrix
    shape: tuple[int, int]
    owner: int
    sources: dict[Tile, int]
    receivers: dict[Tile, list[int]]


@dataclass
class _Exchange:
    """Pieces that this rank sends to, and receives from, every other rank in a round, in an order that both know."""

    outgoing: dict[int, list[Tile]] = field(default_factory=lambda: defaultdict(list))
    incoming: dict[int, list[Tile]] = field(default_factory=lambda: defaultdict(list))

    def add(self, tile: Tile, source: int, target: int, rank: int) -> None:
        """Add a transfer, if ``rank`` takes part in it."""
        if source == rank:
            self.outgoing[target].append(tile)
        if target == rank:
            self.incoming[source].append(tile)


class MuonOptimizer:
    """Muon for the main parameters of this rank. Collective over all ranks, also those that have none.

    Args:
        parameters: main parameters with their settings.
        settings: ``optimizer.muon`` of the run.
        info: description of the checkpoint, with the shapes of the matrices.
        precision: of the model; products and exchanges are in fp32 for fp32, else in bf16.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[MainParameter, WeightSettings]],
        settings: config.Muon,
        groups: ProcessGroups,
        info: ModelInfo,
        precision: Precision,
    ) -> None:
        self._settings, self._groups = settings, groups
        # Also for fp16, which has too few exponents for the products of small numbers.
        self._dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        self._mains = [parameter.main.detach() for parameter, _ in parameters]
        self._by_weight = [settings for _, settings in parameters]
        shapes = {name: header.shape for name, header in info.tensors.items()}
        self._pieces: dict[Tile, MatrixPiece] = {}
        for number, (parameter, _) in enumerate(parameters):
            for piece in _pieces(number, parameter, shapes):
                self._pieces[piece.tile] = piece
        tiles = gather_objects(list(self._pieces), "world", groups, "the matrices of Muon")
        self._rounds = plan(tiles, shapes)
        self.momentum = [torch.zeros_like(main) for main in self._mains]

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor | None], lr: float) -> None:
        """Update the main parameters in place.

        Args:
            grads: gradient of each parameter, which is overwritten; None counts as zeros: the momentum still moves it.
            lr: learning rate of the step.
        """
        updates = [self._update_momentum(number, grad) for number, grad in enumerate(grads)]
        for main, settings in zip(self._mains, self._by_weight, strict=True):
            main.mul_(1 - lr * settings.lr_scale * settings.weight_decay)
        with self._groups.monitor.phase("orthogonalisation"):
            for works in self._rounds:
                self._run(works, updates, lr)

    def _update_momentum(self, number: int, grad: Tensor | None) -> Tensor:
        """Add a gradient to its momentum; return the matrix to orthogonalise, in the gradient's memory."""
        beta, momentum = self._settings.momentum, self.momentum[number]
        grad = torch.zeros_like(momentum) if grad is None else grad.contiguous()
        momentum.lerp_(grad.view_as(momentum), 1 - beta)
        return grad.view_as(momentum).lerp_(momentum, beta) if self._settings.nesterov else momentum

    def _run(self, works: Sequence[Assignment], updates: Sequence[Tensor], lr: float) -> None:
        """Assemble the matrices of a round on their owners, orthogonalise them, and apply the updates."""
        rank, gathered, returned = self._groups.rank, _Exchange(), _Exchange()
        communicates = False
        for work in works:
            for tile, source in work.sources.items():
                gathered.add(tile, source, work.owner, rank)
                for receiver in work.receivers[tile]:
                    returned.add(tile, work.owner, receiver, rank)
                    communicates |= receiver != work.owner
                communicates |= source != work.owner
        # Like shapes in one batch: experts are many and small.
        batches: dict[tuple[int, int], list[Assignment]] = defaultdict(list)
        for work in works:
            if work.owner == rank:
                batches[work.shape].append(work)
        matrices: dict[Matrix, Tensor] = {}
        stacks: list[Tensor] = []
        for shape, batch in batches.items():
            stack = torch.empty((len(batch), *shape), dtype=self._dtype, device=self._groups.device)
            stacks.append(stack)
            matrices.update((work.matrix, stack[index]) for index, work in enumerate(batch))

        def in_update(tile: Tile) -> Tensor:
            piece = self._pieces[tile]
            return piece.view(updates[piece.parameter])

        for tile, values in self._exchange(gathered, in_update, communicates=communicates):
            _view(matrices[tile.matrix], tile).copy_(values)
        for stack in stacks:
            stack.copy_(orthogonalised(stack, self._settings.steps))

        def in_matrix(tile: Tile) -> Tensor:
            return _view(matrices[tile.matrix], tile)

        shapes = {work.matrix: work.shape for work in works}
        for tile, values in self._exchange(returned, in_matrix, communicates=communicates):
            piece = self._pieces[tile]
            main, settings = self._mains[piece.parameter], self._by_weight[piece.parameter]
            rate = lr * settings.lr_scale * update_scale(self._settings, *shapes[tile.matrix])
            piece.view(main).add_(values.to(main), alpha=-rate)

    def _exchange(
        self, exchange: _Exchange, values: Callable[[Tile], Tensor], *, communicates: bool
    ) -> Iterator[tuple[Tile, Tensor]]:
        """Yield the pieces that this rank receives, its own included; collective if any rank ``communicates``."""
        groups, rank = self._groups, self._groups.rank
        exchange.incoming.pop(rank, None)
        for tile in exchange.outgoing.pop(rank, ()):
            yield tile, values(tile)
        if not communicates:
            return
        ranks = range(groups.world_size)
        send_sizes = [sum(tile.size for tile in exchange.outgoing.get(peer, ())) for peer in ranks]
        receive_sizes = [sum(tile.size for tile in exchange.incoming.get(peer, ())) for peer in ranks]
        outgoing = torch.empty(sum(send_sizes), dtype=self._dtype, device=groups.device)
        start = 0
        for peer in ranks:
            for tile in exchange.outgoing.get(peer, ()):
                outgoing[start : start + tile.size].view(tile.rows, tile.columns).copy_(values(tile))
                start += tile.size
        incoming = torch.empty(sum(receive_sizes), dtype=self._dtype, device=groups.device)
        dist.all_to_all_single(incoming, outgoing, receive_sizes, send_sizes, group=groups.device_group("world"))
        start = 0
        for peer in ranks:
            for tile in exchange.incoming.get(peer, ()):
                yield tile, incoming[start : start + tile.size].view(tile.rows, tile.columns)
                start += tile.size


def _view(matrix: Tensor, tile: Tile) -> Tensor:
    return matrix[tile.row : tile.row + tile.rows, tile.column : tile.column + tile.columns]


def _pieces(number: int, parameter: MainParameter, shapes: Mapping[str, Sequence[int]]) -> Iterator[MatrixPiece]:
    """Cut a parameter's slices at the borders of matrices."""
    main = parameter.main
    assert main.is_contiguous(), "pieces are addressed by their first element"
    for weight, offsets, values in parameter.slices:
        *lead, row, column = offsets
        stack = values if lead else values[None]
        border = shapes[weight][-2] // 2 if has_fused_halves(weight) else shapes[weight][-2]
        for index, matrix in enumerate(stack):
            first = row
            while first < row + matrix.shape[0]:
                half = first // border
                last = min((half + 1) * border, row + matrix.shape[0])
                part = matrix[first - row : last - row]
                tile = Tile(
                    Matrix(weight, (lead[0] if lead else 0) + index, half), first - half * border, column, *part.shape
                )
                yield MatrixPiece(
                    tile, number, int(part.storage_offset() - main.storage_offset()), (part.stride(0), part.stride(1))
                )
                first = last


def plan(tiles: Sequence[Sequence[Tile]], shapes: Mapping[str, Sequence[int]]) -> list[list[Assignment]]:
    """Give every matrix an owner among the ranks that hold a piece of it, and divide the work into rounds. Pure.

    Args:
        tiles: of every rank, the tiles of its pieces.
        shapes: shapes of the weights.
    """
    holders: dict[Matrix, dict[Tile, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, local in enumerate(tiles):
        for tile in local:
            holders[tile.matrix][tile].append(rank)
    loads = [0.0] * len(tiles)
    rounds: list[list[Assignment]] = []
    assembled: list[list[int]] = []  # elements by round and owner
    next_round = [0] * len(tiles)
    for matrix, receivers in sorted(holders.items()):
        rows, columns = shapes[matrix.weight][-2:]
        rows //= 2 if has_fused_halves(matrix.weight) else 1
        if sum(tile.size for tile in receivers) != rows * columns:
            covered = sum(tile.size for tile in receivers)
            raise ConfigError(
                f"optimizer.kind: muon: the ranks hold {covered} of the {rows * columns} values of {matrix.weight}, or hold "
                "some in different pieces; set adamw"
            )
        # The least loaded rank; of equal ones the first.
        owner = min({rank for ranks in receivers.values() for rank in ranks}, key=lambda rank: (loads[rank], rank))
        loads[owner] += float(rows) * columns * min(rows, columns)
        sources = {tile: owner if owner in ranks else ranks[0] for tile, ranks in receivers.items()}
        number = next_round[owner]
        if (
            number < len(rounds)
            and assembled[number][owner] + rows * columns > ROUND_ELEMENTS
            and assembled[number][owner]
        ):
            number = next_round[owner] = number + 1
        if number == len(rounds):
            rounds.append([])
            assembled.append([0] * len(tiles))
        rounds[number].append(Assignment(matrix, (rows, columns), owner, sources, dict(receivers)))
        assembled[number][owner] += rows * columns
    return rounds


def orthogonalised(matrices: Tensor, steps: int) -> Tensor:
    """Return U V^T of the singular value decomposition U S V^T of each matrix, approximately, by Newton-Schulz iterations.

    Args:
        matrices: [n, rows, columns].
    """
    a, b, c = COEFFICIENTS
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    wider = torch.promote_types(matrices.dtype, torch.float32)
    norm = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True, dtype=wider)
    # An expert without any token so far has a momentum of 0, and keeps its weights.
    values = (wide / norm.clamp_min(EPSILON)).to(matrices.dtype)
    for _ in range(steps):
        gram = values @ values.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        values = torch.baddbmm(values, polynomial, values, beta=a)
    return values.mT if matrices.shape[-2] > matrices.shape[-1] else values


def update_scale(settings: config.Muon, rows: int, columns: int) -> float:
    """Return the factor of the update of a matrix."""
    if settings.update_scale == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))
