"""Collectives for Python objects and plain numbers. On Gloo only: over HCCL or NCCL they would go through the device.

Every rank of the group calls the same functions in the same order, with the same ``purpose`` and in the same step. Each call
begins with one exchange of frames (:mod:`megascend.runtime.distributed.frames`), which also carries small objects. If the ranks
differ, all of them raise :class:`~megascend.errors.OutOfStepError` at once, and no object is exchanged. When a collective fails,
the error names the ranks that did not arrive. :func:`gather_objects` lists the errors of all.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy
import torch
import torch.distributed as dist

from megascend.errors import MegascendError, OutOfStepError, ProcessGroupError
from megascend.runtime.distributed import frames
from megascend.runtime.distributed.channels import Channel
from megascend.runtime.distributed.deadlock import Pending, find_cycle
from megascend.runtime.distributed.frames import Frame, Position
from megascend.runtime.distributed.groups import OBJECT_GROUPS, ProcessGroups
from megascend.runtime.distributed.rendezvous import did_not_arrive

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Operation = Literal["sum", "max", "min"]
OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def gather_objects(obj: T, group_name: str, groups: ProcessGroups, purpose: str = "") -> list[T]:
    """Return every rank's object, in group order, on every rank of the group. Objects travel pickled.

    Args:
        purpose: the call it belongs to, with the arguments that must be equal on all ranks; error messages contain it.

    Raises:
        OutOfStepError: on every rank of the group: the ranks are not in the same collective.
        ProcessGroupError: the group carries no objects, an object cannot be pickled (on every rank), or the collective failed
            although all ranks had arrived.
        CollectiveTimeoutError: ranks did not arrive; the message names them.
    """
    with _collective("gather_objects", group_name, groups, purpose) as collective:
        return [pickle.loads(content) for content in collective.gather(collective.pickled(obj))]


def collect_objects(
    obj: T, group_name: str, groups: ProcessGroups, purpose: str = "", step: int | None = None
) -> list[T] | None:
    """Return every rank's object, in group order, on the group's first rank; None on the others.

    Args:
        purpose: as for :func:`gather_objects`.
        step: the optimizer step it belongs to; default: the current one.
    """
    with _collective("collect_objects", group_name, groups, purpose, step) as collective:
        contents = collective.collect(collective.pickled(obj))
    return None if contents is None else [pickle.loads(content) for content in contents]


def broadcast_object(
    obj: T | None, group_name: str, groups: ProcessGroups, source: int = 0, purpose: str = "", step: int | None = None
) -> T:
    """Return the object passed by the group's rank ``source``, on every rank of the group; the other ranks' objects are ignored.

    Args:
        source: rank within the group (not a global rank).
        purpose, step: as for :func:`collect_objects`.
    """
    channel = groups.channel(group_name)
    if not 0 <= source < len(channel.ranks):
        raise ProcessGroupError(
            f"source {source} is not a rank of group {group_name!r}, which has {len(channel.ranks)}"
        )
    with _collective(f"broadcast_object from its rank {source}", group_name, groups, purpose, step) as collective:
        content = collective.pickled(obj) if groups.rank == channel.ranks[source] else b""
        return pickle.loads(collective.broadcast(content, source))


def all_reduce_numbers(
    numbers: Sequence[float],
    group_name: str,
    groups: ProcessGroups,
    op: Operation = "sum",
    purpose: str = "",
) -> list[float]:
    """Reduce equally many numbers of each rank by sum, maximum or minimum, in float64, the same on every rank of the group."""
    if op not in OPERATIONS:
        raise ProcessGroupError(f"all_reduce_numbers knows {', '.join(OPERATIONS)}, not {op!r}")
    with _collective(f"all_reduce_numbers, {op} of {len(numbers)}", group_name, groups, purpose) as collective:
        return collective.reduce(numbers, op)


def agree(
    purpose: str, groups: ProcessGroups, problem: MegascendError | None = None, group_name: str = "world"
) -> None:
    """Check that all ranks are about to make the same call, before they enter collectives on the device. One exchange.

    Args:
        purpose: the call, with the arguments that must be equal.
        problem: the error that keeps this rank from making the call, which all ranks then raise, or None.
    """
    with _collective("agree", group_name, groups, purpose) as collective:
        if problem is None:
            collective.gather(b"")
        else:
            collective.refuse(problem)
            raise problem


def raise_on_all_ranks(problem: MegascendError | None, groups: ProcessGroups, purpose: str) -> None:
    """Raise on every rank of the world if any has a ``problem``, so that no rank waits for one that failed. One exchange.

    Args:
        problem: this rank's error; its text names the rank where that matters. That of the first rank is raised.
        purpose: the attempted operation, a noun, for errors of the exchange itself: ``"the read of PATH"``.
    """
    problems = gather_objects(problem, "world", groups, purpose)
    first = next((rank for rank, error in enumerate(problems) if error is not None), None)
    if first is not None:
        # The rank that has the problem raises its own object: the copy that travelled has lost its traceback and cause.
        raise problem if first == groups.rank and problem is not None else problems[first]  # type: ignore[misc]


def from_rank_0(produce: Callable[[], T], groups: ProcessGroups, purpose: str) -> T:
    """Call ``produce`` on rank 0; return its result, or raise its MegascendError, on every rank of the world. One exchange."""
    outcome: tuple[T | None, MegascendError | None] | None = None
    if groups.rank == 0:
        try:
            outcome = produce(), None
        # Any other exception is a bug: it is raised on rank 0, and the hang monitor reports it to the others.
        except MegascendError as error:
            outcome = None, error
    value, problem = broadcast_object(outcome, "world", groups, purpose=purpose)
    if problem is not None:
        raise outcome[1] if outcome is not None and outcome[1] is not None else problem
    return value  # type: ignore[return-value]


@contextmanager
def _collective(
    kind: str, group_name: str, groups: ProcessGroups, purpose: str, step: int | None = None
) -> Iterator[_Collective]:
    """Run one collective within a phase, so that errors and the monitor can name it."""
    channel = groups.channel(group_name)
    name = _name(kind, purpose)
    activity = name if group_name == "world" else f"{name} on group {group_name!r}"
    position = Position(
        kind, group_name, 0, groups.monitor.step if step is None else step, purpose, phase=groups.monitor.outer_label
    )
    with groups.monitor.phase("object gather", activity):
        yield _Collective(channel, groups, position, activity)


class _Collective:
    """An exchange of frames, and a second round for objects that do not fit into them."""

    def __init__(self, channel: Channel, groups: ProcessGroups, position: Position, activity: str) -> None:
        self._channel, self._groups, self._position, self._activity = channel, groups, position, activity
        self._departed: list[int] = []

    def pickled(self, obj: Any) -> bytes:
        """Pickle ``obj`` for the exchange."""
        try:
            return pickle.dumps(obj)
        except Exception as error:  # a user's __reduce__ may raise anything
            problem = ProcessGroupError(
                f"rank {self._groups.rank}: an object for {self._activity} cannot be pickled: {type(error).__name__}: {error}"
            )
            self.refuse(problem)
            raise problem from error

    def refuse(self, problem: MegascendError) -> None:
        """Let the other ranks raise ``problem`` too."""
        if self._channel.is_single:
            return
        self._position = replace(self._position, refusal=(type(problem).__name__, str(problem)))
        try:
            self.exchange(b"")
        except OutOfStepError:
            raise
        # The exchange raises a copy of this rank's own problem here; the caller raises the original.
        except type(problem):
            return

    def exchange(self, content: bytes) -> list[Frame]:
        """Exchange positions with the other ranks; return their frames, which also hold their objects if small enough."""
        channel = self._channel
        with self._round() as number:
            position = replace(self._position, number=number)
            received = channel.exchange(frames.encode(position, content), lambda: self._check_others(position))
        # Before the frames are judged, which raises: this rank may be the only one that can release the rest of a deadlock.
        self._release(frames.pending_of(received), position)
        return frames.aligned_frames(received, channel.ranks, self._groups.rank)

    def _check_others(self, position: Position) -> None:
        """Raise if a rank left without entering this collective; resolve a deadlock between groups that involves this rank."""
        groups = self._groups
        # A rank that left may keep its connections open: destroying NCCL's groups waits for the ranks that wait here.
        if departed := groups.monitor.departed(self._channel.name, position.number, self._channel.ranks):
            self._departed = departed
            raise RuntimeError(f"ranks {departed} left their process groups")
        if self._channel.name in OBJECT_GROUPS:
            self._release(
                find_cycle(groups.rank, groups.monitor.collective_counts, groups.object_group_ranks), position
            )

    def _release(self, pending: Sequence[Pending], position: Position) -> None:
        """Complete the ``pending`` collectives that wait for this rank, with a frame that shows where it is instead."""
        groups = self._groups
        for collective in pending:
            sequence = groups.monitor.sequence
            # A rank that has entered it meanwhile, or released it already, must not send a second frame.
            late = sequence.counts.of(collective.channel) < collective.number
            if late and groups.rank in groups.object_group_ranks(collective.channel, collective.rank):
                # Counted as entered: otherwise this rank's later collectives of that channel would be numbered one too low.
                sequence.enter(collective.channel, waits=False)
                groups.channel(collective.channel).join_next(frames.encode_stray(position, pending))

    def gather(self, content: bytes) -> list[bytes]:
        """Return every rank's bytes, on every rank."""
        if self._channel.is_single:
            return [content]
        members = self.exchange(content)
        if all(frame.complete for frame in members):
            return [frame.content for frame in members]
        # All ranks know the lengths from the frames, so they make the same decision about a second round and its size.
        size = max(frame.length for frame in members)
        larger = [number for number, frame in enumerate(members) if not frame.complete]
        if sum(members[number].length for number in larger) < len(members) * size // 2:
            # Only few objects are larger than a frame: padding all of them to the largest would waste memory.
            contents = [frame.content for frame in members]
            for number in larger:
                contents[number] = self._broadcast(content, number, members[number].length)
            return contents
        received = list(torch.empty(len(members), size, dtype=torch.uint8, device="cpu"))
        with self._round():
            dist.all_gather(received, _padded(content, size), group=self._channel.group)
        return _cut(received, members)

    def collect(self, content: bytes) -> list[bytes] | None:
        """Return every rank's bytes, on the group's first rank."""
        channel = self._channel
        first = channel.ranks[0]
        if channel.is_single:
            return [content]
        members = self.exchange(content)
        if all(frame.complete for frame in members):
            return [frame.content for frame in members] if self._groups.rank == first else None
        size = max(frame.length for frame in members)
        received = None
        if self._groups.rank == first:
            received = list(torch.empty(len(members), size, dtype=torch.uint8, device="cpu"))
        with self._round():
            dist.gather(_padded(content, size), received, dst=first, group=channel.group)
        return None if received is None else _cut(received, members)

    def broadcast(self, content: bytes, source: int) -> bytes:
        """Return the bytes of the group's rank ``source``, on every rank."""
        channel = self._channel
        if channel.is_single:
            return content
        frame = self.exchange(content)[source]
        if frame.complete:
            return frame.content
        return self._broadcast(content, source, frame.length)

    def _broadcast(self, content: bytes, source: int, size: int) -> bytes:
        """Return the ``size`` bytes of the group's rank ``source``, on every rank; ``content``: this rank's."""
        channel = self._channel
        is_source = channel.rank == channel.ranks[source]
        box = _padded(content if is_source else b"", size)
        with self._round():
            dist.broadcast(box, src=channel.ranks[source], group=channel.group)
        return box.numpy().tobytes()

    def reduce(self, numbers: Sequence[float], op: Operation) -> list[float]:
        """Reduce element-wise over the ranks, which pass equally many numbers."""
        local = numpy.array(numbers, dtype=numpy.float64)
        if self._channel.is_single:
            return local.tolist()
        members = self.exchange(local.tobytes())
        if all(frame.complete for frame in members):
            rows = numpy.frombuffer(b"".join(frame.content for frame in members)).reshape(len(members), len(local))
            # Every rank reduces the same rows in the same order, so all get the same bits.
            return getattr(rows, op)(axis=0).tolist()
        values = torch.from_numpy(local)
        with self._round():
            dist.all_reduce(values, op=OPERATIONS[op], group=self._channel.group)
        return values.tolist()

    @contextmanager
    def _round(self) -> Iterator[int]:
        """Enter a round of the collective, and yield its number; convert Gloo's errors into one that names missing ranks."""
        channel, monitor = self._channel, self._groups.monitor
        number = monitor.sequence.enter(channel.name)

        def headline(late: list[int]) -> str:
            if self._departed:
                names = f"rank{'s' * (len(self._departed) > 1)} {', '.join(map(str, self._departed))}"
                return (
                    f"rank {self._groups.rank}: {self._activity} cannot complete without {names}. "
                    "Look at the first error in the logs"
                )
            if late:
                return did_not_arrive(self._groups.rank, self._activity, late, len(channel.ranks), channel.timeout_s)
            reason = f"although ranks {channel.ranks} had entered it; one may have died since"
            return f"rank {self._groups.rank}: {self._activity} failed {reason}"

        try:
            yield number
        except RuntimeError as error:  # Gloo raises it both for timeouts and for lost peers
            raise monitor.explain_collective(error, channel.name, number, channel.ranks, headline) from error


def _name(kind: str, purpose: str) -> str:
    """Return the name of a collective for messages: its function and its purpose; for :func:`agree`, only the purpose."""
    function, call = re.split("[, ]", kind, maxsplit=1)[0], re.split(r"[(,]", purpose, maxsplit=1)[0]
    if not call:
        return function
    return call if function == "agree" else f"{function} for {call}"


def _padded(content: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)


def _cut(received: Sequence[Tensor], members: Sequence[Frame]) -> list[bytes]:
    return [part[: frame.length].numpy().tobytes() for part, frame in zip(received, members, strict=True)]
