"""Collectives for Python objects and plain numbers. On Gloo only: over HCCL or NCCL they would go through the device.

Every rank of the group calls the same function in the same order, for the same purpose (``what``) in the same step. All of
them begin with one exchange of frames (:mod:`megascend.distributed.frames`); small objects travel in it. Ranks that differ in
any of this raise :class:`~megascend.errors.OutOfStepError`, all of them and at once, and no object changes hands. When a
collective fails, the error names the ranks that did not come.
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

from megascend.distributed import frames
from megascend.distributed.channels import Channel
from megascend.distributed.deadlock import Pending, circle
from megascend.distributed.frames import Frame, Position
from megascend.distributed.groups import ProcessGroups
from megascend.distributed.rendezvous import did_not_arrive
from megascend.errors import MegascendError, OutOfStepError, ProcessGroupError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Operation = Literal["sum", "max", "min"]
OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def gather_objects(obj: T, group_name: str, groups: ProcessGroups, what: str = "", step: int | None = None) -> list[T]:
    """Return every rank's object, in group order, on every rank of the group. Objects travel pickled.

    Args:
        what: what it is for, with whatever must be equal on all ranks; errors repeat it.
        step: that it belongs to; default: the one being worked on.

    Raises:
        OutOfStepError: on every rank of the group: they are not in the same collective.
        ProcessGroupError: no object travels on the group, an object cannot be pickled (on every rank), or the collective
            failed with all ranks there.
        CollectiveTimeoutError: ranks did not arrive; the message names them.
    """
    with _collective("gather_objects", group_name, groups, what, step) as collective:
        return [pickle.loads(content) for content in collective.gather(collective.pickled(obj))]


def collect_objects(
    obj: T, group_name: str, groups: ProcessGroups, what: str = "", step: int | None = None
) -> list[T] | None:
    """Return every rank's object, in group order, on the group's first rank; None on the others.

    Args:
        what, step: as for :func:`gather_objects`.

    Raises:
        OutOfStepError, ProcessGroupError, CollectiveTimeoutError: as :func:`gather_objects`.
    """
    with _collective("collect_objects", group_name, groups, what, step) as collective:
        contents = collective.collect(collective.pickled(obj))
    return None if contents is None else [pickle.loads(content) for content in contents]


def broadcast_object(
    obj: T | None, group_name: str, groups: ProcessGroups, source: int = 0, what: str = "", step: int | None = None
) -> T:
    """Return the object that the group's rank ``source`` passes, on every rank of the group; the others' is ignored.

    Args:
        source: rank within the group (not a global rank).
        what, step: as for :func:`gather_objects`.

    Raises:
        OutOfStepError: as :func:`gather_objects`.
        ProcessGroupError: as :func:`gather_objects`, or ``source`` is not a rank of the group.
        CollectiveTimeoutError: ranks did not arrive; the message names them.
    """
    channel = groups.channel(group_name)
    if not 0 <= source < len(channel.ranks):
        raise ProcessGroupError(
            f"source {source} is not a rank of group {group_name!r}, which has {len(channel.ranks)}"
        )
    with _collective(f"broadcast_object from its rank {source}", group_name, groups, what, step) as collective:
        content = collective.pickled(obj) if groups.rank == channel.ranks[source] else b""
        return pickle.loads(collective.broadcast(content, source))


def all_reduce_numbers(
    numbers: Sequence[float],
    group_name: str,
    groups: ProcessGroups,
    op: Operation = "sum",
    what: str = "",
    step: int | None = None,
) -> list[float]:
    """Reduce numbers over the group by sum, maximum or minimum, in float64, the same on every rank.

    Args:
        numbers: equally many on all ranks.
        what, step: as for :func:`gather_objects`.

    Raises:
        OutOfStepError: as :func:`gather_objects`; also where ranks differ in ``op`` or pass another number of numbers.
        ProcessGroupError: as :func:`gather_objects`, or ``op`` is not known.
        CollectiveTimeoutError: ranks did not arrive; the message names them.
    """
    if op not in OPERATIONS:
        raise ProcessGroupError(f"all_reduce_numbers knows {', '.join(OPERATIONS)}, not {op!r}")
    with _collective(f"all_reduce_numbers, {op} of {len(numbers)}", group_name, groups, what, step) as collective:
        return collective.reduce(numbers, op)


def barrier(groups: ProcessGroups, timeout_s: float | None = None, label: str = "barrier") -> None:
    """Wait for all ranks of the world.

    Args:
        timeout_s: default: the groups' timeout.
        label: the event waited for, for the error message: ``"the checkpoint of step 100"``.

    Raises:
        OutOfStepError: as :func:`gather_objects`.
        CollectiveTimeoutError: ranks did not arrive within ``timeout_s``; the message names them.
    """
    with _collective("barrier", "world", groups, label, None, label) as collective:
        collective.gather(b"", timeout_s)


def agree(what: str, groups: ProcessGroups, problem: MegascendError | None = None, group_name: str = "world") -> None:
    """Make sure that all ranks are about to do the same thing, before they meet in collectives of a device. One exchange.

    Args:
        what: the call, with the arguments that must be equal.
        problem: why this rank cannot do it.

    Raises:
        OutOfStepError: as :func:`gather_objects`.
        MegascendError: ``problem`` itself; on the other ranks an error of its class that repeats it.
        ProcessGroupError, CollectiveTimeoutError: as :func:`gather_objects`.
    """
    with _collective("agree", group_name, groups, what, None) as collective:
        if problem is None:
            collective.gather(b"")
        else:
            collective.refuse(problem)
            raise problem


def raise_on_all_ranks(problem: MegascendError | None, groups: ProcessGroups, what: str) -> None:
    """Raise on every rank of the world if any has a ``problem``, so that none waits for one that has given up. One exchange.

    Args:
        problem: why this rank cannot continue; its text says which rank it is, where that matters.
        what: what has been tried, for errors of the exchange itself: ``"whether PATH can be read"``.

    Raises:
        MegascendError: the problem of the first rank that has one.
        OutOfStepError, ProcessGroupError, CollectiveTimeoutError: as :func:`gather_objects`.
    """
    problems = gather_objects(problem, "world", groups, what)
    first = next((rank for rank, error in enumerate(problems) if error is not None), None)
    if first is not None:
        raise problem if first == groups.rank and problem is not None else problems[first]  # type: ignore[misc]


def from_rank_0(produce: Callable[[], T], groups: ProcessGroups, what: str) -> T:
    """Return what ``produce`` returns on rank 0, on every rank of the world. One exchange.

    Raises:
        MegascendError: on every rank: what ``produce`` raised.
        OutOfStepError, ProcessGroupError, CollectiveTimeoutError: as :func:`broadcast_object`.
    """
    outcome: tuple[T | None, MegascendError | None] | None = None
    if groups.rank == 0:
        try:
            outcome = produce(), None
        except MegascendError as error:
            outcome = None, error
    value, problem = broadcast_object(outcome, "world", groups, what=what)
    if problem is not None:
        raise outcome[1] if outcome is not None and outcome[1] is not None else problem
    return value  # type: ignore[return-value]


@contextmanager
def _collective(
    kind: str, group_name: str, groups: ProcessGroups, what: str, step: int | None, label: str = ""
) -> Iterator[_Collective]:
    """Run one collective in the phase that errors and the monitor know it by."""
    channel = groups.channel(group_name)
    name = label or _name(kind, what)
    where = name if group_name == "world" else f"{name} on group {group_name!r}"
    position = Position(
        kind, group_name, 0, groups.monitor.step if step is None else step, what, place=groups.monitor.place
    )
    with groups.monitor.phase("object gather", where):
        yield _Collective(channel, groups, position, where)


class _Collective:
    """The exchange of frames, and the round after it for what does not fit into them."""

    def __init__(self, channel: Channel, groups: ProcessGroups, position: Position, where: str) -> None:
        self._channel, self._groups, self._position, self._where = channel, groups, position, where

    def pickled(self, obj: Any) -> bytes:
        """Pickle ``obj`` for the exchange.

        Raises:
            ProcessGroupError: on every rank: it cannot be pickled.
        """
        try:
            return pickle.dumps(obj)
        except Exception as error:  # whatever a user's __reduce__ raises; the other ranks are told
            problem = ProcessGroupError(
                f"rank {self._groups.rank}: an object for {self._where} cannot be pickled: {type(error).__name__}: {error}"
            )
            self.refuse(problem)
            raise problem from error

    def refuse(self, problem: MegascendError) -> None:
        """Let the other ranks raise ``problem`` too.

        Raises:
            OutOfStepError: they are somewhere else.
            CollectiveTimeoutError, ProcessGroupError: as :meth:`meet`.
        """
        if self._channel.is_single:
            return
        self._position = replace(self._position, refusal=(type(problem).__name__, str(problem)))
        try:
            self.meet(b"")
        except OutOfStepError:
            raise
        except type(problem):
            return

    def meet(self, content: bytes, timeout_s: float | None = None) -> list[Frame]:
        """Show this rank's position and see the others', whose frames hold what fits of their objects.

        Raises:
            OutOfStepError, MegascendError: as :func:`megascend.distributed.frames.contents`.
            CollectiveTimeoutError: ranks did not arrive; the message names them.
            ProcessGroupError: the exchange failed with all ranks there.
        """
        channel = self._channel
        with self._naming_the_late(timeout_s):
            position = replace(self._position, number=self._number)
            received = channel.exchange(frames.encode(position, content), timeout_s, lambda: self._look(position))
        self._release(frames.pending_of(received), position)
        return frames.contents(received, channel.ranks, self._groups.rank)

    def _look(self, position: Position) -> None:
        """Find out whether what this rank waits for waits for this rank, and end it if so."""
        groups = self._groups
        if self._channel.name in groups.carriers:
            self._release(circle(groups.rank, groups.monitor.collective_counts, groups.carried_to), position)

    def _release(self, pending: Sequence[Pending], position: Position) -> None:
        """Show this rank's position in collectives that wait for it and that it will not come to."""
        groups = self._groups
        for collective in pending:
            sequence = groups.monitor.sequence
            late = sequence.counts.of(collective.channel) < collective.number
            if late and groups.rank in groups.carried_to(collective.channel, collective.rank):
                sequence.enter(collective.channel, waits=False)
                groups.channel(collective.channel).take_part(frames.encode_stray(position, pending))

    def gather(self, content: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Return every rank's bytes, on every rank."""
        if self._channel.is_single:
            return [content]
        members = self.meet(content, timeout_s)
        if all(frame.complete for frame in members):
            return [frame.content for frame in members]
        size = max(frame.length for frame in members)
        received = list(torch.empty(len(members), size, dtype=torch.uint8, device="cpu"))
        with self._naming_the_late(timeout_s):
            dist.all_gather(received, _padded(content, size), group=self._channel.group)
        return _cut(received, members)

    def collect(self, content: bytes) -> list[bytes] | None:
        """Return every rank's bytes, on the group's first rank."""
        channel = self._channel
        first = channel.ranks[0]
        if channel.is_single:
            return [content]
        members = self.meet(content)
        if all(frame.complete for frame in members):
            return [frame.content for frame in members] if self._groups.rank == first else None
        size = max(frame.length for frame in members)
        received = None
        if self._groups.rank == first:
            received = list(torch.empty(len(members), size, dtype=torch.uint8, device="cpu"))
        with self._naming_the_late():
            dist.gather(_padded(content, size), received, dst=first, group=channel.group)
        return None if received is None else _cut(received, members)

    def broadcast(self, content: bytes, source: int) -> bytes:
        """Return the bytes of the group's rank ``source``, on every rank."""
        channel = self._channel
        if channel.is_single:
            return content
        frame = self.meet(content)[source]
        if frame.complete:
            return frame.content
        box = _padded(content, frame.length)
        with self._naming_the_late():
            dist.broadcast(box, src=channel.ranks[source], group=channel.group)
        return box.numpy().tobytes()

    def reduce(self, numbers: Sequence[float], op: Operation) -> list[float]:
        """Reduce element-wise over the ranks, which pass equally many."""
        local = numpy.array(numbers, dtype=numpy.float64)
        if self._channel.is_single:
            return local.tolist()
        members = self.meet(local.tobytes())
        if all(frame.complete for frame in members):
            rows = numpy.frombuffer(b"".join(frame.content for frame in members)).reshape(len(members), len(local))
            return getattr(rows, op)(axis=0).tolist()
        values = torch.from_numpy(local)
        with self._naming_the_late():
            dist.all_reduce(values, op=OPERATIONS[op], group=self._channel.group)
        return values.tolist()

    @contextmanager
    def _naming_the_late(self, timeout_s: float | None = None) -> Iterator[None]:
        """Assign the collective its number, and convert Gloo's errors into one that names the missing ranks."""
        channel, monitor = self._channel, self._groups.monitor
        self._number = monitor.sequence.enter(channel.name)

        def headline(late: list[int]) -> str:
            limit = channel.timeout_s if timeout_s is None else timeout_s
            if late:
                return did_not_arrive(self._groups.rank, self._where, late, len(channel.ranks), limit)
            reason = f"although ranks {channel.ranks} came; one may have died since"
            return f"rank {self._groups.rank}: {self._where} failed {reason}"

        try:
            yield
        except RuntimeError as error:  # what gloo raises for timeouts and for lost peers alike
            raise monitor.explain_collective(error, channel.name, self._number, channel.ranks, headline) from error


def _name(kind: str, what: str) -> str:
    """Return what messages call a collective: its function, and the call that it is for. Of :func:`agree`, only that."""
    function, call = re.split("[, ]", kind, maxsplit=1)[0], re.split(r"[(,]", what, maxsplit=1)[0]
    if not call:
        return function
    return call if function == "agree" else f"{function} for {call}"


def _padded(content: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)


def _cut(received: Sequence[Tensor], members: Sequence[Frame]) -> list[bytes]:
    return [part[: frame.length].numpy().tobytes() for part, frame in zip(received, members, strict=True)]
