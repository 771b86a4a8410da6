"""Plan of a sharded update: every trainer rank sends slices that it holds, every worker receives the slices that it needs. Pure.

Members are numbered: trainer ranks first, then the workers of all engines. The planner intersects the needed slices with the
held ones, groups the pieces by (ranks that hold them, workers that need them), and cuts each group into *chunks*, which are sent
as one message. The copies of a chunk are shared out over the ranks that hold it, so that all send equally much. If the trainer
would still be the bottleneck, a chunk is sent to one worker only, which forwards it to the others (*relay*); the first workers of
the chunks are spread over the engines, so this is a scatter followed by an all-gather.

All members run their operations in one total order, (phase, step, sender, receiver), so that no two wait for each other.
"""

from __future__ import annotations

import math
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from weightwire.errors import ManifestError, PlanError
from weightwire.manifest import DTYPE_BYTES, MAX_BYTES, MAX_DIMENSIONS, TensorSpec, check_size, exactly, is_count
from weightwire.slices import Box, cut, overlap, subtract

CHUNKS_PER_MEMBER = 16
"""Fewest chunks into which a member's average traffic is cut: with fewer, the members could not share it out evenly."""
SMALLEST_CHUNK = 4096
"""Chunks are not cut below this size for the sake of balance, in bytes."""
RELAY_GAIN = 0.8
"""A relay has to be this much faster than sending everything directly, by the estimate."""
MOST_IMBALANCE = 1.2
"""Largest traffic of a trainer rank, relative to the mean, that is not a reason for a relay."""
MAX_PIECES = 2**24
"""Limit on the pieces of a received plan, which is untrusted: memory for them is allocated before they are checked."""


@dataclass(frozen=True, slots=True)
class Region:
    """Slice of a tensor.

    Attributes:
        tensor: index of the tensor in the manifest.
        offsets, sizes: along each dimension.
    """

    tensor: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> Box:
        return self.offsets, self.sizes

    @property
    def volume(self) -> int:
        return math.prod(self.sizes)

    def nbytes(self, tensors: Sequence[TensorSpec]) -> int:
        return self.volume * DTYPE_BYTES[tensors[self.tensor].dtype]


def complete(tensors: Sequence[TensorSpec]) -> tuple[Region, ...]:
    """Return one slice for each tensor, all of it: the needs of an engine that does not describe its own."""
    return tuple(
        Region(index, (0,) * len(spec.shape), spec.shape) for index, spec in enumerate(tensors) if math.prod(spec.shape)
    )


@dataclass(frozen=True)
class Chunk:
    """Pieces that are sent as one message: their bytes, one after the other, without gaps.

    Attributes:
        pieces: in descending order of their elements' size, so that every piece is aligned.
        nbytes: size of the message.
        source: trainer rank that sends it.
        receivers: members that need it; of a relayed chunk, the first one forwards it to the others.
        relayed: the source sends it only once.
    """

    pieces: tuple[Region, ...]
    nbytes: int
    source: int
    receivers: tuple[int, ...]
    relayed: bool = False


class Hop(NamedTuple):
    """One message from a member to another; the total order of all messages is that of these tuples.

    Attributes:
        phase: 0 from a trainer rank, 1 from a worker that forwards.
        step: number of the chunk among those that the sender sends in this phase.
        chunk: index of the chunk in the plan.
    """

    phase: int
    step: int
    sender: int
    receiver: int
    chunk: int


@dataclass(frozen=True)
class Operation:
    """One step of a member: send a chunk of its list to a peer, or receive it from there."""

    sends: bool
    chunk: int
    peer: int


@dataclass(frozen=True)
class Share:
    """One member's part of a plan.

    Attributes:
        plan: identity of the plan.
        chunks: a trainer rank's: those that it sends; a worker's: those that it receives, in that order.
        operations: its messages in order; their chunks are indices into ``chunks``.
    """

    plan: str
    chunks: tuple[Chunk, ...]
    operations: tuple[Operation, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks, each counted once."""
        return sum(chunk.nbytes for chunk in self.chunks)

    def to_json(self) -> dict[str, Any]:
        return {
            "plan": self.plan,
            "chunks": [[chunk.source, needs_to_json(chunk.pieces)] for chunk in self.chunks],
            "operations": [[int(step.sends), step.chunk, step.peer] for step in self.operations],
        }

    @classmethod
    def from_json(cls, data: Any, tensors: Sequence[TensorSpec]) -> Share:
        """Parse the untrusted output of :meth:`to_json`; every piece lies within its tensor."""
        fields = exactly(data, ("plan", "chunks", "operations"), "plan")
        if not isinstance(fields["plan"], str) or not 0 < len(fields["plan"]) <= 256:
            raise ManifestError(f"plan: {fields['plan']!r:.80} is not the name of a plan")
        if not isinstance(fields["chunks"], list) or not isinstance(fields["operations"], list):
            raise ManifestError("plan: chunks or operations is not a list")
        chunks = []
        total = count = 0
        for row in fields["chunks"]:
            if (
                not isinstance(row, list)
                or len(row) != 2
                or not is_count(row[0], 2**20 - 1)
                or not isinstance(row[1], list)
            ):
                raise ManifestError(f"plan: {row!r:.120} is not a chunk")
            pieces = tuple(parse_piece(piece, tensors) for piece in row[1])
            nbytes = sum(piece.nbytes(tensors) for piece in pieces)
            total, count = total + nbytes, count + len(pieces)
            # Checked row by row, before the next one is parsed.
            if not pieces or total > MAX_BYTES or count > MAX_PIECES:
                raise ManifestError(f"plan: a chunk of {len(pieces)} pieces; {total} bytes and {count} pieces so far")
            chunks.append(Chunk(pieces, nbytes, row[0], ()))
        steps = []
        for row in fields["operations"]:
            if not isinstance(row, list) or len(row) != 3 or not all(is_count(value, 2**32 - 1) for value in row):
                raise ManifestError(f"plan: {row!r:.80} is not an operation")
            sends, chunk, peer = row
            if sends > 1 or chunk >= len(chunks):
                raise ManifestError(f"plan: {row!r:.80} is not an operation of {len(chunks)} chunks")
            steps.append(Operation(bool(sends), chunk, peer))
        # A worker fills its staging memory from front to back, and can only forward what it has received.
        received = 0
        for step in steps:
            if not step.sends:
                if step.chunk != received:
                    raise ManifestError(f"plan: chunk {step.chunk} is received as number {received}")
                received += 1
            elif step.chunk >= received:
                raise ManifestError(f"plan: chunk {step.chunk} is forwarded before it has arrived")
        if received != len(chunks):
            raise ManifestError(f"plan: {received} of {len(chunks)} chunks are received")
        return cls(fields["plan"], tuple(chunks), tuple(steps))


def parse_piece(row: Any, tensors: Sequence[TensorSpec]) -> Region:
    """Parse an untrusted ``[tensor, offsets, sizes]``, which must lie within its tensor."""
    if not isinstance(row, list) or len(row) != 3 or not is_count(row[0], len(tensors) - 1):
        raise ManifestError(f"plan: {row!r:.120} is not a slice of {len(tensors)} tensors")
    shape = tensors[row[0]].shape
    for values in row[1:]:
        if not isinstance(values, list) or len(values) != len(shape) or len(values) > MAX_DIMENSIONS:
            raise ManifestError(f"plan: {row!r:.120} is not a slice of shape {list(shape)}")
        if not all(is_count(value, MAX_BYTES - 1) for value in values):
            raise ManifestError(f"plan: {row!r:.120} is not a slice of shape {list(shape)}")
    offsets, sizes = tuple(row[1]), tuple(row[2])
    if not all(size > 0 and start + size <= length for start, size, length in zip(offsets, sizes, shape, strict=True)):
        raise ManifestError(f"plan: slice {list(offsets)} of {list(sizes)} is not within {list(shape)}")
    return Region(row[0], offsets, sizes)


def check_share(share: Share, needs: Iterable[Region], tensors: Sequence[TensorSpec], label: str) -> None:
    """Raise PlanError unless the chunks hold every element of ``needs`` exactly once, and nothing else."""
    need_boxes: dict[int, list[Box]] = defaultdict(list)
    for piece in disjoint(needs):
        need_boxes[piece.tensor].append(piece.box)
    missing_volume = {tensor: sum(math.prod(sizes) for _, sizes in boxes) for tensor, boxes in need_boxes.items()}
    planned: dict[int, list[Box]] = defaultdict(list)
    for chunk in share.chunks:
        for piece in chunk.pieces:
            planned[piece.tensor].append(piece.box)
    for tensor, boxes in planned.items():
        # Comparing volumes is enough once the pieces are disjoint: no element can then make up for another.
        if overlapping(boxes):
            raise PlanError(f"{label}: the plan sends a part of {tensors[tensor].name} twice")
        volume = sum(math.prod(sizes) for _, sizes in boxes)
        inside = sum(
            math.prod(common[1])
            for need in need_boxes.get(tensor, ())
            for box in boxes
            if (common := overlap(*need, *box)) is not None
        )
        if inside != volume:
            raise PlanError(f"{label}: the plan sends a part of {tensors[tensor].name} that is not needed here")
        missing_volume[tensor] -= inside
    if missing := [tensors[tensor].name for tensor, volume in missing_volume.items() if volume]:
        raise PlanError(f"{label}: the plan leaves out a part of {', '.join(missing[:4])} ({len(missing)} tensors)")


def overlapping(boxes: Sequence[Box]) -> bool:
    """Check whether slices of one tensor have an element in common."""
    return any(overlap(*a, *b) for a, b in _possibly_overlapping(boxes))


def _possibly_overlapping(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Yield the pairs of slices whose first dimensions overlap; a sweep, since all pairs would be too many to compare."""
    if boxes and not boxes[0][0]:  # a scalar has no first dimension, and any two slices of it are equal
        yield from pairwise(boxes)
        return
    ordered = sorted(boxes)
    for index, box in enumerate(ordered):
        stop = box[0][0] + box[1][0]
        for other in ordered[index + 1 :]:
            if other[0][0] >= stop:
                break
            yield box, other


def disjoint(pieces: Iterable[Region]) -> list[Region]:
    """Return pieces that cover the same elements, each of them once."""
    by_tensor: dict[int, list[Box]] = defaultdict(list)
    for piece in pieces:
        boxes = by_tensor[piece.tensor]
        parts = [piece.box]
        for covered in boxes:
            _, parts = subtract(parts, covered)
        boxes.extend(parts)
    return [Region(tensor, *box) for tensor, boxes in by_tensor.items() for box in boxes]


@dataclass(frozen=True)
class TransferPlan:
    """All messages of an update.

    Attributes:
        senders, receivers: number of trainer ranks and of workers; member ``senders + w`` is worker ``w``.
        chunks: in no particular order.
        identity: name of the plan; equal names mean equal contents of all chunks.
    """

    senders: int
    receivers: int
    chunks: tuple[Chunk, ...]
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """All messages, in their total order."""
        steps: dict[tuple[int, int], int] = defaultdict(int)
        hops: list[Hop] = []

        def add(phase: int, sender: int, receivers: Iterable[int], index: int) -> None:
            step = steps[phase, sender]
            steps[phase, sender] += 1
            hops.extend(Hop(phase, step, sender, receiver, index) for receiver in receivers)

        # Rotated, so that at one step the senders send to different receivers.
        order = sorted(
            range(len(self.chunks)),
            key=lambda i: ((self.chunks[i].receivers[0] - self.chunks[i].source) % self.receivers, i),
        )
        for index in order:
            chunk = self.chunks[index]
            add(0, chunk.source, chunk.receivers[:1] if chunk.relayed else chunk.receivers, index)
        for index in order:
            chunk = self.chunks[index]
            if chunk.relayed and len(chunk.receivers) > 1:
                add(1, chunk.receivers[0], chunk.receivers[1:], index)
        return tuple(sorted(hops))

    def shares(self) -> list[Share]:
        """Return each member's part, by member."""
        members = self.senders + self.receivers
        chunks: list[dict[int, int]] = [{} for _ in range(members)]
        steps: list[list[Operation]] = [[] for _ in range(members)]
        for hop in self.hops:
            for member, peer in ((hop.sender, hop.receiver), (hop.receiver, hop.sender)):
                number = chunks[member].setdefault(hop.chunk, len(chunks[member]))
                steps[member].append(Operation(member == hop.sender, number, peer))
        return [
            Share(self.identity, tuple(self.chunks[index] for index in holdings), tuple(operations))
            for holdings, operations in zip(chunks, steps, strict=True)
        ]

    @cached_property
    def traffic(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Bytes by member: (sent, received) in phase 0, (sent, received) in phase 1."""
        members = self.senders + self.receivers
        totals: tuple[list[int], ...] = tuple([0] * members for _ in range(4))
        for hop in self.hops:
            totals[2 * hop.phase][hop.sender] += self.chunks[hop.chunk].nbytes
            totals[2 * hop.phase + 1][hop.receiver] += self.chunks[hop.chunk].nbytes
        return totals  # type: ignore[return-value]

    @property
    def imbalance(self) -> float:
        """Return the most bytes that a trainer rank sends, relative to the mean."""
        totals = self.traffic[0][: self.senders]
        return max(totals) * self.senders / max(1, sum(totals))

    def seconds(self, bytes_per_s: float) -> float:
        """Estimate the duration when every member sends and receives at this rate at the same time; phases do not overlap."""
        return sum(max((0, *totals)) for totals in (self._busiest(0), self._busiest(1))) / bytes_per_s

    def _busiest(self, phase: int) -> tuple[int, int]:
        return max(self.traffic[2 * phase]), max(self.traffic[2 * phase + 1])


def plan(
    tensors: Sequence[TensorSpec],
    holdings: Sequence[Iterable[Region]],
    needs: Sequence[Sequence[Region]],
    *,
    chunk_bytes: int,
    relay: bool | None = None,
) -> TransferPlan:
    """Plan an update.

    Args:
        holdings: slices of each trainer rank; replicas are listed by every rank that has them.
        needs: slices that each worker needs, engine after engine. Workers with equal needs should share one object.
        chunk_bytes: largest message, in bytes; ranks allocate two buffers of it.
        relay: workers forward what several of them need; None: if that is faster, or sending is uneven without it.

    Raises:
        PlanError: no rank holds a part that a worker needs.
    """
    groups = _groups(tensors, holdings, needs)
    sizes = {key: sum(piece.nbytes(tensors) for piece in pieces) for key, pieces in groups.items()}
    senders, receivers = len(holdings), len(needs)

    def candidate(nbytes: int, sharers: int, relayed: bool) -> TransferPlan:
        size = max(1, min(chunk_bytes, max(SMALLEST_CHUNK, nbytes // max(1, sharers) // CHUNKS_PER_MEMBER)))
        parts = [(*key, *chunk) for key, group in groups.items() for chunk in _chunks(tensors, group, size)]
        # Parts that few ranks hold are assigned first: those that many hold can even out the load afterwards. Among them the
        # largest first, as in any greedy scheduling.
        parts.sort(key=lambda part: (len(part[0]), -part[3]))
        return TransferPlan(senders, receivers, _share_out(parts, senders, receivers, relayed=relayed))

    direct = candidate(sum(size * len(workers) for (_, workers), size in sizes.items()), senders, relayed=False)
    if relay is False or (relay is None and all(len(workers) == 1 for _, workers in groups)):
        return direct
    # Durations at 1 byte/s: only their ratio matters.
    direct_s, uneven = direct.seconds(1), direct.imbalance > MOST_IMBALANCE
    # A relay cannot be faster than a worker that receives all it needs.
    if relay is None and not uneven and max(direct.traffic[1]) >= RELAY_GAIN * direct_s:
        return direct
    relayed = candidate(sum(sizes.values()), max(senders, receivers), relayed=True)
    relayed_s = relayed.seconds(1)
    evens_out = uneven and relayed.imbalance < direct.imbalance and relayed_s <= direct_s
    if relay or relayed_s < RELAY_GAIN * direct_s or evens_out:
        return relayed
    return direct


_Key = tuple[tuple[int, ...], tuple[int, ...]]
"""(ranks that hold a piece, workers that need it)."""
_Part = tuple[tuple[int, ...], tuple[int, ...], tuple[Region, ...], int]
"""(holders, workers, pieces of a chunk, bytes)."""


def _groups(
    tensors: Sequence[TensorSpec], holdings: Sequence[Iterable[Region]], needs: Sequence[Sequence[Region]]
) -> dict[_Key, list[Region]]:
    """Return the pieces to send, by (ranks that hold them, workers that need them)."""
    ranks: list[dict[Box, list[int]]] = [{} for _ in tensors]
    for rank, pieces in enumerate(holdings):
        for piece in pieces:
            holders = ranks[piece.tensor].setdefault(piece.box, [])
            if not holders or holders[-1] != rank:
                holders.append(rank)
    # By identity first: engines of one kind have equal needs, tens of thousands of slices each.
    workers_by_needs: dict[int, list[int]] = {}
    for worker, pieces in enumerate(needs):
        workers_by_needs.setdefault(id(pieces), []).append(worker)
    workers: list[dict[Box, list[int]]] = [{} for _ in tensors]
    for equal_workers in workers_by_needs.values():
        for piece in disjoint(needs[equal_workers[0]]):
            workers[piece.tensor].setdefault(piece.box, []).extend(equal_workers)
    groups: dict[_Key, list[Region]] = defaultdict(list)
    missing: list[str] = []
    for tensor, by_box in enumerate(workers):
        sources = [(box, tuple(holders)) for box, holders in ranks[tensor].items()]
        for need, receivers in by_box.items():
            uncovered, group = [need], tuple(sorted(receivers))
            for box, holders in sources:
                if uncovered == [need] and _contains(box, need):  # the usual case, of hundreds of thousands
                    groups[holders, group].append(Region(tensor, *need))
                    uncovered = []
                    break
                # Subtracted, not only intersected: slices of ranks may overlap without being equal.
                inside, uncovered = subtract(uncovered, box)
                groups[holders, group].extend(Region(tensor, *part) for part in inside)
                if not uncovered:
                    break
            if uncovered:
                missing.append(tensors[tensor].name)
    if missing:
        names = list(dict.fromkeys(missing))
        raise PlanError(f"no trainer rank holds all of {', '.join(names[:4])} ({len(names)} tensors)")
    return {key: pieces for key, pieces in groups.items() if pieces}


def _contains(box: Box, part: Box) -> bool:
    return all(
        start <= low and low + length <= start + size for start, size, low, length in zip(*box, *part, strict=True)
    )


def _chunks(
    tensors: Sequence[TensorSpec], group: Sequence[Region], size: int
) -> Iterator[tuple[tuple[Region, ...], int]]:
    """Yield (pieces, bytes) of at most ``size`` bytes each."""
    # Wide elements first: a piece then begins at a multiple of its elements' size without padding.
    ordered = sorted(group, key=lambda piece: -DTYPE_BYTES[tensors[piece.tensor].dtype])
    pieces: list[Region] = []
    filled = 0
    for piece in ordered:
        width = DTYPE_BYTES[tensors[piece.tensor].dtype]
        for box in cut(piece.box, max(1, size // width)):
            part = Region(piece.tensor, *box)
            nbytes = part.volume * width
            if pieces and filled + nbytes > size:
                yield tuple(pieces), filled
                pieces, filled = [], 0
            pieces.append(part)
            filled += nbytes
    if pieces:
        yield tuple(pieces), filled


def _share_out(parts: Sequence[_Part], senders: int, receivers: int, *, relayed: bool) -> tuple[Chunk, ...]:
    """Choose the rank that sends each chunk, of those that hold it: the one with the least to send so far."""
    # Bytes that each trainer rank sends, and that each worker forwards, so far.
    load, forwarded = [0] * senders, [0] * receivers
    chunks = []
    for holders, workers, pieces, nbytes in parts:
        if relayed:
            source = min(holders, key=load.__getitem__)
            load[source] += nbytes
            # The worker with the least to forward forwards this one.
            first = min(workers, key=forwarded.__getitem__)
            forwarded[first] += nbytes * max(1, len(workers) - 1)
            targets = {source: [first, *(worker for worker in workers if worker != first)]}
        else:
            targets = {}
            for worker in workers:
                source = min(holders, key=load.__getitem__)
                load[source] += nbytes
                targets.setdefault(source, []).append(worker)
        for source, group in targets.items():
            members = [senders + worker for worker in group]
            if not relayed:
                # Rotated by the sender, so that senders do not all begin with the same worker.
                members.sort(key=lambda member: (member - senders - source) % receivers)
            chunks.append(Chunk(pieces, nbytes, source, tuple(members), relayed and len(members) > 1))
    return tuple(chunks)


def needs_from_json(rows: Any, tensors: Sequence[TensorSpec]) -> tuple[Region, ...]:
    """Parse a worker's untrusted description of its needs; see :func:`needs_to_json`."""
    check_size(rows, list, MAX_PIECES, "needs")
    return tuple(parse_piece(row, tensors) for row in rows)


def needs_to_json(needs: Iterable[Region]) -> list[Any]:
    """Return plain data: ``[tensor, offsets, sizes]`` for each slice."""
    return [[piece.tensor, [*piece.offsets], [*piece.sizes]] for piece in needs]


def by_name(tensors: Sequence[TensorSpec]) -> Mapping[str, int]:
    return {spec.name: index for index, spec in enumerate(tensors)}
