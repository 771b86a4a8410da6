"""Collectives for Python objects and plain numbers. On Gloo only: over HCCL or NCCL they would go through the device.

Every rank of the group calls the same function in the same order. When a collective fails, the error names the ranks
that did not come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist

from megascend.errors import ProcessGroupError
from megascend.parallel.arrivals import did_not_arrive
from megascend.parallel.process_groups import ProcessGroups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
Operation = Literal["sum", "max", "min"]


def gather_objects(obj: T, group_name: str, groups: ProcessGroups) -> list[T]:
    """Every rank's object, in group order, on every rank of the group. Objects travel pickled.

    Raises:
        ProcessGroupError: the group has no Gloo twin, or the collective failed with all ranks there.
        CollectiveTimeoutError: ranks did not arrive; the message names them.
    """
    with _on_gloo(group_name, groups, "gather_objects") as group:
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, obj, group=group)
    return gathered


def collect_objects(obj: T, group_name: str, groups: ProcessGroups) -> list[T] | None:
    """Every rank's object, in group order, on the group's first rank; None on the others.

    Raises:
        ProcessGroupError, CollectiveTimeoutError: as :func:`gather_objects`.
    """
    ranks = groups.ranks(group_name)
    with _on_gloo(group_name, groups, "collect_objects") as group:
        gathered: list[Any] | None = [None] * group.size() if groups.rank == ranks[0] else None
        dist.gather_object(obj, gathered, dst=ranks[0], group=group)
    return gathered


def broadcast_object(obj: T | None, group_name: str, groups: ProcessGroups, source: int = 0) -> T:
    """The object that the group's rank ``source`` passes, on every rank of the group; the others' is ignored.

    Args:
        source: rank within the group (not a global rank).

    Raises:
        ProcessGroupError: as :func:`gather_objects`, or ``source`` is not a rank of the group.
        CollectiveTimeoutError: ranks did not arrive; the message names them.
    """
    ranks = groups.ranks(group_name)
    if not 0 <= source < len(ranks):
        raise ProcessGroupError(f"source {source} is not a rank of group {group_name!r}, which has {len(ranks)}")
    with _on_gloo(group_name, groups, "broadcast_object") as group:
        box: list[Any] = [obj]
        dist.broadcast_object_list(box, src=ranks[source], group=group, device=torch.device("cpu"))
    return box[0]


def all_reduce_numbers(
    numbers: Sequence[float], group_name: str, groups: ProcessGroups, op: Operation = "sum"
) -> list[float]:
    """Element-wise sum, maximum or minimum over the group, in float64. All ranks pass equally many numbers.

    Raises:
        ProcessGroupError: as :func:`gather_objects`, or ``op`` is not known.
        CollectiveTimeoutError: ranks did not arrive; the message names them.
    """
    operations = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    if op not in operations:
        raise ProcessGroupError(f"all_reduce_numbers knows {', '.join(operations)}, not {op!r}")
    with _on_gloo(group_name, groups, "all_reduce_numbers") as group:
        values = torch.tensor(list(numbers), dtype=torch.float64, device="cpu")
        dist.all_reduce(values, op=operations[op], group=group)
    return values.tolist()


def barrier(groups: ProcessGroups, timeout_s: float | None = None, label: str = "barrier") -> None:
    """Wait for all ranks of the world.

    Args:
        timeout_s: default: the groups' timeout.
        label: what is waited for, for the error message: ``"the checkpoint of step 100"``.

    Raises:
        CollectiveTimeoutError: ranks did not arrive within ``timeout_s``; the message names them.
    """
    limit = groups.timeout_s if timeout_s is None else timeout_s
    with _on_gloo("world", groups, label, limit) as group:
        work = dist.barrier(group=group, async_op=True)
        if work is not None:
            work.wait(timedelta(seconds=limit))


@contextmanager
def _on_gloo(
    group_name: str, groups: ProcessGroups, label: str, timeout_s: float | None = None
) -> Iterator[ProcessGroup]:
    """The group's Gloo twin, announced; failures inside become errors that name who did not come."""
    group = groups.gloo(group_name)
    backend = dist.get_backend(group)
    if backend != "gloo":
        raise ProcessGroupError(
            f"rank {groups.rank}: {label} on group {group_name!r} would go over {backend}; objects travel on gloo only"
        )
    where = label if group_name == "world" else f"{label} on group {group_name!r}"
    with groups.watch.phase("object gather", where):
        count = groups.arrivals.announce(group_name)
        try:
            yield group
        except RuntimeError as error:  # what gloo raises for timeouts and for lost peers alike
            limit = groups.timeout_s if timeout_s is None else timeout_s
            ranks = groups.ranks(group_name)
            late = _diagnose(lambda: groups.arrivals.missing(group_name, count, ranks))
            headline = (
                did_not_arrive(groups.rank, where, late, len(ranks), limit)
                if late
                else f"rank {groups.rank}: {where} failed although ranks {ranks} came; one may have died since, or passed "
                "something else"
            )
            raise groups.watch.explain(error, headline, suspects=late or None) from error


def _diagnose(missing: Callable[[], list[int]]) -> list[int]:
    try:
        return missing()
    except RuntimeError:  # the store is gone too (its server has exited): the original error has to do
        return []
