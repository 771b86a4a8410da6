"""A Gloo group reserved for object collectives: a mismatched call can only meet another object collective in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from megascend.errors import ProcessGroupError
from megascend.runtime.distributed import frames
from weightwire.background import BackgroundThread

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

RELAYED_ABOVE = 256
"""Ranks above which frames are relayed, in log2(n) rounds. Below, each rank sends its frame to every other one, which is faster,
but connects every pair of ranks, with a socket on each side and a read of the store."""
FIRST_CHECK_S = 1.0
"""Seconds that a rank waits before its first check for ranks that left and for a deadlock between groups."""
MAX_PAUSE_S = 30.0
"""Longest pause between two such checks, in seconds; each reads the store up to twice per rank of the group."""
MARGIN_S = 1.0
"""Seconds that a rank waits past the group's timeout, so that Gloo's own error, which says more, arrives first."""


class ExchangeWork(Protocol):
    """Handle of a running exchange, like ``torch.distributed.Work``."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Return once the exchange has completed. RuntimeError: it failed, or the time has elapsed."""
        ...

    def is_completed(self) -> bool:
        """Check whether the exchange has completed or failed."""
        ...


class RelayedExchange:
    """An all-gather in which a rank communicates with 2 log2(n) others (Bruck et al., 1997), on a thread of its own.

    In round k a rank sends all that it has to the rank 2^k before it, and receives as much from the rank 2^k after it.

    Args:
        buffer: rows of all ranks, to be received; row 0 is this rank's. Rows are in group order, beginning with this rank.
        ranks: global ranks, in group order.
        tag: tag of the messages, unique among concurrent exchanges.
    """

    def __init__(self, buffer: torch.Tensor, ranks: Sequence[int], rank: int, group: ProcessGroup, tag: int) -> None:
        self._buffer, self._ranks, self._group, self._tag = buffer, ranks, group, tag
        self._position = list(ranks).index(rank)
        self._completed = threading.Event()
        self._error: BaseException | None = None
        # A daemon: a rank may end although others have not joined.
        BackgroundThread(self._run, name="megascend-exchange").start()

    def wait(self, timeout: timedelta = timedelta.max) -> None:
        """See :class:`ExchangeWork`."""
        if not self._completed.wait(min(timeout.total_seconds(), threading.TIMEOUT_MAX)):
            raise RuntimeError("the exchange has not completed in time")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """See :class:`ExchangeWork`."""
        return self._completed.is_set()

    def _run(self) -> None:
        try:
            self._relay()
        except BaseException as error:  # noqa: BLE001  raised in wait(), which would find no end otherwise
            self._error = error
        self._completed.set()

    def _relay(self) -> None:
        size, distance, sends = len(self._ranks), 1, []
        while distance < size:
            rows = min(distance, size - distance)
            before = self._ranks[(self._position - distance) % size]
            after = self._ranks[(self._position + distance) % size]
            sends.append(dist.isend(self._buffer[:rows], before, self._group, self._tag))
            received = dist.irecv(self._buffer[distance : distance + rows], after, self._group, self._tag)
            assert received is not None, "this rank is in the group"
            received.wait()
            distance *= 2
        for work in sends:
            assert work is not None, "this rank is in the group"
            work.wait()


class Channel:
    """The object collectives of one set of ranks. Groups of the same ranks share one channel, whatever their names.

    Attributes:
        name: the first of the groups' names; the collectives are counted under it.
        ranks: global ranks, in group order.
        group: Gloo group; None for a single rank, which exchanges nothing.
        timeout_s: timeout of a collective, in seconds.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], rank: int, group: ProcessGroup | None, timeout_s: float
    ) -> None:
        if group is not None and (backend := dist.get_backend(group)) != "gloo":
            raise ProcessGroupError(
                f"rank {rank}: objects on group {name!r} would go over {backend}; objects travel on gloo only"
            )
        self.name, self.ranks, self.rank, self.group, self.timeout_s = name, list(ranks), rank, group, timeout_s
        # Gloo writes into the receive buffer after the call returns, so both are held until the work has completed.
        self._unfinished: list[tuple[torch.Tensor, ExchangeWork]] = []
        self._exchanges = 0

    @property
    def is_single(self) -> bool:
        """Check whether no other rank is in the group."""
        return len(self.ranks) == 1

    def exchange(self, frame: bytes, on_slow: Callable[[], None] | None = None) -> list[bytes]:
        """Return every rank's frame, in group order.

        Args:
            on_slow: called with growing pauses while this rank waits; see :data:`FIRST_CHECK_S`.
        """
        if self.is_single:
            return [frame]
        received, work = self._send(frame)
        self._wait(work, self.timeout_s + MARGIN_S, on_slow)
        if isinstance(work, RelayedExchange):
            received = received.roll(self.ranks.index(self.rank), 0)
        data = received.numpy().tobytes()
        return [data[start : start + frames.SIZE] for start in range(0, len(data), frames.SIZE)]

    def join_next(self, frame: bytes) -> None:
        """Join the next exchange without waiting for it, so that the other ranks can complete it."""
        self._unfinished = [entry for entry in self._unfinished if not entry[1].is_completed()]
        self._unfinished.append(self._send(frame))

    def _send(self, frame: bytes) -> tuple[torch.Tensor, ExchangeWork]:
        """Start an exchange; return the receive buffer and the work handle."""
        self._exchanges += 1
        if len(self.ranks) > RELAYED_ABOVE:
            assert self.group is not None, "several ranks have a group"
            rows = torch.empty(len(self.ranks), len(frame), dtype=torch.uint8, device="cpu")
            rows[0] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
            # Equal on all ranks, each of which takes part in every exchange.
            tag = self._exchanges % 2**20
            return rows, RelayedExchange(rows, self.ranks, self.rank, self.group, tag)
        # An all-to-all of equal frames, not an all-gather: Gloo passes an all-gather from rank to rank around a ring.
        outgoing = torch.frombuffer(bytearray(frame * len(self.ranks)), dtype=torch.uint8)
        received = torch.empty_like(outgoing)
        work = dist.all_to_all_single(received, outgoing, group=self.group, async_op=True)
        assert work is not None, "this rank is in the group"
        return received, work

    def _wait(self, work: ExchangeWork, limit_s: float, on_slow: Callable[[], None] | None) -> None:
        deadline, pause = time.monotonic() + limit_s, FIRST_CHECK_S
        while True:
            left = deadline - time.monotonic()
            try:
                # Waiting in slices: one long wait would leave no moment to check for a deadlock.
                work.wait(timedelta(seconds=max(min(pause, left), 0.001)))  # Gloo reads 0 as no limit
                return
            except RuntimeError:
                # Gloo raises RuntimeError for a slice that elapsed and for a failed collective; only the latter has completed.
                if work.is_completed():
                    work.wait()  # raises Gloo's error; returns if the exchange completed just after the slice
                    return
                if left <= pause:
                    raise
            if on_slow is not None:
                on_slow()
            pause = min(2 * pause, MAX_PAUSE_S)
